"""Makes the timeline's page: one HTML file that works offline, with zoom, filters and the whole reason of any compile.

The page (timeline_page.html) loads nothing from anywhere; its data is JSON in a script element, written as ASCII with
``<`` escaped, and reaches the document only as text. Columns of whole milliseconds, each text once, and a column that
is the same everywhere as one number keep 100,000 compiles below 10 MB.
"""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

from .reasons import ADVICE
from .timeline_model import Lane, Timeline
from .timeline_style import PART_LOOKS, WAITING, Look, look, subtitle

LARGEST = 9_000_000  # bytes of a page; where they do not suffice, texts of the least wasteful compiles are left out
INDEX_BYTES = 18  # what a compile's references to its texts take
POINTS = 60_000  # of all loss curves together
DARK = {"first": "#3B9BDC", "eager_fallback": "#BBBBBB", "waiting": "#4A4A50"}  # where the colour is too dark for dark
OFFENDERS = 12


class _Strings:
    """Every text once; what does not fit into the budget gets no index."""

    def __init__(self) -> None:
        self.table: list[str] = []
        self.left_out = 0
        self.budget = 0
        self._index: dict[str, int] = {}

    def add(self, text: str | None, always: bool = False) -> int:
        if not text:
            return -1
        known = self._index.get(text)
        if known is not None:
            return known
        size = len(json.dumps(text)) + 1
        if not always and size > self.budget:
            self.left_out += 1
            return -1
        self.budget -= size
        self._index[text] = len(self.table)
        self.table.append(text)
        return self._index[text]


def page(timeline: Timeline) -> str:
    """The whole page as ASCII text."""
    template = resources.files(__package__).joinpath("timeline_page.html").read_text(encoding="utf-8")
    text = json.dumps(_data(timeline), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    before, after = template.split("@DATA@")
    # The page's own arrows and dashes: those between the tags as references, those inside its script as escapes.
    script = after.index("<script>")
    escaped = "".join(c if c < "\x80" else f"\\u{ord(c):04x}" for c in after[script:])
    return before.encode("ascii", "xmlcharrefreplace").decode() + text + after[:script] + escaped


def _data(timeline: Timeline) -> dict[str, Any]:
    strings = _Strings()
    classes = timeline.by_class()
    above = "loss" if timeline.has_loss else "s / step"
    thin = max(1, math.ceil(sum(len(lane.step_ends) for lane in timeline.lanes) / POINTS))
    first = 0
    lanes: list[dict[str, Any]] = []
    for lane in timeline.lanes:
        lanes.append(_lane(lane, first, timeline.has_loss, thin))
        first += len(lane.compiles)
    columns = _columns(timeline, strings, {cls: i for i, cls in enumerate(classes)}, _size(lanes))
    notes = []
    if timeline.unreadable:
        notes.append(f"{timeline.unreadable} lines of the log could not be read.")
    if strings.left_out:
        notes.append(f"{strings.left_out:,} texts of the shortest compiles were left out to keep this page small.")
    return {
        "name": timeline.name,
        "subtitle": subtitle(timeline),
        "note": " ".join(notes),
        "above": above,
        "strings": strings.table,
        "classes": list(classes),
        "byclass": [[count, round(spent, 3), round(wait, 3)] for count, spent, wait in classes.values()],
        "looks": {
            **{cls: _look(cls, look(cls)) for cls in classes},
            "waiting": _look("waiting", WAITING),
        },
        "parts": [[part, style.label, style.colour] for part, style in PART_LOOKS.items()],
        "advice": ADVICE,
        "lanes": lanes,
        "compiles": columns,
        "offenders": [
            {
                "wasted": round(o.wasted, 3),
                "count": o.count,
                "frame": o.frame,
                "changes": "; ".join(o.changes[:3])
                + (f" and {len(o.changes) - 3:,} more" if len(o.changes) > 3 else ""),
                "where": o.where or "",
                "advice": o.advice,
                "find": o.changes[0] if len(o.changes) == 1 else o.frame,
            }
            for o in timeline.offenders()[:OFFENDERS]
        ],
    }


def _look(cls: str, style: Look) -> dict[str, str]:
    shown = {"colour": style.colour, "dark": DARK.get(cls, style.colour), "hatch": style.hatch}
    return {**shown, "label": style.label, "meaning": style.meaning}


def _lane(lane: Lane, first: int, loss: bool, thin: int) -> dict[str, Any]:
    values = lane.losses if loss else lane.step_seconds
    return {
        "name": lane.name,
        "device": lane.device or "",
        "rows": lane.rows,
        "begin": round(lane.begin, 3),
        "first": first,
        "count": len(lane.compiles),
        "wasted": round(lane.wasted, 3),
        "parts": [round(value, 3) for value in lane.parts.values()],
        "t": [round(t, 3) for t in lane.step_ends[::thin]],
        "n": lane.step_numbers[::thin],
        "v": [float(f"{value:.4g}") if math.isfinite(value) else None for value in values[::thin]],
    }


def _size(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":")))


def _columns(timeline: Timeline, strings: _Strings, classes: dict[str, int], taken: int) -> dict[str, list[int] | int]:
    """The compiles, lane by lane, each in the order of time, column by column."""
    compiles = timeline.compiles
    milliseconds = [round(c.start * 1000) for c in compiles]
    columns = {
        "start": [
            now - (milliseconds[i - 1] if i and compiles[i - 1].lane == c.lane else 0)
            for i, (now, c) in enumerate(zip(milliseconds, compiles, strict=True))
        ],
        "seconds": [round(c.seconds * 1000) for c in compiles],
        "wait": [round(c.wait * 1000) for c in compiles],
        "shown_wait": [round((c.start - c.begin) * 1000) for c in compiles],
        "lane": [c.lane for c in compiles],
        "row": [c.row for c in compiles],
        "cls": [classes[c.cls] for c in compiles],
        "cache": [c.cache_size or 0 for c in compiles],
        "limit": [c.limit or 0 for c in compiles],
        "step": [c.step or 0 for c in compiles],
        "aot": [round(c.parts[1] * 1000) for c in compiles],
        "inductor": [round(c.parts[2] * 1000) for c in compiles],
        "triton": [round(c.parts[3] * 1000) for c in compiles],
        "frame": [strings.add(c.frame, always=True) for c in compiles],
        "kind": [strings.add(c.kind, always=True) for c in compiles],
    }
    packed = {name: _packed(column) for name, column in columns.items()}
    strings.budget = LARGEST - taken - _size(packed) - _size(strings.table) - INDEX_BYTES * len(compiles)
    texts = {name: [-1] * len(compiles) for name in ("where", "change", "reason", "id", "cut")}
    where, change, reason, ids, cut = texts.values()
    for i in sorted(range(len(compiles)), key=[-c.wasted for c in compiles].__getitem__):
        c = compiles[i]
        where[i] = strings.add(c.source or (f"{c.file}:{c.line}" if c.file else None))
        change[i] = strings.add(c.change)
        reason[i] = strings.add(c.reason)
        ids[i] = strings.add(c.compile_id)
        cut[i] = int(c.reason is not None and reason[i] < 0)
    return {**packed, **{name: _packed(column) for name, column in texts.items()}}


def _packed(column: list[int]) -> list[int] | int:
    return column[0] if column and column.count(column[0]) == len(column) and len(column) > 1 else column
