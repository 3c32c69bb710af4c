"""Imports what TORCH_TRACE wrote: structured logs of torch, one lane a rank. torch records no threads there.

A log line is ``V0401 12:34:56.789000 PID path:line] {"compilation_metrics": {...}, "rank": 0, ...}``; a payload, where
there is one, follows in lines that begin with a tab. Only the metrics and the recompile reasons are read, line by
line, so a folder of gigabytes needs little memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import compile_metrics
from .events import VERSION, Event
from .timeline_build import build
from .timeline_model import Timeline

PATTERN = "dedicated_log_torch_trace_*.log"
_RANK = re.compile(r"rank_(\d+)")
_KINDS = ('"compilation_metrics"', '"bwd_compilation_metrics"', '"recompile_reasons"')


def files(folder: Path) -> list[Path]:
    """The structured logs in a folder, by rank; other ``.log`` files where none has torch's name."""
    found = list(folder.glob(PATTERN)) or list(folder.glob("*.log"))
    return sorted(found, key=lambda path: (_rank_of(path.name) or 0, path.name))


def load(paths: Sequence[Path], name: str) -> Timeline:
    """The timeline of some structured logs; the run starts where the first compile starts."""
    raw: list[tuple[str, compile_metrics.Compile]] = []
    unreadable = 0
    for path in paths:
        forwards: dict[str, dict[str, Any]] = {}
        why: dict[str, list[str]] = {}
        for record in _records(path):
            if record is None:
                unreadable += 1
                continue
            compile_id = _compile_id(record)
            if "reasons" in record:
                why[compile_id] = record["reasons"]
                continue
            metrics = record.get("compilation_metrics") or record.get("bwd_compilation_metrics")
            if not isinstance(metrics, dict):
                continue
            metrics.setdefault("compile_id", compile_id)
            found = compile_metrics.read(
                metrics, all_reasons=why.pop(compile_id, None), forward=forwards.get(str(metrics["compile_id"]))
            )
            if found is None:
                continue
            if not found.backward:
                forwards[str(metrics["compile_id"])] = found.fields
            rank = record.get("rank", _rank_of(path.name))
            raw.append((f"rank {rank}" if rank is not None else "rank 0", found))
    begin = min((c.wall_start for _, c in raw if c.wall_start is not None), default=0.0)
    events = [_event(i, lane, c, begin) for i, (lane, c) in enumerate(raw)]
    return build(sorted(events, key=lambda e: e["t"]), name, unreadable)


def _event(seq: int, lane: str, c: compile_metrics.Compile, begin: float) -> Event:
    start = max(0.0, (c.wall_start if c.wall_start is not None else begin) - begin)
    base = {"v": VERSION, "seq": seq, "t": start + c.fields["seconds"], "attempt": 1, "kind": "compile"}
    return {
        **base,
        "node": 0,
        "thread": lane,
        "device": None,
        "step": None,
        "start": start,
        "wait_seconds": 0.0,
        **c.fields,
    }


def _records(path: Path) -> Iterator[dict[str, Any] | None]:
    """Records of interest; None for one that cannot be read. Recompile reasons come as {"reasons": [...]}."""
    reasons: dict[str, Any] | None = None
    payload: list[str] = []
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            if line.startswith("\t"):
                if reasons is not None:
                    payload.append(line[1:])
                continue
            if reasons is not None:
                yield _with_reasons(reasons, payload)
                reasons, payload = None, []
            if not any(kind in line for kind in _KINDS):
                continue
            try:
                record = json.loads(line[line.index("] {") + 2 :])
            except ValueError:
                yield None
                continue
            if not isinstance(record, dict):
                continue
            if "artifact" in record:
                reasons = record
            else:
                yield record
    if reasons is not None:
        yield _with_reasons(reasons, payload)


def _with_reasons(record: dict[str, Any], payload: list[str]) -> dict[str, Any]:
    text = "".join(payload)
    try:
        found = json.loads(text)
    except ValueError:
        found = text.strip()  # torch writes a single reason as it is, several as a JSON list
    return {**record, "reasons": [str(r) for r in found] if isinstance(found, list) else [str(found)]}


def _compile_id(record: dict[str, Any]) -> str:
    """ "0/1", or "0/1_2" where Dynamo started anew within a compile; the same for a backward and its forward."""
    return f"{record.get('frame_id')}/{record.get('frame_compile_id')}"


def _rank_of(name: str) -> int | None:
    match = _RANK.search(name)
    return int(match[1]) if match else None
