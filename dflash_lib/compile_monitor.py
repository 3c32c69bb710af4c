"""Writes every compile of this process as an event, in the lane of the thread where it happened.

>>> with record_compiles("events.jsonl") as recording:   # anybody's torch.compile code, any number of threads
...     for batch in data:
...         loss = step(batch)
...         recording.step(loss=loss.item())              # optional: gives the compiles a step to belong to

What a compile event holds is in docs/contracts.md; how it is overheard, in compile_hooks.py. ``first`` and
``recompile`` follow torch's own cache, not names: a cell run again makes a new function, whose first compile is a
first one, and entries that vanish with a deleted model are not counted against the limit.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import reasons
from .compile_hooks import InFlight, hub
from .compile_metrics import Compile
from .events import EventLog, current_plan, current_step, next_attempt, planned

_log = logging.getLogger(__name__)


class CompileMonitor:
    """Writes this process's compiles to a log, from :meth:`install` until :meth:`uninstall`; a context manager too.

    Monitors nest and may overlap in time: each writes every compile to its own log.

    Args:
        log: where events go.
        states: also write ``state`` events (waiting_compile, compiling, running) of threads inside a
            :func:`events.lane`, so that a view can show who compiles and who waits for it.
    """

    def __init__(self, log: EventLog, *, states: bool = True) -> None:
        self.log = log
        self.states = states
        self._installed = False
        self._warned: set[tuple[str, str | None, str]] = set()  # (thread, frame, alarm) already raised
        self._met: set[tuple[str, str | None, str]] = set()  # (thread, frame, plan) compiled for already
        self._planned: dict[str | None, str] = {}  # compile id -> what it was planned for

    def install(self) -> None:
        """Begins to watch; what this torch does not show becomes a ``warning`` event. Twice is once."""
        if not self._installed:
            self._installed = True
            for message in hub.add(self):
                self.log.emit("warning", message=message)

    def uninstall(self) -> None:
        """Ends watching; torch's functions are as they were once the last monitor is gone."""
        if self._installed:
            self._installed = False
            hub.remove(self)

    def __enter__(self) -> CompileMonitor:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    def watch(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a compiled entry point, so that its events say so (field ``entry``) and its waits are always known.

        Where torch's compile lock cannot be timed, the time from the call to the compile's start is the wait.
        """
        name = getattr(compiled, "__name__", type(compiled).__name__)

        @functools.wraps(compiled, updated=())
        def watched(*args: Any, **kwargs: Any) -> Any:
            here = hub.here
            before, here.entered, here.entry = (here.entered, here.entry), time.time(), name
            try:
                return compiled(*args, **kwargs)
            finally:
                here.entered, here.entry = before

        return watched

    def in_flight(self) -> list[dict[str, Any]]:
        """Compiles going on now: ``thread, device, frame, state`` ("compiling" or "waiting_compile"), ``since`` on the
        log's clock, and ``seconds`` until now."""
        offset = self.log.now() - time.monotonic()
        return [{**flight, "since": flight["since"] + offset} for flight in in_flight()]

    # --- what the hub says -------------------------------------------------------------------------------------------
    def compiled(self, compile: Compile, wait: float, lane: tuple[str, str]) -> None:
        fields = dict(compile.fields)
        now = self.log.now()
        if compile.wall_start is None:
            start = now - fields["seconds"]
        else:
            start = now - (time.time() - compile.wall_start)
            if compile.backward:
                start += wait  # torch's clock ran while the backward waited for the lock
        thread, device = lane
        step = current_step()
        self.log.emit(
            "compile",
            thread=thread,
            device=device,
            step=self.log.step_in_progress(thread) if step is None else step,
            start=round(max(0.0, start), 6),
            wait_seconds=round(wait, 6),
            entry=hub.here.entry,
            planned=self._plan(fields, thread),
            **fields,
        )
        self._alarms(fields, thread, device)

    def _plan(self, fields: dict[str, Any], thread: str) -> str | None:
        """What this compile was planned for, see :func:`events.planned`; a backward is what its forward is."""
        plan, compile_id = current_plan(), fields["compile_id"]
        if fields["cls"] == "backward":
            return self._planned.get(compile_id)
        self._planned.pop(compile_id, None)  # torch counts anew after a reset
        key = (thread, fields["frame"], plan or "")
        if plan is None or key in self._met or fields["cls"] not in ("first", "recompile", "cache_hit"):
            return None
        self._met.add(key)
        self._planned[compile_id] = plan
        return plan

    def _alarms(self, fields: dict[str, Any], thread: str, device: str) -> None:
        frame, size, limit = fields["frame"], fields["cache_size"], fields["limit"]
        if fields["cls"] == "eager_fallback":
            hit = reasons.LIMIT.search(fields["reason"] or "")
            alarm = "limit_hit" if hit else "eager_fallback"
            message = f"{frame} runs eagerly in {thread}: {_short(fields['reason'])}"
        elif fields["cls"] != "backward" and size and limit and limit > 2 and size >= limit - 1:
            alarm, message = "limit_near", f"{frame} has {size} of {limit} cache entries ({thread}); past it: eager"
        else:
            return
        if (thread, frame, alarm) not in self._warned:
            self._warned.add((thread, frame, alarm))
            self.log.emit("alarm", thread=thread, device=device, alarm=alarm, message=message, frame=frame)

    def changed(self, state: str, flight: InFlight) -> None:
        if self.states and flight.explicit:
            detail: dict[str, Any] = {"detail": flight.frame} if flight.frame and state != "running" else {}
            self.log.emit("state", thread=flight.thread, device=flight.device, state=state, **detail)

    def trouble(self, message: str) -> None:
        """An error of our own: a warning event, and if even that fails, Python's log. Never into torch."""
        try:
            self.log.emit("warning", message=message)
        except (OSError, ValueError):
            _log.exception("a compile could not be recorded: %s", message)


def _short(reason: str | None) -> str:
    text = " ".join((reason or "no reason given").split())
    return text if len(text) <= 200 else text[:199] + "…"


def in_flight() -> list[dict[str, Any]]:
    """Compiles going on now, in any thread: ``thread, device, frame, state, since`` (time.monotonic()), ``seconds``."""
    now = time.monotonic()
    return [
        {
            "thread": flight.thread,
            "device": flight.device,
            "frame": flight.frame,
            "state": "waiting_compile" if flight.waiting else "compiling",
            "since": flight.since,
            "seconds": now - flight.since,
        }
        for flight in list(hub.flights.values())
    ]


class _Steps(threading.local):
    """The calling thread's last step: its number, and when it ended. (Thread idents are used again, this is not.)"""

    number = 0
    ended: float | None = None


class Recording:
    """What :func:`record_compiles` gives: the log, and a way to say where steps end."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self._last = _Steps()

    def step(self, step: int | None = None, **fields: Any) -> None:
        """Ends a step of the current thread (its number from 1, counted here unless given), e.g. ``step(loss=0.3)``."""
        last, now = self._last, self.log.now()
        number = last.number + 1 if step is None else step
        seconds = 0.0 if last.ended is None else now - last.ended
        blank = dict.fromkeys(("loss", "tokens", "rows", "lr", "grad_norm", "bucket"))
        self.log.emit("step", step=number, **{**blank, "seconds": seconds, **fields})
        last.number, last.ended = number, now

    def planned(self, what: str) -> AbstractContextManager[None]:
        """``with recording.planned(f"length {n}"):`` around each call; see :func:`events.planned`."""
        return planned(what)


@dataclass
class _Open:
    """A file being recorded: recordings of one file that overlap in time share its log and its monitor."""

    log: EventLog
    monitor: CompileMonitor
    users: int = 0


_open: dict[Path, _Open] = {}
_open_lock = threading.Lock()


@contextmanager
def record_compiles(path: str | os.PathLike[str], *, append: bool = False) -> Iterator[Recording]:
    """Records the compiles of anybody's code, in any number of threads, to an events.jsonl.

    Args:
        path: the file. An earlier recording of that name is replaced, so that a cell run again does not add its
            compiles to those of the run before. Recordings of one file that overlap in time share it.
        append: keep the earlier recording, as an attempt before this one.
    """
    file = Path(path).resolve()
    with _open_lock:
        if file not in _open:
            if not append:
                file.unlink(missing_ok=True)
            log = EventLog(file, attempt=next_attempt(file))
            log.emit("run_started", recording=True, pid=os.getpid(), started=_now())
            _open[file] = _Open(log, CompileMonitor(log))
            _open[file].monitor.install()
        shared = _open[file]
        shared.users += 1
    error: BaseException | None = None
    try:
        yield Recording(shared.log)
    except BaseException as problem:
        error = problem
        raise
    finally:
        with _open_lock:
            shared.users -= 1
            if not shared.users:
                del _open[file]
                shared.monitor.uninstall()
                shared.log.emit("run_finished", state="failed" if error else "completed", error=error and repr(error))
                shared.log.close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
