"""Process state that a compile puts back when it ends: generators and defaults; and two one-thread-only contexts."""

from __future__ import annotations

import ast
import inspect
import random
import sys
import threading
from typing import Any, ClassVar

import torch

from dflash_lib.hazard import Hazard, PerThreadHazard
from dflash_lib.hazard_compiling import inner_function
from dflash_lib.per_thread import PerThreadGlobals
from dflash_lib.rewriting import Constant, UnknownInternals, names_in, rewrite, take_back, torchs_own


def _alone() -> bool:
    """Whether nobody else can have drawn a number or changed a setting: then torch's own ways are right."""
    return threading.active_count() == 1


def _preserve_global_state() -> Any:
    from torch._dynamo import convert_frame

    function = getattr(convert_frame, "preserve_global_state", None)
    if function is None or "set_rng_state" not in names_in(torchs_own(function)):
        raise UnknownInternals("torch._dynamo.convert_frame.preserve_global_state")
    return function


class _ToMethods(ast.NodeTransformer):
    """Calls by these dotted names become calls of methods of a constant."""

    def __init__(self, methods: dict[str, str]) -> None:
        self.methods = methods

    def __call__(self, definition: ast.FunctionDef, constant: Constant) -> None:
        self.constant = constant
        self.visit(definition)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        method = self.methods.get(ast.unparse(node.func))
        if method:
            node.func = ast.copy_location(ast.Attribute(self.constant(), method, ast.Load()), node.func)
        return node


class Generators(Hazard):
    name = "generators"
    description = (
        "a compile rewinds the process's random generators (CPU, CUDA default, Python's random) to where they were "
        "when it began: numbers that other threads drew meanwhile are drawn again"
    )
    where = (
        "torch._dynamo.convert_frame.preserve_global_state, torch._dynamo.utils.preserve_rng_state, random.setstate in "
        "the frame evaluator"
    )
    _METHODS: ClassVar = {
        "torch.random.set_rng_state": "cpu",
        "torch.cuda.set_rng_state": "cuda",
        "random.setstate": "python",
    }

    def __init__(self) -> None:
        self._python: _PythonGenerator | None = None

    def present(self) -> bool:
        from torch._dynamo import utils

        if not hasattr(utils, "preserve_rng_state"):
            raise UnknownInternals("torch._dynamo.utils.preserve_rng_state")
        return bool(_preserve_global_state())

    def isolate(self) -> None:
        """With other threads alive, generators go on from where they are; a lone thread has torch's behaviour."""
        from torch._dynamo import utils

        function = _preserve_global_state()
        by_evaluator = "setstate" not in names_in(torchs_own(function))
        rewrite(self, function, _ToMethods(self._METHODS), _Generators(), makes_functions=True)
        rewrite(self, inspect.unwrap(utils.preserve_rng_state), _ToMethods(self._METHODS), _Generators())
        if by_evaluator:
            # From 2.12 on the frame evaluator does it, through the module's attributes.
            self._python = _PythonGenerator()
            self._python.install(self)

    def undo(self) -> None:
        take_back(self)
        if self._python is not None:
            self._python.uninstall()
            self._python = None


class _Generators:
    @staticmethod
    def cpu(state: Any) -> None:
        if _alone():
            torch.random.set_rng_state(state)

    @staticmethod
    def cuda(state: Any) -> None:
        if _alone():
            torch.cuda.set_rng_state(state)

    @staticmethod
    def python(state: Any) -> None:
        if _alone():
            random.setstate(state)


class _PythonGenerator:
    """Lets ``random.setstate`` pass by when the frame evaluator calls it, and only then.

    The evaluator calls ``random.getstate()``, then Dynamo's callback, then ``random.setstate`` with the very object
    it got. A program's own call has a caller that names the function, or a state that is another object.
    """

    def __init__(self) -> None:
        self.getstate, self.setstate = random.getstate, random.setstate
        self._seen = type("Seen", (threading.local,), {"last": None, "dynamo": None})()

    def install(self, owner: object) -> None:
        from torch._dynamo.convert_frame import CatchErrorsWrapper

        seen, getstate, setstate = self._seen, self.getstate, self.setstate

        def patched_getstate() -> Any:
            state = getstate()
            if "getstate" not in sys._getframe(1).f_code.co_names:
                seen.last = state
            return state

        def patched_setstate(state: Any) -> None:
            if state is seen.dynamo and state is not None:
                seen.dynamo = seen.last = None
                if not _alone():
                    return
            setstate(state)

        def callback_begins() -> None:
            seen.dynamo = seen.last

        rewrite(owner, CatchErrorsWrapper.__call__, _call_first, callback_begins)
        random.getstate, random.setstate = patched_getstate, patched_setstate

    def uninstall(self) -> None:
        random.getstate, random.setstate = self.getstate, self.setstate


def _call_first(definition: ast.FunctionDef, constant: Constant) -> None:
    """The constant, a function without arguments, is called before the body."""
    function = ast.Attribute(constant(), "__call__", ast.Load())
    call = ast.Expr(ast.Call(func=function, args=[], keywords=[]))
    definition.body.insert(0, ast.copy_location(call, definition.body[0]))


class Defaults(Hazard):
    name = "defaults"
    description = (
        "a compile puts back the default dtype, deterministic mode and float32 precision as they were when it began, "
        "undoing what another thread set meanwhile"
    )
    where = "torch._dynamo.convert_frame.preserve_global_state"
    _METHODS: ClassVar = {
        "torch.set_default_dtype": "default_dtype",
        "torch.use_deterministic_algorithms": "deterministic",
        "torch._C._set_fp32_precision_setter": "precision",
        "torch._C._set_cublas_allow_tf32": "tf32",
        "guards.check": "unchanged",
    }

    def present(self) -> bool:
        return bool(_preserve_global_state())

    def isolate(self) -> None:
        """With other threads alive, these settings stay as they are."""
        policy = _Defaults()
        rewrite(
            self,
            _preserve_global_state(),
            _keep_guards_at_hand(_ToMethods(self._METHODS)),
            policy,
            makes_functions=True,
        )

    def undo(self) -> None:
        take_back(self)


def _keep_guards_at_hand(transform: _ToMethods) -> Any:
    """``guards.check()`` becomes ``policy.unchanged(guards)``."""

    def apply(definition: ast.FunctionDef, constant: Constant) -> None:
        for node in ast.walk(inner_function(definition, "_fn")):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "guards.check":
                node.args = [ast.copy_location(ast.Name("guards", ast.Load()), node)]
        transform(definition, constant)

    return apply


class _Defaults:
    # What a compile can only have changed itself (the rest is the process's, and another thread may set it).
    _OWN = ("grad_mode", "autocast", "torch_function")

    @staticmethod
    def default_dtype(value: Any) -> None:
        if _alone():
            torch.set_default_dtype(value)

    @staticmethod
    def deterministic(value: bool, warn_only: bool = False) -> None:
        if _alone():
            torch.use_deterministic_algorithms(value, warn_only=warn_only)

    @staticmethod
    def precision(*arguments: Any) -> None:
        if _alone():
            torch._C._set_fp32_precision_setter(*arguments)

    @staticmethod
    def tf32(value: bool) -> None:
        if _alone():
            torch._C._set_cublas_allow_tf32(value)

    @classmethod
    def unchanged(cls, guards: Any) -> bool:
        return bool(guards.check()) or not (_alone() or any(own in guards.reason() for own in cls._OWN))


class MetricsContext(PerThreadHazard):
    name = "metrics-context"
    description = "two threads that compile or run backward at once raise about a metrics context (up to 2.10)"
    where = "torch._dynamo.utils._METRICS_CONTEXT, _RUNTIME_METRICS_CONTEXT"

    def __init__(self) -> None:
        from torch._dynamo import utils

        names = [name for name in ("_METRICS_CONTEXT", "_RUNTIME_METRICS_CONTEXT") if hasattr(utils, name)]
        super().__init__(PerThreadGlobals("torch._dynamo.utils", {name: getattr(utils, name) for name in names}))

    def present(self) -> bool:
        from torch._dynamo import utils

        if self.variables[0].defaults:
            return True
        if isinstance(getattr(utils, "_metrics_context_tls", None), threading.local):
            return False
        raise UnknownInternals("torch._dynamo.utils._metrics_context_tls")


class CudagraphTrees(Hazard):
    name = "cudagraph-trees"
    description = (
        "mode='reduce-overhead' in a thread other than the main one stops with a bare AssertionError (up to 2.12); "
        "isolated, the error says what to do"
    )
    where = "torch._inductor.cudagraph_trees.get_obj"

    def present(self) -> bool:
        from torch._inductor import cudagraph_trees

        function = getattr(cudagraph_trees, "get_obj", None)
        if function is None:
            raise UnknownInternals(self.where)
        # From 2.13 on a new thread gets trees of its own.
        return "_initialize_tls" not in names_in(torchs_own(function))

    def isolate(self) -> None:
        from torch._inductor import cudagraph_trees

        def refuse(local: Any, attr_name: str) -> None:
            if not hasattr(local, attr_name) and not torch._C._is_key_in_tls(attr_name):
                raise RuntimeError(
                    "CUDA graph trees (mode='reduce-overhead' or 'max-autotune') work in the main thread only in "
                    f"torch {torch.__version__}: compile with the default mode in this thread"
                )

        def transform(definition: ast.FunctionDef, constant: Constant) -> None:
            names: list[ast.expr] = [ast.Name(argument.arg, ast.Load()) for argument in definition.args.args]
            function = ast.Attribute(constant(), "__call__", ast.Load())
            call = ast.Expr(ast.Call(func=function, args=names, keywords=[]))
            definition.body.insert(0, ast.copy_location(call, definition.body[0]))

        rewrite(self, cudagraph_trees.get_obj, transform, refuse)

    def undo(self) -> None:
        take_back(self)
