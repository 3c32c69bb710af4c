"""Tracing: the "somebody traces" flag and who else writes it, and what a trace notes down for its graph."""

from __future__ import annotations

import importlib
import threading

import torch.fx._symbolic_trace as symbolic_trace

from dflash_lib.hazard import Hazard
from dflash_lib.per_thread import PerThreadGlobals
from dflash_lib.rewriting import UnknownInternals, names_in

_FLAG = PerThreadGlobals("torch.fx._symbolic_trace", {"_is_fx_tracing_flag": False}, heal=True)


class TracingFlag(Hazard):
    name = "tracing-flag"
    description = (
        "while one thread traces, another thread's compiled call raises 'Detected that you are using FX to "
        "symbolically trace a dynamo-optimized function'"
    )
    where = "torch.fx._symbolic_trace._is_fx_tracing_flag"

    def present(self) -> bool:
        if not _FLAG.missing():
            return True
        # torch 2.14 made it thread-local itself.
        if isinstance(getattr(symbolic_trace, "_is_fx_tracing_tls", None), threading.local):
            return False
        raise UnknownInternals(self.where)

    def patch(self) -> None:
        _FLAG.install()

    def restore(self) -> None:
        _FLAG.uninstall()

    @property
    def patched(self) -> bool:
        return _FLAG.installed


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
        return "_is_fx_tracing_flag" in names_in(writer.__wrapped__.__code__)


class TraceContext(Hazard):
    name = "trace-context"
    description = (
        "what a trace notes down for the nodes it makes (stack traces, annotations, who traces) lands in the graph "
        "that another thread is tracing"
    )
    where = (
        "torch.fx.traceback.current_meta, should_preserve_node_meta; torch.fx.experimental.proxy_tensor."
        "_CURRENT_MAKE_FX_TRACER; torch.fx._lazy_graph_module flags; torch._library.fake_impl.global_ctx_getter"
    )
    _VARIABLES = (
        ("torch.fx.traceback", "current_meta"),
        ("torch.fx.traceback", "current_replay_node"),
        ("torch.fx.traceback", "should_preserve_node_meta"),
        ("torch.fx.traceback", "_should_preserve_node_meta"),
        ("torch.fx.experimental.proxy_tensor", "_CURRENT_MAKE_FX_TRACER"),
        ("torch.fx._lazy_graph_module", "_use_lazy_graph_module_flag"),
        ("torch.fx._lazy_graph_module", "_force_skip_lazy_graph_module_flag"),
        ("torch._library.fake_impl", "global_ctx_getter"),
    )

    def __init__(self) -> None:
        self._globals: list[PerThreadGlobals] = []

    def present(self) -> bool:
        for module, name in self._VARIABLES[:3]:
            if not hasattr(importlib.import_module(module), name):
                raise UnknownInternals(f"{module}.{name}")
        return True

    def patch(self) -> None:
        """Those of the variables that this torch has (they came over several releases)."""
        if self._globals:
            return
        by_module: dict[str, dict[str, object]] = {}
        for module, name in self._VARIABLES:
            found = vars(importlib.import_module(module))
            if name in found:
                by_module.setdefault(module, {})[name] = found[name]
        for module, defaults in by_module.items():
            self._globals.append(PerThreadGlobals(module, defaults))
            self._globals[-1].install()

    def restore(self) -> None:
        while self._globals:
            self._globals.pop().uninstall()

    @property
    def patched(self) -> bool:
        return bool(self._globals)


class SkippedGraphModules(Hazard):
    name = "skipped-graph-modules"
    description = (
        "while one thread compiles, every GraphModule that another thread builds is marked as never to be compiled, "
        "so compiling it later silently leaves it eager"
    )
    where = "torch.fx.graph_module._forward_from_src"

    def __init__(self) -> None:
        from torch._dynamo.convert_frame import original_forward_from_src

        self._globals = PerThreadGlobals(
            "torch.fx.graph_module", {"_forward_from_src": original_forward_from_src}, heal=True
        )

    def present(self) -> bool:
        for name in self._globals.missing():
            raise UnknownInternals(name)
        return True

    def patch(self) -> None:
        self._globals.install()

    def restore(self) -> None:
        self._globals.uninstall()

    @property
    def patched(self) -> bool:
        return self._globals.installed
