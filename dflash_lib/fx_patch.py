"""Gives every thread its own torch.compile state: install it first, before anything compiles.

::

    from dflash_lib import fx_patch; fx_patch.install()

Torch keeps much of what a compile touches in process-wide state; :mod:`dflash_lib.hazards` lists it, piece by piece.
``install`` isolates every piece that this torch has. A thread that compiles should also start with
:func:`run_in_thread`, work inside :func:`worker_context`, and compile functions made by :func:`own_entry_point`.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType

from dflash_lib import hazards
from dflash_lib.lanes import own_entry_point, run_in_thread, worker_context
from dflash_lib.rewriting import UnknownInternals

__all__ = [
    "Status",
    "UnknownInternals",
    "install",
    "isolated",
    "own_entry_point",
    "report",
    "run_in_thread",
    "status",
    "uninstall",
    "worker_context",
]

_lock = threading.RLock()


@dataclass(frozen=True)
class Status:
    """What is isolated: hazard name -> "isolated", "open" (present, not patched) or "absent" (torch has no such)."""

    installed: bool
    torch: str
    hazards: dict[str, str]


def install() -> None:
    """Isolates every hazard that this torch has. May be repeated, and called from several threads at once.

    Waits for compiles and traces that are running in other threads.

    Raises:
        UnknownInternals: this torch is not known; nothing has been changed then.
        RuntimeError: the calling thread is itself inside a trace, or another one has been for too long.
    """
    with _lock, _nobody_compiles():
        patched = []
        try:
            for hazard in hazards.ALL:
                if not hazard.patched and hazard.present():
                    patched.append(hazard)
                    hazard.patch()
        except BaseException:
            for hazard in reversed(patched):
                hazard.restore()
            raise


def uninstall() -> None:
    """Puts back torch as it was: the same objects with the same code. May be repeated.

    Raises:
        RuntimeError: the calling thread is itself inside a trace, or another one has been for too long.
    """
    with _lock, _nobody_compiles():
        for hazard in reversed(hazards.ALL):
            hazard.restore()


def status() -> Status:
    """What is isolated now."""
    import torch

    with _lock:
        states = {
            hazard.name: "isolated" if hazard.patched else "open" if hazard.present() else "absent"
            for hazard in hazards.ALL
        }
    values = states.values()
    return Status("isolated" in values and "open" not in values, torch.__version__, states)


def report() -> str:
    """:func:`status` for a person: one line a hazard."""
    now = status()
    width = max(map(len, now.hazards))
    lines = [f"torch {now.torch}: threads are {'isolated' if now.installed else 'NOT isolated'}"]
    for hazard in hazards.ALL:
        lines.append(f"  {hazard.name:<{width}}  {now.hazards[hazard.name]:<8}  {hazard.description}")
    return "\n".join(lines)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Isolation for the length of a ``with`` block; if it was installed before, it stays afterwards."""
    with _lock:
        before = status().installed
        install()
    try:
        yield
    finally:
        if not before:
            uninstall()


@contextlib.contextmanager
def _nobody_compiles(patience: float = 60.0) -> Iterator[None]:
    """Holds torch's compile lock while no thread is inside a trace either, so that code can be swapped safely."""
    from torch._dynamo.convert_frame import compile_lock
    from torch.fx import Tracer

    deadline = time.monotonic() + patience
    while True:
        with compile_lock:
            trace = inspect.unwrap(Tracer.trace).__code__
            tracing = [ident for ident, frame in sys._current_frames().items() if _inside(frame, trace)]
            if not tracing:
                yield
                return
        # A trace may itself want the compile lock, so it is not held while waiting.
        if threading.get_ident() in tracing:
            raise RuntimeError("fx_patch: called inside a trace; call it before anything traces or compiles")
        if time.monotonic() > deadline:
            names = ", ".join(thread.name for thread in threading.enumerate() if thread.ident in tracing)
            raise RuntimeError(f"fx_patch: thread {names} has been tracing for {patience:.0f} s; call it before that")
        time.sleep(0.01)


def _inside(frame: FrameType | None, code: CodeType) -> bool:
    """Whether that function is on the frame's stack (by place, not by identity: its code may have been swapped)."""
    while frame is not None:
        running = frame.f_code
        if (running.co_name, running.co_filename) == (code.co_name, code.co_filename):
            return True
        frame = frame.f_back
    return False
