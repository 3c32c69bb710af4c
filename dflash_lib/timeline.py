"""The recompile timeline of a run: load it, draw it, sum it up, compare two, fail a CI when something recompiled.

>>> run = timeline.load("runs/drafter-20261129-101500")       # or an events.jsonl, or a TORCH_TRACE folder
>>> print(timeline.summary(run))
>>> timeline.draw(run, "timeline.png")                        # .svg .html .json (Perfetto) as well
>>> timeline.fail_after_step(run, 10)                         # what recompiled after step 10, worst first
>>> print(timeline.compare(before, after).table())

Nothing here imports torch; matplotlib is imported by the pictures alone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from . import events as log
from .atomic import write_bytes
from .errors import UserError
from .timeline_build import build
from .timeline_model import Compile, Lane, Offender, Timeline

if TYPE_CHECKING:
    from .timeline_compare import Comparison

__all__ = [
    "Compile",
    "Lane",
    "Offender",
    "Timeline",
    "TimelineError",
    "compare",
    "draw",
    "draw_all",
    "exempt",
    "fail_after_step",
    "from_events",
    "load",
    "summary",
]

Axis = Literal["time", "step"]
Source = Timeline | str | os.PathLike[str]
OUTPUTS = ("timeline.png", "timeline.svg", "timeline.html", "timeline.trace.json")


class TimelineError(UserError):
    """There is nothing to draw a timeline of, or no way to draw it as asked."""


def load(source: Source) -> Timeline:
    """Reads a run folder, an events.jsonl, or a folder (or file) that ``TORCH_TRACE`` wrote (a lane a rank).

    Raises:
        TimelineError: there is no such thing, or it is neither of them.
    """
    if isinstance(source, Timeline):
        return source
    path = Path(source)
    if path.is_dir():
        if (path / "events.jsonl").exists():
            return load(path / "events.jsonl")
        from . import torch_trace

        if files := torch_trace.files(path):
            return torch_trace.load(files, path.name)
        raise TimelineError(f"{path}: holds neither events.jsonl nor logs of TORCH_TRACE")
    if not path.exists():
        raise TimelineError(f"{path}: no such file or folder")
    name = path.parent.resolve().name if path.name == "events.jsonl" else path.name
    if path.suffix == ".log":
        from . import torch_trace

        return torch_trace.load([path], name)
    scan = log.scan(path)
    if path.name != "events.jsonl" and not scan.events and path.stat().st_size:
        raise TimelineError(f"{path}: holds no event; name a run folder or its events.jsonl")
    return build(log.settle(scan.events), name, scan.unreadable)


def from_events(events: Iterable[log.Event], name: str = "live") -> Timeline:
    """A timeline of events in memory, such as ``EventLog(None).events``."""
    return build(log.settle(list(events)), name)


def draw(source: Source, out: str | os.PathLike[str], *, axis: Axis = "time") -> Path:
    """Draws a timeline; the suffix decides: .png, .svg (titles on hover), .html (one offline page), .json (Perfetto).

    Args:
        source: a timeline, or what :func:`load` takes.
        out: the file; written whole or not at all.
        axis: "time" (seconds since the start) or "step" (the trace and the page always have time).

    Raises:
        TimelineError: an unknown suffix, or what :func:`load` raises.
    """
    path = Path(out)
    if path.suffix not in (".png", ".svg", ".html", ".json"):
        raise TimelineError(f"{path}: a timeline is drawn as .png, .svg, .html or .json (Perfetto)")
    if axis not in ("time", "step"):
        raise TimelineError(f"axis {axis!r}: is 'time' or 'step'")
    timeline = load(source)
    if path.suffix == ".html":
        from .timeline_html import page

        data = page(timeline).encode("ascii", "xmlcharrefreplace")
    elif path.suffix == ".json":
        from .timeline_perfetto import trace

        data = trace(timeline).encode("ascii")
    elif not _pictures():
        raise TimelineError(f"{path}: needs matplotlib (pip install matplotlib); .html and .json do not")
    else:
        from .timeline_picture import picture

        data = picture(timeline, path.suffix[1:], axis=axis)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_bytes(path, data)


def draw_all(source: Source, out: str | os.PathLike[str] | None = None, *, axis: Axis = "time") -> list[Path]:
    """Draws timeline.png, .svg, .html and .trace.json of a run, into its folder unless ``out`` names another.

    Without matplotlib, which the core does not need, the page and the trace alone.
    """
    if out is None:
        if isinstance(source, Timeline):
            raise TimelineError("draw_all: name the folder to draw into (out=...)")
        out = Path(source) if Path(source).is_dir() else Path(source).parent
    timeline = load(source)
    return [draw(timeline, Path(out) / name, axis=axis) for name in (OUTPUTS if _pictures() else OUTPUTS[2:])]


def _pictures() -> bool:
    """Whether matplotlib is there: the workspace's core, and who only records compiles, do without it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def fail_after_step(source: Source, step: int) -> list[Offender]:
    """What recompiled after this step, the most wasteful first; empty is good.

    A compile belongs to the step in whose course it happened (from 1). Counted are recompiles, race duplicates, eager
    fallbacks and failures; a new function's first compile is not one, nor is a planned one (a length that had been
    announced). A log without steps counts as one step.
    """
    return load(source).offenders(after_step=step)


def exempt(source: Source, step: int) -> str | None:
    """What :func:`fail_after_step` has passed over, in words, for whoever relies on it; None: nothing."""
    timeline = load(source)
    if step > 0 and timeline.compiles and all(c.step is None for c in timeline.compiles):
        return "this log has no steps, so everything counts as step 1: only --fail-after-step 0 can find anything"
    planned = sum(c.cls == "planned" and (c.step or 1) > step for c in timeline.compiles)
    return f"{planned} planned compile{'s' * (planned > 1)} after step {step} did not count" if planned else None


def compare(a: Source, b: Source) -> Comparison:
    """Which recompiles are new, gone or changed from run ``a`` to run ``b``, by frame and kind of reason."""
    from .timeline_compare import Comparison

    return Comparison.of(load(a), load(b))


def summary(source: Source) -> str:
    """A few lines of text: compiles by class, wasted seconds by thread, the worst offenders with advice."""
    timeline = load(source)
    classes = timeline.by_class()
    if not classes:
        return f"{timeline.name}: no compile in {len(timeline.events)} events"
    lines = [f"{timeline.name}: {len(timeline.compiles)} compiles in {len(timeline.lanes)} threads", ""]
    rung = (event for event in timeline.events if event["kind"] == "alarm")
    alarms = Counter(str(event.get("message") or event.get("alarm")) for event in rung)
    lines[1:1] = [f"ALARM: {message}{f' ({count} x)' * (count > 1)}" for message, count in alarms.most_common(5)]
    lines.append(f"{'class':<16}{'count':>7}{'seconds':>10}{'waited':>10}")
    for cls, (count, seconds, wait) in classes.items():
        lines.append(f"{cls:<16}{count:>7}{seconds:>10.2f}{wait:>10.2f}")
    total = [sum(values) for values in zip(*classes.values(), strict=True)]
    lines.append(f"{'all':<16}{total[0]:>7}{total[1]:>10.2f}{total[2]:>10.2f}")
    lines += ["", f"{'thread':<24}{'compiles':>9}{'seconds':>10}{'waited':>10}{'wasted':>10}"]
    for lane in timeline.lanes[:16]:
        row = f"{len(lane.compiles):>9}{lane.compile_seconds:>10.2f}{lane.wait_seconds:>10.2f}{lane.wasted:>10.2f}"
        lines.append(f"{lane.name:<24}{row}")
    if len(timeline.lanes) > 16:
        lines.append(f"... and {len(timeline.lanes) - 16} more threads")
    wasted = sum(lane.wasted for lane in timeline.lanes)
    lines.append(f"wasted in all: {wasted:.2f} s (avoidable compiles, and waiting for them)")
    if offenders := timeline.offenders():
        lines += ["", "worst offenders:", *(f"  {offender}" for offender in offenders[:5])]
    if timeline.unreadable:
        lines += ["", f"{timeline.unreadable} lines of the log could not be read"]
    return "\n".join(lines)
