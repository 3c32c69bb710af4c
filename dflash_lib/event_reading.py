"""Reads an events.jsonl whatever happened to it: cut, shuffled, written by others. Use it through :mod:`events`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import from_json

Event = dict[str, Any]


@dataclass
class Scan:
    """What a log holds: its valid events in the order of the file, and how many lines could not be read."""

    events: list[Event] = field(default_factory=list)
    unreadable: int = 0


def scan(path: str | os.PathLike[str]) -> Scan:
    """Reads every valid line of a log; whatever else is in the file is counted, never fatal.

    A valid line is a JSON object with a ``kind`` and a finite ``t``. Missing base keys get neutral values; unknown
    kinds, fields and versions are kept. Where a line was cut and the next one written right after it, the whole one
    is found again.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    result = Scan()
    for line in Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if not line.strip():
            continue
        event = _event(line)
        if event is None:
            result.unreadable += 1
            start = line.find(b'{"v":', 1)
            while event is None and start > 0:
                event = _event(line[start:])
                start = line.find(b'{"v":', start + 1)
        if event is not None:
            event.setdefault("seq", len(result.events))
            result.events.append(event)
    return result


def _event(line: bytes) -> Event | None:
    try:
        event = from_json(line)  # three times as fast as json, but it refuses some of what json takes
    except ValueError:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
            return None
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str) or not _number(event.get("t")):
        return None
    get = event.get
    if not isinstance(get("seq"), int):
        event.pop("seq", None)
    if not isinstance(get("attempt"), int):
        event["attempt"] = 1
    if not isinstance(get("node"), int):
        event["node"] = 0
    if not isinstance(get("thread"), str):
        event["thread"] = "main"
    if not isinstance(get("device"), str):
        event["device"] = None
    if not isinstance(get("step"), int):
        event["step"] = None
    return event


def _number(value: object) -> bool:
    """Whether it is a number of a sensible size: JSON's integers have no bound, and some have no float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def read_all(path: str | os.PathLike[str]) -> list[Event]:
    """Every valid line of a log, in the order of the file (see :func:`scan`)."""
    return scan(path).events


def read(path: str | os.PathLike[str]) -> list[Event]:
    """The events of a run as it finally went: of each (thread, step), the last attempt's lines alone.

    A resumed run goes through the steps after its checkpoint again; what the earlier attempt wrote for them is left
    out. Of ``step`` events one remains for each (thread, step). Sorted by attempt and time, whatever the file's order.
    """
    return settle(read_all(path))


def settle(events: list[Event]) -> list[Event]:
    """What :func:`read` does to the lines of a file, for lines from elsewhere."""
    last: dict[tuple[int, str, int], int] = {}
    for event in events:
        if event["step"] is not None:
            key = event["node"], event["thread"], event["step"]
            last[key] = max(event["attempt"], last.get(key, event["attempt"]))
    kept: list[Event] = []
    seen: dict[tuple[int, str, int], int] = {}  # where in `kept` a (thread, step)'s step event is
    for event in sorted(events, key=lambda e: (e["attempt"], e["t"], e["node"], e["seq"])):
        if event["step"] is None:
            kept.append(event)
            continue
        key = event["node"], event["thread"], event["step"]
        if event["attempt"] != last[key]:
            continue
        if event["kind"] == "step":
            if key in seen:
                kept[seen[key]] = event
                continue
            seen[key] = len(kept)
        kept.append(event)
    return kept


def next_attempt(path: str | os.PathLike[str]) -> int:
    """The attempt number a run that writes to this log next should have: 1 where there is no log yet."""
    if not Path(path).exists():
        return 1
    return 1 + max((event["attempt"] for event in read_all(path)), default=0)
