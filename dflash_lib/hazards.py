"""The registry of hazards: one object for each piece of process-wide compile state that threads share."""

from __future__ import annotations

from dflash_lib.hazard import Hazard, Outcome
from dflash_lib.hazard_compiling import BackwardContext, BackwardDeadlock, CompilingFlags, GraphBreakMode, HiddenStates
from dflash_lib.hazard_settings import AutomaticDynamic, DynamicSettings, InheritedSettings, RecompileLimit
from dflash_lib.hazard_state import CudagraphTrees, Defaults, Generators, MetricsContext
from dflash_lib.hazard_tracing import CompilationEnvironment, SkippedGraphModules, TraceContext, TracingFlag
from dflash_lib.module_calls import ModuleCalls

__all__ = ["ALL", "Hazard", "Outcome", "by_name"]

ALL: list[Hazard] = [
    TracingFlag(),
    ModuleCalls(),
    CompilingFlags(),
    CompilationEnvironment(),
    HiddenStates(),
    InheritedSettings(),
    DynamicSettings(),
    RecompileLimit(),
    AutomaticDynamic(),
    BackwardDeadlock(),
    BackwardContext(),
    Generators(),
    Defaults(),
    MetricsContext(),
    CudagraphTrees(),
    TraceContext(),
    SkippedGraphModules(),
    GraphBreakMode(),
]


def by_name(name: str) -> Hazard:
    """The hazard of that name.

    Raises:
        KeyError: there is none; the message lists the names.
    """
    for hazard in ALL:
        if hazard.name == name:
            return hazard
    raise KeyError(f"no hazard {name!r}; there are {', '.join(hazard.name for hazard in ALL)}")
