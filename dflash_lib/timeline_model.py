"""The recompile timeline as data: lanes, compiles, steps, who wasted what. No drawing, no torch."""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from . import events as log
from . import reasons
from .compile_metrics import CLASSES, PARTS

NEEDED = ("first", "planned", "cache_hit")  # classes without which there would be no compiled code
ORDER = ("first", "planned", *CLASSES[1:])


@dataclass(slots=True)
class Compile:
    """One compile. Times in seconds since the run's start; it waited until ``start``, and took ``seconds``.

    ``cls`` is the event's class, or "planned": a recompile that whoever ran this had said would come.
    """

    lane: int
    start: float
    seconds: float
    wait: float
    cls: str
    frame: str
    file: str | None
    line: int | None
    compile_id: str | None
    reason: str | None
    kind: str | None  # of the reason, see reasons.ADVICE
    guard: str | None
    expected: str | None
    actual: str | None
    source: str | None
    cache_size: int | None
    limit: int | None
    step: int | None
    parts: tuple[float, float, float, float]
    avoidable: bool  # whether it would not have been, had everything stayed as it was or was planned
    begin: float  # when its waiting begins: start - wait, but never before the row's previous compile has ended
    row: int = 0  # 0 unless another compile of the lane overlaps it
    behind: float = 0.0  # seconds of its wait in which another thread compiled what was avoidable
    planned: str | None = None  # what for, if it was

    @property
    def end(self) -> float:
        return self.start + self.seconds

    @property
    def wasted(self) -> float:
        """Seconds that something avoidable cost: an avoidable compile with its wait, or a needed one's wait for it."""
        return self.wait + self.seconds if self.avoidable else self.behind

    @property
    def change(self) -> str:
        """What changed, in a few words: "x: size[1] 64 -> 96"."""
        if self.kind == "race":
            return "another thread compiled the same meanwhile"
        if self.kind == "backend":
            return "another backend object"  # torch names both, by their addresses
        if self.cls == "cache_hit":
            return "only kernels came from the cache: tracing, and loading Inductor once a process, took the time"
        known = reasons.changed(self.guard, self.expected, self.actual)
        if self.kind == "limit":
            return "; ".join(
                filter(None, (known, f"all {self.limit or ''} cache entries are taken".replace("  ", " ")))
            )
        text = known or self.guard or (self.reason or "").split("\n", 1)[0]
        return f"planned for {self.planned} ({text})" if self.cls == "planned" else text


@dataclass
class Lane:
    """One thread of one process: its compiles and its steps, both in the order of time."""

    name: str
    device: str | None
    thread: str
    node: int = 0
    begin: float = 0.0  # its first event
    compiles: list[Compile] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)
    step_numbers: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # NaN where there is none
    step_seconds: list[float] = field(default_factory=list)
    rows: int = 1  # more than 1 where compiles of the lane overlap

    @functools.cached_property
    def parts(self) -> dict[str, float]:
        """Seconds by part, waiting last; they add up to compile_seconds + wait_seconds."""
        table = np.array([(*c.parts, c.wait) for c in self.compiles]).reshape(-1, len(PARTS) + 1)
        return dict(zip((*PARTS, "waiting"), table.sum(axis=0).tolist(), strict=True))

    @property
    def wait_seconds(self) -> float:
        return self.parts["waiting"]

    @property
    def compile_seconds(self) -> float:
        return sum(seconds for part, seconds in self.parts.items() if part != "waiting")

    @functools.cached_property
    def wasted(self) -> float:
        """Seconds that something avoidable cost this thread."""
        return sum(c.wasted for c in self.compiles)

    def step_at(self, times: np.ndarray) -> np.ndarray:
        """Times -> step axis: the n-th step's end is at n, linear in between; past the last one, half a step on."""
        if not self.step_ends:
            return np.zeros_like(times)
        ends = np.array([min(self.begin, self.step_ends[0]), *self.step_ends])
        numbers = np.array([self.step_numbers[0] - 1, *self.step_numbers], dtype=float)
        return np.interp(times, ends, numbers) + 0.5 * (times > ends[-1])


@dataclass(frozen=True)
class Offender:
    """Avoidable compiles of one frame for one kind of reason, over all lanes."""

    frame: str
    kind: str
    cls: str
    count: int
    lanes: tuple[str, ...]
    seconds: float
    wait: float
    changes: tuple[str, ...]  # what changed, the most frequent first
    where: str | None  # "file:line" of the guard, or of the frame
    steps: tuple[int, int] | None  # first and last step
    guard: str | None = None  # where it was the same each time

    @property
    def wasted(self) -> float:
        return self.seconds + self.wait

    @property
    def advice(self) -> str:
        return reasons.advice(self.kind, self.guard)

    def __str__(self) -> str:
        steps = "" if self.steps is None else (f", steps {self.steps[0]}-{self.steps[1]}")
        if self.steps is not None and self.steps[0] == self.steps[1]:
            steps = f", step {self.steps[0]}"
        what = f"{self.frame}: {self.count} x {self.kind}" + (f" ({self.changes[0]})" if self.changes else "")
        return f"{what}, {self.wasted:.2f} s in {', '.join(self.lanes)}{steps}: {self.advice}"


@dataclass
class Timeline:
    """A run's compiles by lane. Build one with :func:`dflash_lib.timeline.load`."""

    name: str
    lanes: list[Lane] = field(default_factory=list)
    events: list[log.Event] = field(default_factory=list)
    unreadable: int = 0

    @functools.cached_property
    def compiles(self) -> list[Compile]:
        return [c for lane in self.lanes for c in lane.compiles]

    @property
    def end(self) -> float:
        """The last thing that is known, in seconds since the start."""
        last = [c.end for lane in self.lanes for c in lane.compiles]
        return max([*last, *(lane.step_ends[-1] for lane in self.lanes if lane.step_ends)], default=0.0)

    @property
    def has_loss(self) -> bool:
        return any(not math.isnan(loss) for lane in self.lanes for loss in lane.losses)

    @property
    def has_steps(self) -> bool:
        return any(lane.step_ends for lane in self.lanes)

    def by_class(self) -> dict[str, tuple[int, float, float]]:
        """class -> (count, seconds, seconds waited), in the order of :data:`ORDER`; classes that occur only."""
        return self._by_class

    @functools.cached_property
    def _by_class(self) -> dict[str, tuple[int, float, float]]:
        sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        for c in self.compiles:
            row = sums[c.cls]
            row[0], row[1], row[2] = row[0] + 1, row[1] + c.seconds, row[2] + c.wait
        order = [*ORDER, *sorted(set(sums) - set(ORDER))]
        return {cls: (int(sums[cls][0]), sums[cls][1], sums[cls][2]) for cls in order if cls in sums}

    def offenders(self, after_step: int | None = None) -> list[Offender]:
        """Avoidable compiles by frame and kind of reason, the most wasteful first; ``after_step``: later ones alone."""
        return self._all_offenders if after_step is None else self._offenders(after_step)

    @functools.cached_property
    def _all_offenders(self) -> list[Offender]:
        return self._offenders(None)

    def _offenders(self, after_step: int | None) -> list[Offender]:
        groups: dict[tuple[str, str], list[Compile]] = defaultdict(list)
        for c in self.compiles:
            if c.avoidable and (after_step is None or (c.step or 1) > after_step):
                groups[c.frame, c.kind or "other"].append(c)
        found = [self._offender(frame, kind, group) for (frame, kind), group in groups.items()]
        return sorted(found, key=lambda o: (-o.wasted, o.frame, o.kind))

    def _offender(self, frame: str, kind: str, group: list[Compile]) -> Offender:
        forwards = [c for c in group if c.cls != "backward"] or group
        changes = Counter(change for c in forwards if (change := c.change))
        steps = [c.step for c in group if c.step is not None]
        where = next((c.source for c in forwards if c.source), None)
        first = forwards[0]
        if where is None and first.file:
            where = f"{first.file}:{first.line}" if first.line is not None else first.file
        return Offender(
            frame=frame,
            kind=kind,
            cls=Counter(c.cls for c in forwards).most_common(1)[0][0],
            count=len(forwards),
            lanes=tuple(self.lanes[i].name for i in sorted({c.lane for c in group})),
            seconds=sum(c.seconds for c in group),
            wait=sum(c.wait for c in group),
            changes=tuple(text for text, _ in changes.most_common()),
            where=where,
            steps=(min(steps), max(steps)) if steps else None,
            guard=first.guard if all(c.guard == first.guard for c in forwards) else None,
        )
