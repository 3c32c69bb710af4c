"""The registry of hazards: one object for each piece of process-wide compile state that threads share."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from dflash_lib import provocations
from dflash_lib.hazard import Hazard, Outcome
from dflash_lib.hazard_compiling import (
    BackwardContext,
    BackwardDeadlock,
    CompilingFlags,
    CudagraphOverride,
    DispatchModes,
    GraphBreakMode,
    HiddenStates,
)
from dflash_lib.hazard_settings import AutomaticDynamic, DynamicSettings, InheritedSettings, RecompileLimit
from dflash_lib.hazard_state import CudagraphTrees, Defaults, Generators, MetricsContext
from dflash_lib.hazard_tracing import (
    CompilationEnvironment,
    DeviceGuard,
    SkippedGraphModules,
    TraceContext,
    TracingFlag,
)
from dflash_lib.module_calls import ModuleCalls

__all__ = ["ALL", "Hazard", "Outcome", "by_name", "main_text", "matrix", "table"]

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
    CudagraphOverride(),
    DispatchModes(),
    DeviceGuard(),
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


def matrix(
    names: Sequence[str] | None = None,
    *,
    seconds: float = 2.0,
    timeout: float = 90.0,
    progress: Callable[[str], object] = lambda line: None,
) -> list[dict[str, Any]]:
    """Every hazard with what this torch does: is it there, what happens unpatched, what happens patched.

    Runs each hazard's program twice, in watched subprocesses: a minute or three in all.

    Args:
        names: hazards, in this order; None: all.
        seconds: how long each program tries.
        timeout: seconds after which a program counts as hung.
        progress: gets one line for each program that has ended.

    Returns:
        One dict a hazard: ``hazard, where, present, unpatched, patched, holds`` (the two outcomes as dicts);
        ``holds`` is whether isolation does what it says here: True, False, or None where nothing could be shown.
    """
    chosen = list(names) if names is not None else [hazard.name for hazard in ALL]
    outcomes: list[dict[str, Outcome]] = [{}, {}]
    for patched in (False, True):
        for name, outcome in provocations.run_many(chosen, patched=patched, seconds=seconds, timeout=timeout):
            outcomes[patched][name] = outcome
            progress(f"{'patched' if patched else 'unpatched'} {name}: {outcome.status} ({outcome.seconds:.1f} s)")
    return [_row(by_name(name), *(each[name] for each in outcomes)) for name in chosen]


def _row(hazard: Hazard, unpatched: Outcome, patched: Outcome) -> dict[str, Any]:
    return {
        "hazard": hazard.name,
        "where": hazard.where,
        "present": hazard.present(),
        "unpatched": asdict(unpatched),
        "patched": asdict(patched),
        "holds": _holds(hazard.present(), unpatched, patched),
    }


def _holds(present: bool, unpatched: Outcome, patched: Outcome) -> bool | None:
    if "not applicable" in (unpatched.status, patched.status):
        return None
    if patched.status != "clean":
        return False
    return True if unpatched.status != "clean" or not present else None


def table(rows: list[dict[str, Any]]) -> str:
    """:func:`matrix` as lines a person reads: 'failed 20/2680' is the number of faults and of attempts."""

    def cell(outcome: dict[str, Any]) -> str:
        if outcome["status"] in ("clean", "failed"):
            return f"{outcome['status']} {outcome['failures']}/{outcome['attempts']}"
        return str(outcome["status"])

    lines = [f"torch {torch.__version__}, {platform.machine()}, {_device()}"]
    lines.append(f"{'hazard':<24} {'present':<8} {'unpatched':<20} {'patched':<20} isolation")
    words = {True: "holds", False: "FAILS", None: "not shown"}
    for row in rows:
        lines.append(
            f"{row['hazard']:<24} {'yes' if row['present'] else 'no':<8} {cell(row['unpatched']):<20} "
            f"{cell(row['patched']):<20} {words[row['holds']]}"
        )
    return "\n".join(lines)


def main_text(*, as_json: bool = False, names: Sequence[str] | None = None, seconds: float = 2.0) -> tuple[str, int]:
    """What ``python -m dflash_lib hazards`` prints, and its exit code (1 when isolation fails anywhere).

    Args:
        as_json: put the whole matrix, as one JSON object, on the last line.
        names: only these hazards.
        seconds: how long each program tries.
    """
    rows = matrix(names, seconds=seconds, progress=lambda line: print(line, file=sys.stderr, flush=True))
    text = table(rows)
    if as_json:
        text += "\n" + json.dumps({"v": 1, "torch": torch.__version__, "device": _device(), "hazards": rows})
    return text, int(any(row["holds"] is False for row in rows))


def _device() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":  # python -m dflash_lib.hazards [--json]: the same without the shell's other parts
    printed, code = main_text(as_json="--json" in sys.argv)
    print(printed)
    sys.exit(code)
