"""Tracing: the "somebody traces" flag and who else writes it, and what a trace notes down for its graph."""

from __future__ import annotations

import importlib
import threading
from typing import Any, ClassVar

import torch.fx._symbolic_trace as symbolic_trace

from dflash_lib.hazard import PerThreadHazard
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
