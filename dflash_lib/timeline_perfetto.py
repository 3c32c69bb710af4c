"""Writes a timeline in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process a node, a thread a lane, named and in the timeline's order. Compiles and waits are complete events ("X");
those of one thread never overlap, as the format demands (lanes that do get a thread for each row). Loss and cache
entries are counters.
"""

from __future__ import annotations

import json
import math
from typing import Any

from .timeline_model import Compile, Lane, Timeline
from .timeline_style import look

Event = dict[str, Any]


def trace(timeline: Timeline) -> str:
    """The trace as JSON text: {"traceEvents": [...]}, times in microseconds."""
    events: list[Event] = []
    for node in sorted({lane.node for lane in timeline.lanes}):
        events.append(_meta("process_name", node, 0, name=f"{timeline.name} · node {node}" if node else timeline.name))
    tid = 0
    for lane in timeline.lanes:
        tids = range(tid + 1, tid + 1 + lane.rows)
        tid += lane.rows
        for row, number in enumerate(tids):
            name = lane.name + (f" ({row + 1})" if row else "")
            events.append(_meta("thread_name", lane.node, number, name=name))
            events.append(_meta("thread_sort_index", lane.node, number, sort_index=number))
        for c in lane.compiles:
            events.extend(_compile(c, lane, tids[c.row]))
        events.extend(_counters(lane))
    order = {"M": 0}
    events.sort(key=lambda e: (order.get(e["ph"], 1), e.get("ts", 0)))
    other = {"name": timeline.name, "made by": "dflash_lib.timeline"}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, allow_nan=False)


def _meta(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _microseconds(t: float) -> int:
    return round(t * 1e6)


def _compile(c: Compile, lane: Lane, tid: int) -> list[Event]:
    begin, start, end = _microseconds(c.begin), _microseconds(c.start), _microseconds(c.end)
    shared = {"ph": "X", "pid": lane.node, "tid": tid}
    found = []
    if start > begin:
        waited = {**shared, "name": "waiting for another compile", "cat": "waiting", "ts": begin, "dur": start - begin}
        found.append({**waited, "args": {"for": c.frame, "seconds": c.wait}})
    args = {
        "class": look(c.cls).label,
        "reason": c.reason,
        "expected": c.expected,
        "actual": c.actual,
        "where": c.source or (f"{c.file}:{c.line}" if c.file else None),
        "step": c.step,
        "compile_id": c.compile_id,
        "cache": f"{c.cache_size} of {c.limit}" if c.cache_size is not None and c.limit else None,
        "seconds": dict(zip(("dynamo", "aot", "inductor", "triton"), c.parts, strict=True)),
    }
    known = {key: value for key, value in args.items() if value is not None}
    name = c.frame if c.cls == "first" else f"{c.frame} · {look(c.cls).label}"
    found.append({**shared, "name": name, "cat": c.cls, "ts": start, "dur": max(0, end - start), "args": known})
    return found


def _counters(lane: Lane) -> list[Event]:
    shared = {"ph": "C", "pid": lane.node, "tid": 0}
    found = [
        {**shared, "name": f"loss {lane.name}", "ts": _microseconds(t), "args": {"loss": loss}}
        for t, loss in zip(lane.step_ends, lane.losses, strict=True)
        if math.isfinite(loss) and t >= 0
    ]
    for c in lane.compiles:
        if c.cache_size is not None and c.cls != "backward":
            cache = {"entries": c.cache_size}
            found.append({**shared, "name": f"cache {lane.name} {c.frame}", "ts": _microseconds(c.end), "args": cache})
    return found
