"""Where compiles are overheard inside torch: one hook for what was compiled, one timed lock for who waited.

Three names inside torch are replaced while at least one listener is there, and put back afterwards:

- ``torch._dynamo.utils.log_compilation_event``: called in the compiling thread, once a compile, with its metrics.
- ``torch._dynamo.convert_frame.compile_lock``: wrapped, the same lock underneath. Entering it is where a thread waits
  for other threads' compiles, which torch's own events do not show; leaving it says whether a failure reached the
  caller or the frame silently runs eagerly.
- ``torch._dynamo.convert_frame.get_and_maybe_log_recompilation_reasons``: torch's metrics keep only the first reason.

No structured tracing is switched on: that writes gigabytes and slows every compile. Nothing here ever raises into
torch; an error of our own goes to every listener's :meth:`Listener.trouble`.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from . import compile_metrics, compile_state, events, reasons

PATIENCE = 0.05  # seconds a thread waits for the lock before it is said to wait
REMEMBERED = 4096  # forward compiles whose backward may still come


@dataclass
class InFlight:
    """A thread that is compiling, or waiting for its turn. Times on time.monotonic()'s clock."""

    thread: str
    device: str
    frame: str | None
    since: float
    waiting: bool = True
    explicit: bool = False  # whether the lane was named (then its state is of interest)


class Listener(Protocol):
    """What is told of compiles, in the thread where they happen."""

    def compiled(self, compile: compile_metrics.Compile, wait: float, lane: tuple[str, str]) -> None:
        """A compile ended."""

    def changed(self, state: str, flight: InFlight) -> None:
        """A thread began to wait ("waiting_compile"), to compile ("compiling"), or is past it ("running")."""

    def trouble(self, message: str) -> None:
        """Something of our own went wrong."""


@dataclass
class _Pending:
    metrics: Any
    all_reasons: list[str] | None


class _Here(threading.local):
    """What this thread is doing."""

    def __init__(self) -> None:
        self.depth = 0  # how often it holds the lock
        self.wait = 0.0  # what the outermost acquisition waited
        self.waits: list[tuple[float, float]] = []  # (when, how long) outside forward compiles
        self.frame: Any = None  # the frame being compiled
        self.settings: dict[str, str] = {}
        self.entries: int | None = None  # cache entries of its code, where others compiled while it waited
        self.duplicate = False  # one of them fits the call that is compiled all the same
        self.missed: str | None = None  # or why none does, which torch does not say where it saw no entry
        self.all_reasons: list[str] | None = None
        self.pending: list[_Pending] = []
        self.entered: float | None = None  # time.time() at the start of a watched call
        self.entry: str | None = None  # and its name


@dataclass
class Hub:
    """The one place that touches torch's internals; :data:`hub` is its only instance."""

    listeners: tuple[Listener, ...] = ()
    flights: dict[int, InFlight] = field(default_factory=dict)
    here: _Here = field(default_factory=_Here)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _forwards: OrderedDict[str, dict[str, Any]] = field(default_factory=OrderedDict)
    _lanes: dict[str, tuple[str, str]] = field(default_factory=dict)
    _undo: dict[str, Callable[[], bool]] = field(default_factory=dict)

    # --- listeners ---------------------------------------------------------------------------------------------------
    def add(self, listener: Listener) -> list[str]:
        """Starts telling ``listener``; returns what this torch does not let us see, in words."""
        with self._lock:
            missing = self._install()
            self.listeners = (*self.listeners, listener)
        return missing

    def remove(self, listener: Listener) -> None:
        """Stops telling ``listener``; torch is as before when the last one is gone."""
        with self._lock:
            self.listeners = tuple(one for one in self.listeners if one is not listener)
            if not self.listeners:
                # Where somebody else has wrapped our hook meanwhile, it stays and does nothing.
                self._undo = {name: undo for name, undo in self._undo.items() if not undo()}
                self._forwards.clear()

    def _install(self) -> list[str]:
        import torch
        import torch._dynamo.convert_frame as convert_frame
        import torch._dynamo.utils as utils

        places: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
            "log_compilation_event": (utils, lambda old: lambda metrics: self._hook(old, metrics), "compiles"),
            "compile_lock": (convert_frame, lambda old: TimedLock(old, self), "waiting for other threads' compiles"),
            "get_and_maybe_log_recompilation_reasons": (convert_frame, self._keep_reasons, "race duplicates"),
        }
        missing = []
        for name, (module, wrap, what) in places.items():
            if name in self._undo:
                continue
            if not hasattr(module, name):
                missing.append(f"torch {torch.__version__} has no {module.__name__}.{name}: {what} cannot be seen")
                continue
            old = getattr(module, name)
            new = wrap(old)
            setattr(module, name, new)
            self._undo[name] = functools.partial(_put_back, module, name, old, new)
        if not getattr(torch._dynamo.config, "log_compilation_metrics", True):
            missing.append("torch._dynamo.config.log_compilation_metrics is off: compiles cannot be seen")
        return missing

    def _tell(self, say: Callable[[Listener], None]) -> None:
        for listener in self.listeners:
            try:
                say(listener)
            except Exception as error:
                listener.trouble(f"watching compiles: {error!r}")

    def _trouble(self, error: Exception) -> None:
        self._tell(lambda listener: listener.trouble(f"watching compiles: {error!r}"))

    # --- what torch calls --------------------------------------------------------------------------------------------
    def _hook(self, original: Callable[[Any], None], metrics: Any) -> None:
        original(metrics)
        here = self.here
        pending = _Pending(metrics, here.all_reasons)
        here.all_reasons = None
        if here.depth:
            here.pending.append(pending)  # its class depends on how the lock is left
        else:
            self._report(pending, raised=None)

    def _keep_reasons(self, original: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def get_and_maybe_log_recompilation_reasons(*args: Any, **kwargs: Any) -> list[str]:
            found = original(*args, **kwargs)
            self.here.all_reasons = list(found) if self.here.depth else None
            return found

        return get_and_maybe_log_recompilation_reasons

    # --- the lock ----------------------------------------------------------------------------------------------------
    def enter(self, lock: Any, frame: Any) -> None:
        """Takes torch's compile lock, outermost in this thread, and notes who waits for how long."""
        here = self.here
        thread, device = events.current_lane()
        since = time.monotonic()
        flight = InFlight(thread, device, self._name(frame), since, explicit=events.in_lane())
        self.flights[threading.get_ident()] = flight
        try:
            if not lock.acquire(blocking=False):
                if not lock.acquire(timeout=PATIENCE):
                    self._tell(lambda listener: listener.changed("waiting_compile", flight))
                    lock.acquire()
                here.wait = time.monotonic() - since
            else:
                here.wait = 0.0
        except BaseException:
            self.flights.pop(threading.get_ident(), None)
            raise
        here.depth, here.frame = 1, frame
        here.entries, here.duplicate, here.missed = None, False, None
        if frame is None and here.wait:
            here.waits.append((since, here.wait))
        try:
            here.settings = compile_state.settings()
        except Exception as error:
            self._trouble(error)
        flight.waiting, flight.since = False, time.monotonic()
        self._tell(lambda listener: listener.changed("compiling", flight))

    def leave(self, lock: Any, raised: bool) -> None:
        """Gives the lock back, and reports what was compiled under it."""
        here = self.here
        try:
            # Not on entering: the compile waited for is stored in the cache only after its lock is given back.
            if here.frame is not None and here.wait and here.pending:
                here.entries, here.duplicate, here.missed = compile_state.look_up_again(here.frame)
        except Exception as error:
            self._trouble(error)
        lock.release()
        here.depth = 0
        flight = self.flights.pop(threading.get_ident(), None)
        pending, here.pending = here.pending, []
        for one in pending:
            self._report(one, raised)
        here.frame = here.all_reasons = None
        if flight is not None:
            self._tell(lambda listener: listener.changed("running", flight))

    def _name(self, frame: Any) -> str | None:
        if frame is not None:
            return frame.f_code.co_name
        from torch._guards import CompileContext

        known = self._forwards.get(str(CompileContext.current_compile_id()))
        return f"{known['frame']} (backward)" if known else None

    # --- reports -----------------------------------------------------------------------------------------------------
    def _report(self, pending: _Pending, raised: bool | None) -> None:
        try:
            self._read(pending, raised)
        except Exception as error:
            self._trouble(error)

    def _read(self, pending: _Pending, raised: bool | None) -> None:
        here = self.here
        metrics = pending.metrics
        compile_id = str(getattr(metrics, "compile_id", None))
        in_frame = reasons.frame_value(
            {"G": getattr(here.frame, "f_globals", None), **(getattr(here.frame, "f_locals", None) or {})}
        )

        def value(expression: str) -> str | None:
            name = expression.removeprefix("<global>.")
            return here.settings.get(name) if name != expression else in_frame(expression)

        wait, waited_inside = (here.wait, 0.0) if here.frame is not None else self._waits(metrics)
        compile = compile_metrics.read(
            metrics,
            raised=raised,
            all_reasons=pending.all_reasons or self._missed(metrics),
            value=value,
            limit=compile_state.limit(),
            forward=self._forwards.get(compile_id),
            waited_inside=waited_inside,
            duplicate=here.frame is not None and here.duplicate,
            entries=here.entries if here.frame is not None else None,
        )
        if compile is None:
            return
        here.wait = 0.0  # one acquisition's wait belongs to one compile
        if compile.fields["frame"] is None and here.frame is not None:
            code = here.frame.f_code  # a compile refused at the recompile limit is reported without its name
            compile.fields |= {"frame": code.co_name, "file": code.co_filename, "line": code.co_firstlineno}
        lane = events.current_lane()
        if compile.backward:
            # Autograd's own device threads are no lane of anybody's: the forward's thread asked for this.
            foreign = isinstance(threading.current_thread(), threading._DummyThread) and not events.in_lane()
            lane = self._lanes.get(compile_id, lane) if foreign else lane
        else:
            self._forwards[compile_id] = compile.fields
            self._lanes[compile_id] = lane
            while len(self._forwards) > REMEMBERED:
                self._lanes.pop(self._forwards.popitem(last=False)[0], None)
        self._tell(lambda listener: listener.compiled(compile, wait, lane))

    def _missed(self, metrics: Any) -> list[str] | None:
        here = self.here
        unexplained = here.frame is not None and getattr(metrics, "recompile_reason", None) is None
        return [here.missed] if unexplained and here.missed else None

    def _waits(self, metrics: Any) -> tuple[float, float]:
        """Seconds waited for a compile that is reported outside the lock, and how many of them torch counted."""
        here = self.here
        waits, here.waits = here.waits, []
        started = getattr(metrics, "start_time_us", None)
        if started is None:
            return sum(seconds for _, seconds in waits), 0.0
        if "compile_lock" not in self._undo and here.entered is not None:
            return max(0.0, started / 1e6 - here.entered), 0.0  # no timed lock: the watched call's start has to do
        since = time.monotonic() - (time.time() - started / 1e6) - 1e-3
        inside = sum(seconds for when, seconds in waits if when >= since)
        return inside, inside


class TimedLock:
    """torch's compile lock, overheard: the same lock underneath, so holders of either exclude each other."""

    def __init__(self, lock: Any, hub: Hub) -> None:
        self._lock = lock
        self._hub = hub

    def __enter__(self) -> bool:
        here = self._hub.here
        if here.depth or not self._hub.listeners:
            self._lock.acquire()
            here.depth += bool(here.depth)
            return True
        self._hub.enter(self._lock, sys._getframe(1).f_locals.get("frame"))
        return True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        here = self._hub.here
        if here.depth == 1:
            self._hub.leave(self._lock, raised=kind is not None)
            return
        here.depth -= bool(here.depth)
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)  # acquire, release and whatever else: untimed


def _put_back(module: Any, name: str, old: Any, new: Any) -> bool:
    if getattr(module, name) is not new:
        return False
    setattr(module, name, old)
    return True


hub = Hub()
