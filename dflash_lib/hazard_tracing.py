"""Tracing: the "somebody traces" flag and its writers, what a trace notes down, and whose guard fake tensors use."""

from __future__ import annotations

import _thread
import functools
import importlib
import threading
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.fx._symbolic_trace as symbolic_trace

from dflash_lib.hazard import Hazard, PerThreadHazard
from dflash_lib.per_thread import PerThreadGlobals
from dflash_lib.rewriting import UnknownInternals, names_in, torchs_own

_FLAG = PerThreadGlobals("torch.fx._symbolic_trace", {"_is_fx_tracing_flag": False}, heal=True)


class TracingFlag(PerThreadHazard):
    name = "tracing-flag"
    description = (
        "while one thread traces, another thread's compiled call raises 'Detected that you are using FX to "
        "symbolically trace a dynamo-optimized function'"
    )
    where = "torch.fx._symbolic_trace._is_fx_tracing_flag"

    def __init__(self) -> None:
        super().__init__(_FLAG)

    def present(self) -> bool:
        if not _FLAG.missing():
            return True
        # torch 2.14 made it thread-local itself.
        if isinstance(getattr(symbolic_trace, "_is_fx_tracing_tls", None), threading.local):
            return False
        raise UnknownInternals("torch.fx._symbolic_trace._is_fx_tracing_flag")


class CompilationEnvironment(TracingFlag):
    """The same variable as :class:`TracingFlag`, so the same patch: either of the two isolates both."""

    name = "compilation-environment"
    description = (
        "higher-order operators save, clear and restore the tracing flag; when that overlaps another thread's trace, "
        "the flag stays set for good and every compiled call of the process raises"
    )
    where = "torch._higher_order_ops.utils._set_compilation_env"

    def present(self) -> bool:
        if not super().present():
            return False
        from torch._higher_order_ops import utils

        writer = getattr(utils, "_set_compilation_env", None)
        if writer is None:
            raise UnknownInternals(self.where)
        return "_is_fx_tracing_flag" in names_in(torchs_own(writer.__wrapped__))


class TraceContext(PerThreadHazard):
    name = "trace-context"
    description = (
        "what a trace notes down for the nodes it makes (stack traces, annotations, who traces) lands in the graph "
        "that another thread is tracing"
    )
    where = (
        "torch.fx.traceback.current_meta, should_preserve_node_meta, current_replay_node; torch.fx.experimental."
        "proxy_tensor._CURRENT_MAKE_FX_TRACER; torch.fx._lazy_graph_module; torch._library.fake_impl.global_ctx_getter"
    )
    _REQUIRED: ClassVar = {"torch.fx.traceback": ("current_meta", "should_preserve_node_meta")}
    # They came over several releases: those that are there are isolated.
    _OPTIONAL: ClassVar = {
        "torch.fx.traceback": ("current_replay_node", "_should_preserve_node_meta"),
        "torch.fx.experimental.proxy_tensor": ("_CURRENT_MAKE_FX_TRACER",),
        "torch.fx._lazy_graph_module": ("_use_lazy_graph_module_flag", "_force_skip_lazy_graph_module_flag"),
        "torch._library.fake_impl": ("global_ctx_getter",),
    }

    def __init__(self) -> None:
        groups: list[PerThreadGlobals] = []
        for name, optional in self._OPTIONAL.items():
            module = importlib.import_module(name)
            defaults: dict[str, Any] = {key: getattr(module, key) for key in optional if key in vars(module)}
            defaults |= {key: getattr(module, key, None) for key in self._REQUIRED.get(name, ())}
            if defaults:
                groups.append(PerThreadGlobals(name, defaults))
        super().__init__(*groups)


class SkippedGraphModules(PerThreadHazard):
    name = "skipped-graph-modules"
    description = (
        "while one thread compiles, the GraphModules that other threads build go through Dynamo's own function, which "
        "marks their code as generated and to be skipped"
    )
    where = "torch.fx.graph_module._forward_from_src"

    def __init__(self) -> None:
        from torch._dynamo.convert_frame import original_forward_from_src

        super().__init__(
            PerThreadGlobals("torch.fx.graph_module", {"_forward_from_src": original_forward_from_src}, heal=True)
        )


class DeviceGuard(Hazard):
    name = "device-guard"
    description = (
        "where no GPU is to be seen, the first thread that traces with fake tensors owns the process's CUDA device "
        "guard and takes it along when it ends: the next compile of any thread reads freed memory (2.10, 2.11)"
    )
    where = "torch._C._ensureCUDADeviceGuardSet, called by torch._subclasses.FakeTensorMode"

    def present(self) -> bool:
        from torch._subclasses import FakeTensorMode

        enter: Any = FakeTensorMode.__enter__
        if "_ensureCUDADeviceGuardSet" not in names_in(torchs_own(enter)):
            return False
        return not torch.cuda.device_count() and _guard_belongs_to_a_thread()

    def isolate(self) -> None:
        """A thread that never ends asks for the guard first: the main one, or else one that only sleeps."""
        if threading.current_thread() is threading.main_thread():
            torch._C._ensureCUDADeviceGuardSet()
            return
        asked, for_ever = threading.Event(), threading.Event()

        def ask_and_stay() -> None:
            try:
                torch._C._ensureCUDADeviceGuardSet()
            finally:
                asked.set()
            for_ever.wait()

        _thread.start_new_thread(ask_and_stay, ())  # not one of threading's: nobody is to count or join it
        asked.wait()

    def undo(self) -> None:
        """Nothing: the guard that a living thread owns does what a thread's own would, and cannot be given up."""


@functools.cache
def _guard_belongs_to_a_thread() -> bool:
    """Whether torch lacks the guard of static lifetime that later releases have (it shows in C++ only)."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    return not library.exists() or b"fake_cuda_guard" not in library.read_bytes()
