"""What the dashboard knows: events folded, one by one, into the state of each lane and of the run (no widgets)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .timeline_build import base_frame

# How a lane's state reads, and the tone it is shown in (the view turns tones into colours).
WORDS: dict[str, tuple[str, str]] = {
    "starting": ("starting", "quiet"),
    "running": ("running", "good"),
    "compiling": ("compiling", "busy"),
    "waiting_compile": ("waiting for a compile", "wait"),
    "waiting_others": ("waiting for the others", "wait"),
    "paused": ("paused", "wait"),
    "stopping": ("stopping", "busy"),
    "stopped": ("stopped", "quiet"),
    "failed": ("failed", "bad"),
    "finished": ("finished", "quiet"),
    "completed": ("completed", "good"),
}
ENDED = frozenset({"stopped", "failed", "finished", "completed"})
# The state that shows that a request took effect in a lane.
_EFFECT = {
    "pause": {"paused"} | ENDED,
    "resume": {"running", "compiling", "waiting_others", "waiting_compile"} | ENDED,
    "stop": set(ENDED),
}
RECENT = 8  # steps that tokens a second and the estimated acceptance length are of


class Series:
    """A curve that never grows past ``limit`` points: when full, neighbours are averaged and twice as many fit.

    ``x`` ascends. A point at or before the last ``x`` (a resumed run going through its steps again) replaces what
    follows it.
    """

    def __init__(self, limit: int = 240) -> None:
        self.limit = limit
        self.x: list[float] = []
        self.y: list[float] = []
        self._stride = 1
        self._pending: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        while self.x and x <= self.x[-1]:
            self.x.pop(), self.y.pop()
            self._pending.clear()
        self._pending = [point for point in self._pending if point[0] < x]
        self._pending.append((x, y))
        if len(self._pending) < self._stride:
            return
        self.x.append(self._pending[-1][0])
        self.y.append(sum(value for _, value in self._pending) / len(self._pending))
        self._pending.clear()
        if len(self.x) >= self.limit - self.limit % 2:  # an even number: neighbours pair up, and the newest stays
            self.y = [(a + b) / 2 for a, b in zip(self.y[::2], self.y[1::2], strict=False)]
            self.x = self.x[1::2]
            self._stride *= 2

    def points(self) -> list[tuple[float, float]]:
        """The curve with its newest, not yet averaged, end."""
        tail = [self._pending[-1]] if self._pending else []
        return [*zip(self.x, self.y, strict=True), *tail]


@dataclass
class Compile:
    """One compile as the live timeline draws it, after ``wait`` seconds; ``seconds`` is None while it goes on."""

    thread: str
    start: float
    seconds: float | None
    cls: str
    frame: str
    reason: str | None = None
    wait: float = 0.0


@dataclass
class Lane:
    """One thread as its row shows it. Times are seconds since the run started, memory is GiB."""

    name: str
    device: str | None = None
    state: str = "starting"
    since: float = 0.0
    detail: str | None = None
    step: int = 0
    loss: float | None = None
    losses: Series = field(default_factory=Series)
    tokens_per_second: float | None = None
    memory_gib: float | None = None
    compiles: int = 0
    recompiles: int = 0
    compile_seconds: float = 0.0
    wait_seconds: float = 0.0
    last_reason: str | None = None
    request: str | None = None
    error: str | None = None
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))  # tokens, seconds
    _accuracy: deque[list[float]] = field(default_factory=lambda: deque(maxlen=RECENT))  # of each slot

    @property
    def words(self) -> str:
        """The state in words, with what it is about where that is short: ``compiling: attention``, ``paused``."""
        words = WORDS.get(self.state, (self.state, "quiet"))[0]
        if self.state in ("compiling", "running") and self.detail:
            return f"{words}: {self.detail}"
        return words

    @property
    def estimated_tau(self) -> float | None:
        """The acceptance length that the last steps' accuracy of each slot would give on the rows trained on.

        1 + a1 + a1 a2 + ..., as if slots were right independently of each other: between decodings a sign of where
        training goes, not what prompts never seen would show.
        """
        if not self._accuracy or any(len(slots) != len(self._accuracy[-1]) for slots in self._accuracy):
            return None
        tau = prefix = 1.0
        for slot in zip(*self._accuracy, strict=True):
            prefix *= sum(slot) / len(slot)
            tau += prefix
        return tau

    @property
    def note(self) -> str | None:
        """What was asked for and has not happened yet, and what it waits for."""
        if self.request is None:
            return None
        if self.state == "compiling":
            return f"{self.request} asked for: waits for the compile of {self.detail or 'this step'}"
        if self.state == "waiting_compile":
            return f"{self.request} asked for: waits for another lane's compile"
        return f"{self.request} asked for: at the next step"


class Board:
    """The whole run, folded from its events in any number of calls to :meth:`apply`. Not thread-safe: one owner."""

    def __init__(self, config: Mapping[str, Any] | None = None, lanes: tuple[str, ...] = ()) -> None:
        self.config: dict[str, Any] = dict(config or {})
        self.lanes: dict[str, Lane] = {name: Lane(name) for name in lanes}
        self.compiles: list[Compile] = []
        self.alarms: deque[tuple[float, str, str]] = deque(maxlen=50)  # time, lane, message
        self.alarm_count = 0
        self.evaluations: list[tuple[int | None, str, float]] = []  # step, which, tau
        self.checkpoints: list[tuple[int | None, str]] = []
        self.now = 0.0
        self.attempt = 1
        self.state = "not started"
        self.error: str | None = None
        self.host_gib: float | None = None  # host memory of the training process
        self._pace: deque[tuple[float, int]] = deque(maxlen=64)  # time, step: for the time left

    # --- what a view asks -------------------------------------------------------------------------------------
    @property
    def steps(self) -> int | None:
        """Steps the run will take, if its configuration says so."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    @property
    def drafters(self) -> list[Lane]:
        """Lanes that train: those with a step or a drafter's name."""
        return [lane for lane in self.lanes.values() if lane.step or lane.name.startswith("drafter")]

    @property
    def step(self) -> int:
        """Optimizer steps that every training lane has finished."""
        return min((lane.step for lane in self.drafters), default=0)

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def seconds_left(self) -> float | None:
        """Time to the last step at the pace of the last steps; None before it can be told."""
        if self.ended or self.steps is None or len(self._pace) < 2:
            return None
        (t0, s0), (t1, s1) = self._pace[0], self._pace[-1]
        if s1 <= s0 or t1 <= t0:
            return None
        return max(0.0, (self.steps - s1) * (t1 - t0) / (s1 - s0))

    # --- folding ----------------------------------------------------------------------------------------------
    def apply(self, event: Mapping[str, Any]) -> None:
        """Folds one event in. Unknown kinds and fields, and nulls, are passed over: a view must survive any log."""
        t = _number(event.get("t"))
        if t is not None:
            self.now = max(self.now, t)
        if isinstance(event.get("attempt"), int) and event["attempt"] > self.attempt:
            self.attempt = event["attempt"]
            self.state, self.error = "running", None
            self._pace.clear()
            for lane in self.lanes.values():
                lane.state, lane.request, lane.error, lane.detail = "starting", None, None, None
        handler = getattr(self, f"_on_{event.get('kind')}", None)
        if handler is not None:
            handler(event, self.now if t is None else t)

    def request(self, what: str) -> None:
        """Notes in every living lane that trains that ``what`` (``"pause"``, ``"stop"``, ...) was asked for."""
        for lane in self.drafters:
            if lane.state not in ENDED:
                lane.request = what

    def refuse(self, what: str, message: str) -> None:
        """Takes a request back: the trainer would not have it."""
        self._fulfilled(what)
        self.alarm_count += 1
        self.alarms.append((self.now, "main", message))

    def end(self, state: str, error: str | None = None) -> None:
        """The run is over, as something other than its events says (its status, or its dead process)."""
        self.error = self.error or error
        if not self.ended:
            self._on_run_finished({"state": state}, self.now)

    def _lane(self, event: Mapping[str, Any]) -> Lane | None:
        name = event.get("thread")
        if not isinstance(name, str) or name == "main":
            return None
        lane = self.lanes.get(name) or self.lanes.setdefault(name, Lane(name))
        if isinstance(event.get("device"), str):
            lane.device = event["device"]
        return lane

    def _on_run_started(self, event: Mapping[str, Any], t: float) -> None:
        self.state = "running"
        if isinstance(event.get("config"), Mapping):
            self.config.update(event["config"])
        if isinstance(event.get("steps"), int):
            self.config["steps"] = event["steps"]
        names, devices = event.get("lanes"), event.get("devices")
        for i, name in enumerate(names if isinstance(names, list) else ()):
            lane = self.lanes.setdefault(str(name), Lane(str(name)))
            lane.device = str(devices[i]) if isinstance(devices, list) and i < len(devices) else lane.device

    def _on_step(self, event: Mapping[str, Any], t: float) -> None:
        lane, step = self._lane(event), event.get("step")
        if lane is None or not isinstance(step, int):
            return
        if self.state == "not started":
            self.state = "running"
        lane.step = step
        loss = _number(event.get("loss"))
        lane.loss = loss
        if loss is not None:
            lane.losses.add(step, loss)
        memory = _number(event.get("memory_gib"))
        lane.memory_gib = lane.memory_gib if memory is None else memory
        tokens, seconds = _number(event.get("tokens")), _number(event.get("seconds"))
        if tokens is not None and seconds:
            lane._recent.append((tokens, seconds))
            lane.tokens_per_second = sum(r[0] for r in lane._recent) / sum(r[1] for r in lane._recent)
        slots = event.get("accuracy")
        if isinstance(slots, list) and None not in (right := [_number(slot) for slot in slots]):
            lane._accuracy.append([slot for slot in right if slot is not None])
        if self.step > (self._pace[-1][1] if self._pace else 0):
            self._pace.append((t, self.step))

    def _on_compile(self, event: Mapping[str, Any], t: float) -> None:
        lane = self._lane(event)
        start, seconds = _number(event.get("start")), _number(event.get("seconds")) or 0.0
        planned = event.get("cls") == "recompile" and event.get(
            "planned"
        )  # as the timeline counts: announced, no fault
        done = Compile(
            thread=str(event.get("thread")),
            start=t - seconds if start is None else start,
            seconds=seconds,
            cls="planned" if planned else str(event.get("cls") or "first"),
            frame=base_frame(str(event.get("frame") or "?"), str(event.get("thread"))),
            reason=_reason(event),
            wait=_number(event.get("wait_seconds")) or 0.0,
        )
        self.compiles.append(done)
        if lane is None:
            return
        lane.wait_seconds += done.wait
        lane.compiles += 1
        lane.compile_seconds += seconds
        if done.cls in ("recompile", "race_duplicate", "eager_fallback"):
            lane.recompiles += 1
        if done.reason:
            lane.last_reason = done.reason

    def _on_state(self, event: Mapping[str, Any], t: float) -> None:
        state = event.get("state")
        if not isinstance(state, str):
            return
        lane = self._lane(event)
        if lane is None:  # the main thread speaks for the run
            self.state = state
            return
        if isinstance(event.get("request"), str):  # the trainer heard a request; the lane is where it was
            lane.request = event["request"]
            state = state if state == "stopping" and lane.state != "compiling" else lane.state
            return self._move(lane, state, lane.detail, t)
        detail = event["detail"] if isinstance(event.get("detail"), str) else None
        if detail and state in ("compiling", "waiting_compile"):  # "f_drafter_0 (backward)" is "f (backward)" here
            frame, space, rest = detail.partition(" ")
            detail = base_frame(frame, lane.name) + space + rest
        if detail == "evaluating":
            self._fulfilled("evaluate", lane)
        self._move(lane, state, detail, t)

    def _move(self, lane: Lane, state: str, detail: str | None, t: float) -> None:
        lane.since = t if state != lane.state else lane.since
        lane.state, lane.detail = state, detail
        if state in _EFFECT.get(lane.request or "", ENDED):
            lane.request = None

    def _on_alarm(self, event: Mapping[str, Any], t: float) -> None:
        message = str(event.get("message") or event.get("alarm") or event.get("kind"))
        self.alarm_count += 1
        self.alarms.append((t, str(event.get("thread") or "main"), message))
        if isinstance(event.get("request"), str):  # what was asked for cannot be done
            self._fulfilled(event["request"], self._lane(event))

    _on_warning = _on_alarm

    def _on_checkpoint(self, event: Mapping[str, Any], t: float) -> None:
        self.checkpoints.append((event.get("step"), str(event.get("path") or "")))
        self._fulfilled("checkpoint", self._lane(event))

    def _on_evaluation(self, event: Mapping[str, Any], t: float) -> None:
        step = event.get("step") if isinstance(event.get("step"), int) else None
        sets = event["sets"] if isinstance(event.get("sets"), list) else ()
        found = [(str(s.get("name")), _number(s.get("tau_mean"))) for s in sets if isinstance(s, Mapping)]
        found += [(which, _number(event.get(key))) for key, which in _TAUS if key in event]
        self.evaluations += [(step, name, tau) for name, tau in found if tau is not None]
        self._fulfilled("evaluate", self._lane(event))

    def _fulfilled(self, what: str, by: Lane | None = None) -> None:
        """One lane saves and measures for all whose weights are averaged; independent lanes do so each for itself."""
        alone = self.config.get("mode") == "independent"
        for lane in self.lanes.values():
            if lane.request == what and (by is lane or by is None or not alone):
                lane.request = None

    def _on_worker_failed(self, event: Mapping[str, Any], t: float) -> None:
        text = ": ".join(str(event[key]) for key in ("type", "message") if event.get(key))
        lane = self._lane(event)
        if lane is not None:
            lane.state, lane.since, lane.error, lane.request = "failed", t, text or "failed", None
        self.error = f"{event.get('thread')}: {text}" if text else str(event.get("thread"))

    def _on_run_finished(self, event: Mapping[str, Any], t: float) -> None:
        self.state = str(event.get("state") or "finished")
        for lane in self.lanes.values():
            lane.request = None
            if lane.state not in ENDED:
                lane.state, lane.since = ("stopped" if self.state in ("stopped", "failed") else "finished"), t


_TAUS = (("tau_mean", "decoded"), ("tau", "decoded"), ("simulated_tau", "simulated"), ("tau_simulated", "simulated"))


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _reason(event: Mapping[str, Any]) -> str | None:
    """Why this compile happened, in a line: the guard's expected -> actual where it is known."""
    expected, actual = event.get("expected"), event.get("actual")
    reason = event.get("reason")
    text = " ".join(str(reason).split()) if reason else ""
    if expected is not None and actual is not None and f"{expected}" not in text:
        text = f"{text} ({expected} → {actual})".strip()
    return text or None
