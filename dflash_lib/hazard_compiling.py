"""Compiling: flags that one thread's compile shows to all others, and backward that leaves its thread."""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.util
import inspect
import threading
import types
from pathlib import Path
from typing import Any

import torch

from dflash_lib.hazard import Hazard, PerThreadHazard
from dflash_lib.per_thread import PerThreadGlobals
from dflash_lib.rewriting import Constant, Transform, UnknownInternals, names_in, rewrite, take_back, torchs_own

_VARIABLES = ("_is_compiling_flag", "_is_exporting_flag", "_is_non_strict_tracing_flag")
_FLAGS = PerThreadGlobals(
    "torch.compiler", {name: False for name in _VARIABLES if name in vars(torch.compiler)}, heal=True
)


class CompilingFlags(PerThreadHazard):
    name = "compiling-flags"
    description = (
        "while one thread compiles (2.13 on) or exports, torch.compiler.is_compiling() is True in every thread, so "
        "optimizers, attention and libraries take another path: results differ silently"
    )
    where = "torch.compiler._is_compiling_flag, _is_exporting_flag, _is_non_strict_tracing_flag"

    def __init__(self) -> None:
        super().__init__(_FLAGS)

    def present(self) -> bool:
        if "_is_compiling_flag" not in _FLAGS.defaults:
            raise UnknownInternals("torch.compiler._is_compiling_flag")
        return True

    def isolate(self) -> None:
        super().isolate()
        # Two contexts replace backward for the process, and the replacement insists on the (now per-thread) flag.
        for name in ("_patch_autograd_grad", "_patch_engine_backward"):
            context = vars(torch.compiler).get(name)
            if context is not None:
                rewrite(self, inspect.unwrap(context), _usual_for_others, None)

    def undo(self) -> None:
        take_back(self)
        super().undo()


def _usual_for_others(definition: ast.FunctionDef, constant: Constant) -> None:
    """In a replacement of backward, "not tracing: raise" becomes "not tracing: call the original"."""
    for replacement in ast.walk(definition):
        if isinstance(replacement, ast.FunctionDef) and replacement is not definition:
            for node in replacement.body:
                if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
                    node.body = [copy.deepcopy(replacement.body[-1])]


class HiddenStates(CompilingFlags):
    """A consequence of :class:`CompilingFlags`, so the same patch: either of the two isolates both."""

    name = "hidden-states"
    description = (
        "transformers' output_hidden_states collects into a plain global while is_compiling() is True anywhere: "
        "forwards return hidden states of another thread, without an error"
    )
    where = "transformers.utils.output_capturing.CompileableContextVar"

    def present(self) -> bool:
        # Looks at the file: importing transformers takes seconds.
        found = importlib.util.find_spec("transformers")
        if found is None or not found.submodule_search_locations:
            return False
        file = Path(found.submodule_search_locations[0]) / "utils" / "output_capturing.py"
        return file.exists() and "class CompileableContextVar" in file.read_text("utf-8") and super().present()


class GraphBreakMode(PerThreadHazard):
    name = "graph-break-mode"
    description = "error_on_graph_break(True) in one thread makes graph breaks of every other thread's compile errors"
    where = "torch._dynamo.utils._error_on_graph_break"

    def __init__(self) -> None:
        super().__init__(PerThreadGlobals("torch._dynamo.utils", {"_error_on_graph_break": False}, heal=True))

    def present(self) -> bool:
        from torch._dynamo import utils

        return hasattr(utils, "_set_error_on_graph_break") and super().present()


class CudagraphOverride(PerThreadHazard):
    name = "cudagraph-override"
    description = "override_cudagraphs(...) in one thread decides for every other thread's compile, and sticks (2.14)"
    where = "torch._dynamo.utils._cudagraph_override"

    def __init__(self) -> None:
        super().__init__(PerThreadGlobals("torch._dynamo.utils", {"_cudagraph_override": None}, heal=True))

    def present(self) -> bool:
        from torch._dynamo import utils

        return hasattr(utils, "_set_cudagraph_override") and super().present()


class DispatchModes(PerThreadHazard):
    name = "dispatch-modes"
    description = (
        "while one thread is inside a dispatch mode, code that another thread compiles for the first time is skipped "
        "and runs eagerly for good, without a word (2.9, 2.10)"
    )
    where = "torch.utils._python_dispatch._is_in_any_mode_without_ignore_compile_internals and its like"

    def __init__(self) -> None:
        names = ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode")
        flags = dict.fromkeys((*names, "_is_in_any_mode_without_ignore_compile_internals"), False)
        super().__init__(PerThreadGlobals("torch.utils._python_dispatch", flags, heal=True))

    def present(self) -> bool:
        from torch._dynamo.convert_frame import CatchErrorsWrapper

        # From 2.11 on Dynamo looks at the calling thread's own stack of modes.
        callback: Any = CatchErrorsWrapper.__call__
        if "any_torch_dispatch_mode_on_stack" in names_in(torchs_own(callback)):
            return False
        return super().present()


class BackwardDeadlock(Hazard):
    name = "backward-deadlock"
    description = (
        "two threads on one GPU stop for ever: one traces a joint graph, holds the compile lock and waits for the "
        "device's autograd thread, which compiles the other's backward and waits for the compile lock"
    )
    where = "torch._dynamo.convert_frame.compile_lock, torch.fx.Tracer.trace, the autograd device threads"

    def present(self) -> bool:
        from torch._dynamo import convert_frame

        for name in ("compile_lock", "preserve_global_state"):
            if not hasattr(convert_frame, name):
                raise UnknownInternals(f"torch._dynamo.convert_frame.{name}")
        return True

    def isolate(self) -> None:
        """While a thread traces or compiles, backward runs in it: it never waits for a device's autograd thread."""
        from torch._dynamo import convert_frame

        here = _BackwardHere()
        rewrite(self, convert_frame.preserve_global_state, _inner_inside("_fn"), here, makes_functions=True)
        rewrite(self, inspect.unwrap(torch.fx.Tracer.trace), _inside, here)  # Dynamo wraps it in disable()

    def undo(self) -> None:
        take_back(self)


class BackwardContext(Hazard):
    name = "backward-context"
    description = (
        "backward hands the caller's settings to the device's autograd thread, which cannot enter them while another "
        "one has (2.12, 2.13), and its compile events and errors belong to no worker"
    )
    where = "torch.autograd.graph._engine_run_backward"

    def present(self) -> bool:
        from torch.autograd import graph

        run = getattr(graph, "_engine_run_backward", None)
        if not isinstance(run, types.FunctionType):
            raise UnknownInternals(self.where)
        return "copy_context" in names_in(torchs_own(run))

    def isolate(self) -> None:
        """Backward that a thread other than the main one asks for runs in that thread."""
        from torch.autograd import graph

        rewrite(self, graph._engine_run_backward, _inside, _BackwardHere(workers_only=True))

    def undo(self) -> None:
        take_back(self)


class _BackwardHere:
    """Gives a context in which backward runs in the calling thread."""

    def __init__(self, workers_only: bool = False) -> None:
        self._workers_only = workers_only

    def context(self) -> contextlib.AbstractContextManager[object]:
        if self._workers_only and threading.current_thread() is threading.main_thread():
            return contextlib.nullcontext()
        return torch.autograd.set_multithreading_enabled(False)


def _inside(definition: ast.FunctionDef, constant: Constant) -> None:
    """``def f(...): body`` becomes ``def f(...): with constant.context(): body``."""
    call = ast.Call(func=ast.Attribute(constant(), "context", ast.Load()), args=[], keywords=[])
    block = ast.With(items=[ast.withitem(context_expr=call)], body=definition.body)
    for node in (block, *ast.walk(call)):
        ast.copy_location(node, definition)
    definition.body = [block]


def _inner_inside(name: str) -> Transform:
    """:func:`_inside` for the function of that name inside the given one."""

    def transform(definition: ast.FunctionDef, constant: Constant) -> None:
        _inside(inner_function(definition, name), constant)

    return transform


def inner_function(definition: ast.FunctionDef, name: str) -> ast.FunctionDef:
    """The function of that name defined inside ``definition``.

    Raises:
        UnknownInternals: there is none.
    """
    for node in ast.walk(definition):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise UnknownInternals(f"{definition.name}.<locals>.{name}")
