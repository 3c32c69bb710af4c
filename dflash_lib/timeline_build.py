"""Makes a timeline of events, whoever wrote them: what a field should not hold is taken as unknown."""

from __future__ import annotations

import bisect
import functools
import math
import re
import sys
from collections.abc import Iterable

import numpy as np

from . import events as log
from . import reasons
from .timeline_model import NEEDED, Compile, Lane, Timeline

LONGEST = 1e9  # seconds; a time beyond 30 years is none


def build(events: Iterable[log.Event], name: str, unreadable: int = 0) -> Timeline:
    """The timeline of events as :func:`events.settle` gives them."""
    settled = list(events)
    lanes: dict[tuple[int, str], Lane] = {}
    many_nodes = len({event["node"] for event in settled}) > 1
    raw: list[tuple[tuple[int, str], log.Event]] = []
    for event in settled:
        worker = event["thread"].startswith(("drafter", "target"))  # has a lane even where it never compiled
        if event["kind"] not in ("step", "compile") and not worker:
            continue
        key = event["node"], event["thread"]
        if key not in lanes:
            label = f"node {event['node']} · {event['thread']}" if many_nodes else event["thread"]
            lanes[key] = Lane(label, event["device"], event["thread"], event["node"], begin=_seconds(event["t"], 0.0))
        lane = lanes[key]
        lane.device = lane.device or event["device"]
        t = _seconds(event["t"], 0.0)
        lane.begin = min(lane.begin, _seconds(event.get("start"), t))
        if event["kind"] == "step":
            lane.step_ends.append(t)
            lane.step_numbers.append(event["step"] if event["step"] is not None else len(lane.step_numbers) + 1)
            lane.losses.append(_loss(event.get("loss")))
            lane.step_seconds.append(_seconds(event.get("seconds"), math.nan))
        elif event["kind"] == "compile":
            raw.append((key, event))
    ordered = dict(sorted(lanes.items(), key=lambda item: (item[0][0], _lane_order(item[0][1]))))
    index = {key: i for i, key in enumerate(ordered)}
    for key, event in raw:
        ordered[key].compiles.append(_compile(event, index[key], ordered[key]))
    for lane in ordered.values():
        _no_overlap(lane)
    for node in {lane.node for lane in ordered.values()}:
        _wait_behind_avoidable([c for lane in ordered.values() if lane.node == node for c in lane.compiles])
    return Timeline(name, list(ordered.values()), settled, unreadable)


def _lane_order(thread: str) -> tuple[int, list[tuple[int, int, str]]]:
    group = 0 if thread.startswith("drafter") else 1 if thread.startswith("target") else 3 if thread == "main" else 2
    parts = re.split(r"([0-9]+)", thread)
    return group, [(0, int(p), "") if p.isascii() and p.isdigit() else (1, 0, p) for p in parts if p]


def _seconds(value: object, default: float) -> float:
    """A time or a duration; what cannot be one is unknown, and what is a little below zero is zero."""
    if type(value) is float and 0.0 <= value < LONGEST:  # nearly always
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LONGEST:
        return max(0.0, float(value))
    return default


def _loss(value: object) -> float:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < sys.float_info.max
    return float(value) if known else math.nan  # type: ignore[arg-type]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _compile(event: log.Event, lane_index: int, lane: Lane) -> Compile:
    get = event.get
    seconds = _seconds(get("seconds"), 0.0)
    start = _seconds(get("start"), max(0.0, _seconds(event["t"], 0.0) - seconds))
    reason, kind, guard, source = (
        _text(get("reason")), _text(get("reason_kind")), _text(get("guard")), _text(get("source"))
    )  # fmt: skip
    expected, actual = _text(get("expected")), _text(get("actual"))
    if reason and kind is None:  # a log of another writer: read the reason here
        parsed = reasons.parse(reason)
        kind, guard, source = parsed.kind, guard or parsed.guard, source or parsed.source
        expected, actual = expected or parsed.expected, actual or parsed.actual
    cls, planned = _text(get("cls")) or "first", _text(get("planned"))
    if cls == "recompile" and planned:
        cls = "planned"
    return Compile(
        lane=lane_index,
        start=start,
        seconds=seconds,
        wait=_seconds(get("wait_seconds"), 0.0),
        cls=cls,
        frame=base_frame(_text(get("frame")) or "unknown frame", lane.thread),
        file=_text(get("file")),
        line=_whole(get("line")),
        compile_id=_text(get("compile_id")),
        reason=reason,
        kind=kind or ("failed" if cls == "failed" else None),
        guard=guard,
        expected=expected,
        actual=actual,
        source=source,
        cache_size=_whole(get("cache_size")),
        limit=_whole(get("limit")),
        step=event["step"] if event["step"] is not None else _step_of(lane, start),
        parts=_split(get("parts"), seconds),
        avoidable=cls not in NEEDED and (cls != "backward" or (kind is not None and planned is None)),
        begin=start,
        planned=planned,
    )


def base_frame(frame: str, thread: str) -> str:
    """A frame's name without the suffix of fx_patch.own_entry_point: the lane's, and a kernel's later run's number."""
    return _suffix(thread).sub("", frame)


@functools.cache
def _suffix(thread: str) -> re.Pattern[str]:
    return re.compile("_" + re.sub(r"\W", "_", thread) + r"(_run_\d+)?\Z")


def _step_of(lane: Lane, t: float) -> int | None:
    """The step in progress at a time: the number of the first step that ends later."""
    if not lane.step_ends:
        return None
    i = bisect.bisect_left(lane.step_ends, t)
    return lane.step_numbers[i] if i < len(lane.step_ends) else lane.step_numbers[-1] + 1


def _split(parts: object, seconds: float) -> tuple[float, float, float, float]:
    """Seconds of dynamo, aot, inductor, triton that add up to ``seconds``; what is unaccounted for is Dynamo's."""
    given = parts if isinstance(parts, dict) else {}
    aot, inductor, triton = (
        _seconds(given.get("aot"), 0.0), _seconds(given.get("inductor"), 0.0), _seconds(given.get("triton"), 0.0)
    )  # fmt: skip
    total = aot + inductor + triton
    if total > seconds:
        aot, inductor, triton = aot * seconds / total, inductor * seconds / total, triton * seconds / total
        total = seconds
    return seconds - total, aot, inductor, triton


def _no_overlap(lane: Lane) -> None:
    """Puts compiles that overlap in time (threads of the same name, a shuffled clock) into rows of their own."""
    lane.compiles.sort(key=lambda c: (c.start, -c.seconds))
    free: list[float] = []  # when each row's last compile ended
    for c in lane.compiles:
        row = next((r for r, end in enumerate(free) if c.start >= end - 1e-6), len(free))
        if row == len(free):
            free.append(0.0)
        c.row, c.begin = row, min(c.start, max(c.start - c.wait, free[row], 0.0))
        free[row] = max(free[row], c.end)
    lane.rows = max(1, len(free))


def _wait_behind_avoidable(compiles: list[Compile]) -> None:
    """Of each needed compile's wait, the seconds in which another thread of the process compiled what was avoidable."""
    spans = np.array(sorted((c.start, c.end) for c in compiles if c.avoidable and c.seconds > 0)).reshape(-1, 2)
    waited = [c for c in compiles if not c.avoidable and c.start > c.begin]
    if not len(spans) or not waited:
        return
    reached = np.maximum.accumulate(spans[:, 1])  # where spans overlap (a shuffled clock), their union counts
    begins = np.maximum(spans[:, 0], np.concatenate([[0.0], reached[:-1]]))
    borders = np.stack([begins, np.maximum(reached, begins)], axis=1)
    spent = np.concatenate([[0.0], np.cumsum(borders[:, 1] - borders[:, 0])])
    known = np.stack([spent[:-1], spent[1:]], axis=1).ravel()  # avoidable seconds until each border
    until = np.interp([[c.begin, c.start] for c in waited], borders.ravel(), known, left=0.0)
    for c, (before, after) in zip(waited, until.tolist(), strict=True):
        c.behind = after - before
