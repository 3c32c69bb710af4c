"""Typed events and the append-only JSONL log that every view of a run is drawn from.

One object a line; the format is docs/contracts.md. Neither this module nor event_reading, its other half, imports
torch or anything else of the package, so a log can be written by any process and read by any other.

Three things are easy to get wrong, and are decided here:

- **Clock.** ``t`` is seconds since the run started, on one monotonic clock for all threads of a process. A log that
  is opened again (a resumed run) goes on after its last ``t``, so attempts follow each other on one axis.
- **Lines.** A line is written by one ``write`` to a file opened for appending, so threads and processes never cut
  each other's lines; a line that a dying process left unfinished is ended before the next one is written.
- **Values.** What JSON cannot say (NaN, infinities) is written as null, and named in ``nonfinite``.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .event_reading import Event, Scan, next_attempt, read, read_all, scan, settle

__all__ = [
    "Event",
    "EventLog",
    "Scan",
    "current_lane",
    "current_plan",
    "current_step",
    "in_lane",
    "lane",
    "mark_step",
    "next_attempt",
    "planned",
    "read",
    "read_all",
    "scan",
    "settle",
]
VERSION = 1


# --- lanes: whose event is it? ---------------------------------------------------------------------------------------
class _Here(threading.local):
    def __init__(self) -> None:
        self.lanes: list[tuple[str, str]] = []
        self.step: int | None = None
        self.plan: str | None = None


_here = _Here()


@contextmanager
def lane(thread: str, device: str) -> Iterator[None]:
    """Names the current thread's lane for everything emitted inside; lanes nest, the innermost counts."""
    before = _here.step
    _here.lanes.append((thread, device))
    _here.step = None
    try:
        yield
    finally:
        _here.lanes.pop()
        _here.step = before


def current_lane() -> tuple[str, str]:
    """(thread, device) of the current thread: its innermost :func:`lane`, else "main" or the thread's own name."""
    if _here.lanes:
        return _here.lanes[-1]
    thread = threading.current_thread()
    return ("main" if thread is threading.main_thread() else thread.name), "cpu"


def in_lane() -> bool:
    """Whether the current thread is inside a :func:`lane`."""
    return bool(_here.lanes)


def mark_step(step: int | None) -> None:
    """Says which optimizer step (from 1) the current thread is working on; compiles from here on belong to it."""
    _here.step = step


def current_step() -> int | None:
    """The step given to :func:`mark_step` in this thread, or None."""
    return _here.step


@contextmanager
def planned(what: str | None) -> Iterator[None]:
    """Says that this thread is to compile for ``what`` ("length 384"), which it will meet again; None: nothing is said.

    Wrap every call: in each thread a function's first compile for a ``what`` is planned, any later one is not.
    """
    before, _here.plan = _here.plan, what
    try:
        yield
    finally:
        _here.plan = before


def current_plan() -> str | None:
    """What :func:`planned` says in this thread, or None."""
    return _here.plan


# --- writing ---------------------------------------------------------------------------------------------------------
class EventLog:
    """A thread-safe, append-only log of events.

    Args:
        path: the file; missing folders are made. None keeps the events in memory, in :attr:`events`.
        attempt: 1 for a new run, one more for each resume (see :func:`next_attempt`).
        node: which process of a run over several machines writes this.
        origin: ``time.monotonic()`` at the run's start; None: now.

    Raises:
        OSError: the file cannot be opened or written.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, *, attempt: int = 1, node: int = 0, origin: float | None = None
    ) -> None:
        self.path = None if path is None else Path(path)
        self.attempt = attempt
        self.node = node
        self.origin = time.monotonic() if origin is None else origin
        self.events: list[Event] = []
        self._lock = threading.RLock()  # a signal's handler may emit in the middle of an emit of its own thread
        self._subscribers: list[Callable[[Event], None]] = []
        self._finished: dict[str, int] = {}  # thread -> its last finished step
        self._seq = 0
        self._offset = 0.0
        self._file: int | None = None
        self._closed = False
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and self.path.stat().st_size:
                earlier = scan(self.path)
                self._seq = 1 + max((e["seq"] for e in earlier.events), default=-1)
                self._offset = max((e["t"] for e in earlier.events), default=0.0)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            if _unfinished(self.path):
                os.write(self._file, b"\n")

    def now(self) -> float:
        """Seconds since the run started: the clock of ``t`` and of a compile's ``start``."""
        return time.monotonic() - self.origin + self._offset

    def emit(
        self,
        kind: str,
        *,
        thread: str | None = None,
        device: str | None = None,
        step: int | None = None,
        t: float | None = None,
        **fields: Any,
    ) -> Event:
        """Writes one event and hands it to every subscriber; returns it as written.

        ``thread`` and ``device`` are the current lane's unless given, ``t`` is now unless given.

        Raises:
            ValueError: the log is closed, or a field has the name of a base key.
            OSError: the file cannot be written (a full disk).
        """
        here = current_lane()
        event: Event = {
            "v": VERSION,
            "seq": 0,
            "t": self.now() if t is None else t,
            "attempt": self.attempt,
            "kind": kind,
            "node": self.node,
            "thread": here[0] if thread is None else thread,
            "device": device if device is not None or thread is not None else here[1],
            "step": step,
        }
        if clash := [name for name in fields if name in event]:
            raise ValueError(f"event {kind!r}: {clash[0]!r} is a base key and cannot be a field")
        event.update(fields)
        event["t"] = round(event["t"], 6)
        event = _plain(event)
        with self._lock:
            if self._closed:
                raise ValueError(f"event log {self.path or 'in memory'} is closed (event {kind!r})")
            event["seq"] = self._seq
            self._seq += 1
            if kind == "step" and step is not None:
                self._finished[event["thread"]] = step
            if self._file is None:
                self.events.append(event)
            else:
                _write(self._file, json.dumps(event, allow_nan=False).encode() + b"\n")
            subscribers = tuple(self._subscribers)
        for callback in subscribers:
            try:
                callback(event)
            except Exception as error:
                # A view that fails must not end a training run; it is dropped, and the log says so.
                self._drop(callback)
                self.emit("warning", message=f"a subscriber of events failed and was dropped: {error!r}")
        return event

    def step_in_progress(self, thread: str) -> int | None:
        """The step this thread is working on: one more than its last finished one; None before any ``step`` event."""
        with self._lock:
            finished = self._finished.get(thread)
        return None if finished is None else finished + 1

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Has ``callback(event)`` called for each event from now on, in the emitting thread: be quick.

        Returns a function that ends the subscription. A callback that raises is dropped, with a warning event.
        """
        with self._lock:
            self._subscribers.append(callback)
        return lambda: self._drop(callback)

    def _drop(self, callback: Callable[[Event], None]) -> None:
        with self._lock:
            if callback in self._subscribers:
                self._subscribers.remove(callback)

    def close(self) -> None:
        """Flushes to the disk and closes; a second call does nothing, a later :meth:`emit` is an error."""
        with self._lock:
            self._closed = True
            if self._file is not None:
                os.fsync(self._file)
                os.close(self._file)
                self._file = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write(file: int, line: bytes) -> None:
    while line:  # a regular file takes it all at once; a full disk raises
        line = line[os.write(file, line) :]


def _unfinished(path: Path) -> bool:
    """Whether the file's last line lacks its end (its writer died in mid-line)."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _plain(event: Event) -> Event:
    """The event with JSON's values only: array scalars become numbers, other objects text, NaN null (and named)."""
    nonfinite: dict[str, str] = {}

    def plain(value: Any, name: str) -> Any:
        if value is None or isinstance(value, (bool, str)):
            return str(value) if isinstance(value, str) else value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            if math.isfinite(value):
                return float(value)
            nonfinite[name] = str(float(value))
            return None
        if isinstance(value, dict):
            return {str(k): plain(v, f"{name}.{k}") for k, v in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [plain(v, name) for v in value]
        if callable(getattr(value, "item", None)) and getattr(value, "shape", None) == ():
            return plain(value.item(), name)
        return str(value)

    result = {str(name): plain(value, str(name)) for name, value in event.items()}
    if result["t"] is None:
        raise ValueError(f"event {event['kind']!r}: t is not a finite number")
    if nonfinite:
        result["nonfinite"] = nonfinite
    return result
