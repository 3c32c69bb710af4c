"""Compares the recompiles of two runs, matched by frame and kind of reason: new, gone, changed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .atomic import write_bytes
from .timeline_model import Offender, Timeline
from .timeline_style import clean, seconds

Status = Literal["new", "gone", "changed", "same"]
ORDER: tuple[Status, ...] = ("new", "changed", "same", "gone")
NOISE = 0.25  # share by which seconds differ between two runs of the same thing


@dataclass(frozen=True)
class Row:
    """Recompiles of one frame for one kind of reason, before (a) and after (b)."""

    frame: str
    kind: str
    a: Offender | None
    b: Offender | None

    @property
    def counts(self) -> tuple[int, int]:
        return (self.a.count if self.a else 0, self.b.count if self.b else 0)

    @property
    def wasted(self) -> tuple[float, float]:
        return (self.a.wasted if self.a else 0.0, self.b.wasted if self.b else 0.0)

    @property
    def status(self) -> Status:
        """``changed``: another count, or seconds that differ by more than a quarter and more than 0.1 s."""
        if self.a is None:
            return "new"
        if self.b is None:
            return "gone"
        before, after = self.wasted
        differs = abs(after - before) > max(0.1, NOISE * max(before, after))
        return "changed" if self.a.count != self.b.count or differs else "same"

    @property
    def changes(self) -> tuple[str, ...]:
        """What changed, as the later run that has it says."""
        found = self.b or self.a
        return found.changes if found else ()


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side: :attr:`rows`, worst change first within each status."""

    a: Timeline
    b: Timeline
    rows: list[Row]

    @classmethod
    def of(cls, a: Timeline, b: Timeline) -> Comparison:
        before = {(o.frame, o.kind): o for o in a.offenders()}
        after = {(o.frame, o.kind): o for o in b.offenders()}
        rows = [Row(*key, before.get(key), after.get(key)) for key in {**before, **after}]
        rows.sort(key=lambda r: (ORDER.index(r.status), -abs(r.wasted[1] - r.wasted[0]), r.frame, r.kind))
        return cls(a, b, rows)

    @property
    def worse(self) -> bool:
        """Whether anything recompiles in b that did not in a, or more often than in a."""
        return any(row.counts[1] > row.counts[0] for row in self.rows)

    def totals(self) -> list[tuple[str, float, float]]:
        """What each run cost in all: (what, a, b)."""

        def of(timeline: Timeline) -> tuple[float, ...]:
            again = [c for c in timeline.compiles if c.avoidable and c.cls != "backward"]
            spent = sum(lane.compile_seconds for lane in timeline.lanes)
            waited = sum(lane.wait_seconds for lane in timeline.lanes)
            wasted = sum(lane.wasted for lane in timeline.lanes)
            return float(len(timeline.compiles)), float(len(again)), spent, waited, wasted

        names = ("compiles", "recompiles", "seconds compiling", "seconds waiting", "seconds wasted")
        return list(zip(names, of(self.a), of(self.b), strict=True))

    def table(self) -> str:
        """The comparison as text: totals, then a line for each frame and reason with what to do about it."""
        lines = [f"a: {self.a.name}", f"b: {self.b.name}", "", f"{'':<20}{'a':>10}{'b':>10}{'b - a':>10}"]
        for name, before, after in self.totals():
            digits = 0 if name in ("compiles", "recompiles") else 2
            lines.append(f"{name:<20}{before:>10.{digits}f}{after:>10.{digits}f}{after - before:>+10.{digits}f}")
        if not self.rows:
            return "\n".join([*lines, "", "neither run recompiled anything"])
        width = max(len(clean(row.frame, 40)) for row in self.rows) + 2
        lines += ["", f"{'':<9}{'function':<{width}}{'reason':<15}{'count a':>8}{'b':>6}{'wasted a':>11}{'b':>9}"]
        for row in self.rows:
            counts = f"{row.counts[0]:>8}{row.counts[1]:>6}"
            cost = f"{row.wasted[0]:>9.2f} s{row.wasted[1]:>7.2f} s"
            lines.append(f"{row.status:<9}{clean(row.frame, 40):<{width}}{row.kind:<15}{counts}{cost}")
        fresh = [row for row in self.rows if row.counts[1] > row.counts[0]]
        if fresh:
            lines += ["", "worse in b:"]
            lines += [f"  {row.b}" for row in fresh[:8]]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The comparison for a program: totals and rows of plain values."""
        return {
            "a": self.a.name,
            "b": self.b.name,
            "worse": self.worse,
            "totals": {name: [before, after] for name, before, after in self.totals()},
            "rows": [
                {"frame": r.frame, "kind": r.kind, "status": r.status, "counts": r.counts, "wasted": r.wasted}
                for r in self.rows
            ],
        }

    def draw(self, out: str | os.PathLike[str]) -> Path:
        """Draws wasted seconds of a and b by frame and reason, as .png or .svg.

        Raises:
            TimelineError: another suffix.
        """
        from .timeline import TimelineError

        path = Path(out)
        if path.suffix not in (".png", ".svg"):
            raise TimelineError(f"{path}: a comparison is drawn as .png or .svg")
        try:
            from .timeline_compare_picture import picture
        except ImportError:
            raise TimelineError(f"{path}: needs matplotlib (pip install matplotlib); the table does not") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_bytes(path, picture(self, path.suffix[1:]))

    def __str__(self) -> str:
        return self.table()


def change(row: Row) -> str:
    """A row's change in words: "new: 3 x, 4.20 s"."""
    (count_a, count_b), (wasted_a, wasted_b) = row.counts, row.wasted
    if row.status == "new":
        return f"new: {count_b}×, {seconds(wasted_b)}"
    if row.status == "gone":
        return f"gone: was {count_a}×, {seconds(wasted_a)}"
    return f"{row.status}: {count_a}× → {count_b}×, {seconds(wasted_a)} → {seconds(wasted_b)}"
