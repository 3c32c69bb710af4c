"""How compiles look: one colour AND one hatch a class, so that no one has to tell colours apart. Okabe-Ito colours."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .timeline_model import Timeline


@dataclass(frozen=True)
class Look:
    """``hatch`` is matplotlib's; the page draws the same strokes. ``label`` is what a reader sees."""

    colour: str
    hatch: str
    label: str
    meaning: str


CLASS_LOOKS = {
    "first": Look("#0072B2", "", "first compile", "the first compile of a function"),
    "planned": Look("#0072B2", "||||", "planned", "the first compile for a length that had been announced"),
    "recompile": Look("#D55E00", "////", "recompile", "a guard failed: compiled again"),
    "backward": Look("#56B4E9", "....", "backward", "the backward of one of the others"),
    "race_duplicate": Look("#CC79A7", "xxxx", "race duplicate", "another thread had compiled the same meanwhile"),
    "eager_fallback": Look("#4D4D4D", "++++", "eager fallback", "runs uncompiled from here on"),
    "cache_hit": Look("#009E73", "oo", "cache hit", "kernels from the cache on disk; tracing ran all the same"),
    "failed": Look("#F0E442", "\\\\\\\\", "failed", "the compile raised an error"),
}
OTHER = Look("#999999", "", "other", "a class this version does not know")
WAITING = Look("#D9D9D9", "----", "waiting", "for another thread's compile to end")
PART_LOOKS = {
    "dynamo": Look("#0072B2", "", "Dynamo", "tracing and guards"),
    "aot": Look("#56B4E9", "....", "AOTAutograd", "joint graph, partitioning"),
    "inductor": Look("#E69F00", "////", "Inductor", "scheduling and code generation"),
    "triton": Look("#009E73", "xx", "Triton / C++", "kernel compilation"),
    "waiting": WAITING,
}


def look(cls: str) -> Look:
    """The look of a class, known or not."""
    return CLASS_LOOKS.get(cls, OTHER)


def subtitle(timeline: Timeline) -> str:
    """The run in one line: how many compiles, how many of them were avoidable, what they cost."""
    compiles = timeline.compiles
    again = [c for c in compiles if c.avoidable and c.cls != "backward"]  # as a comparison counts them
    spent = sum(c.seconds for c in compiles)
    waited = sum(c.wait for c in compiles)
    wasted = sum(lane.wasted for lane in timeline.lanes)
    threads = f"{len(timeline.lanes)} thread{'s' * (len(timeline.lanes) != 1)}"
    together = f", {seconds(waited)} waiting for each other" if waited >= 0.005 else ""
    avoidable = f"{len(again):,} avoidable" if again else "none avoidable"
    return f"{threads}, {len(compiles):,} compiles in {seconds(spent)}{together}; {avoidable}, {seconds(wasted)} wasted"


def seconds(value: float) -> str:
    """Seconds for a reader: "0 s", "0.34 s", "12 s", "3 min 20 s", "1 h 5 min"."""
    if value < 0.005:
        return "0 s"
    if value < 10:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.0f} s"
    if value < 3600:
        return f"{int(value // 60)} min {int(value % 60)} s"
    return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"


def spans_a_decade(values: Iterable[float]) -> bool:
    """THE rule for every curve: its axis is logarithmic, and says so, where it spans more than a factor of ten.

    A drafter's loss begins at 60 and ends at 3: on a linear axis its first steps flatten all the others.
    """
    known = [value for value in values if math.isfinite(value)]
    return bool(known) and 0 < 10 * min(known) < max(known)


def scale(axes: Any, values: Iterable[float], label: str) -> None:
    """Labels the y axis of a matplotlib plot of ``values``, and makes it logarithmic by that rule."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    logarithmic = spans_a_decade(values)
    axes.set_ylabel(f"{label} (log)" if logarithmic else label)
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_locator(NullLocator())


def clean(text: str, length: int) -> str:
    """Text that any renderer takes: one line, no control characters or half surrogate pairs, at most ``length``."""
    text = " ".join("".join(c if c.isprintable() or c.isspace() else "\ufffd" for c in text).split())
    return text if len(text) <= length else text[: length - 1] + "…"
