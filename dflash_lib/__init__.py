"""DFlash workspace: threaded drafter training whose compiles are correct, and visible.

Importing this package loads no torch: the public names below are resolved on first use, so that a log can be
read and a timeline drawn in a process that never needs a deep-learning framework.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# public name -> module that holds it; a module name maps to itself
_LAZY = {
    "RunConfig": "config",
    "Trainer": "threads",
    "Run": "threads",
    "Dashboard": "dashboard",
    "record_compiles": "compile_monitor",
}
_MODULES = frozenset(
    {
        *("blocks", "checkpoint", "collective", "compile_monitor", "config", "dashboard", "data", "decode", "doctor"),
        *("drafter", "evaluate", "events", "fx_patch", "hazards", "loss", "race_lab", "replica", "runs", "target"),
        *("threads", "timeline"),
    }
)
__all__ = ["Dashboard", "Run", "RunConfig", "Trainer", "fx_patch", "record_compiles", "timeline"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
