"""The registry of hazards: one object for each piece of process-wide compile state that threads share."""

from __future__ import annotations

from dflash_lib.hazard import Hazard, Outcome
from dflash_lib.hazard_tracing import CompilationEnvironment, SkippedGraphModules, TraceContext, TracingFlag
from dflash_lib.module_calls import ModuleCalls

__all__ = ["ALL", "Hazard", "Outcome", "by_name"]

ALL: list[Hazard] = [
    TracingFlag(),
    ModuleCalls(),
    CompilationEnvironment(),
    TraceContext(),
    SkippedGraphModules(),
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
