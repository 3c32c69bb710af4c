"""Logs of runs that never were, for the tests of the timeline: realistic, huge, hostile, broken."""

from __future__ import annotations

import math
import random
from typing import Any

from dflash_lib.events import EventLog

HARD_TEXT = (
    "</script><img src=x onerror=alert(1)> &amp; ' \" \\ \u2028 \u202e \x00 \x1b[31m"
    " \U0001f600 e\u0301 \u05d0 $x_1$ %s {0} \ud800"
)


def compile_fields(**changes: Any) -> dict[str, Any]:
    """The fields of a compile event; every key of the contract, and what is given."""
    fields: dict[str, Any] = {
        "start": 0.0,
        "seconds": 0.5,
        "wait_seconds": 0.0,
        "frame": "attend",
        "file": "dflash_lib/drafter.py",
        "line": 120,
        "compile_id": "0/0",
        "cls": "first",
        "reason": None,
        "expected": None,
        "actual": None,
        "cache_size": 1,
        "limit": 8,
    }
    fields |= changes
    seconds = fields["seconds"] or 0.0
    fields.setdefault("parts", dict(zip(("dynamo", "aot", "inductor", "triton"), (seconds / 4,) * 4, strict=True)))
    return fields


def training(log: EventLog, *, drafters: int = 3, targets: int = 1, steps: int = 60, changes: int = 6) -> EventLog:
    """A run of some minutes: threads compile one after the other, then lengths change now and then."""
    draw = random.Random(7)
    names = [f"drafter-{i}" for i in range(drafters)]
    clock = dict.fromkeys(names, 1.0)
    lock = 1.0
    frames = {"attend": 120, "chunk_loss": 61, "drafter_layer": 88}
    sizes = {(name, frame): 0 for name in names for frame in frames}

    def one(name: str, frame: str, step: int, seconds: float, **fields: Any) -> None:
        nonlocal lock
        asked = clock[name]
        start = max(asked, lock)
        end = start + seconds
        dynamo, aot, triton = seconds * 0.18, seconds * 0.17, seconds * 0.3
        lock = clock[name] = end
        if fields["cls"] != "backward" and fields["cls"] != "eager_fallback":
            sizes[name, frame] += 1
        log.emit(
            "compile",
            thread=name,
            device=f"cuda:{names.index(name)}",
            step=step,
            t=end,
            **compile_fields(
                start=start,
                seconds=seconds,
                wait_seconds=start - asked,
                frame=f"{frame}_{name.replace('-', '_')}",
                line=frames[frame],
                cache_size=sizes[name, frame],
                parts={"dynamo": dynamo, "aot": aot, "inductor": seconds - dynamo - aot - triton, "triton": triton},
                **fields,
            ),
        )

    log.emit("run_started", thread="main", t=0.0)
    changing = sorted(draw.sample(range(2, steps), min(changes, max(0, steps - 2))))
    length = 512
    for i in range(targets):
        log.emit("state", thread=f"target-{i}", device="cuda:3", state="running", t=0.5)
    for step in range(1, steps + 1):
        for name in names:
            if step == 1:
                for frame in frames:
                    one(name, frame, step, draw.uniform(4, 7), cls="first")
                    one(name, frame, step, draw.uniform(2, 3), cls="backward")
        if step in changing:
            new = draw.choice([640, 768, 896, 1024])
            for name in names:
                why = f"tensor 'hidden' size mismatch at index 1. expected {length}, actual {new}"
                seen = {"reason": why, "expected": str(length), "actual": str(new)}
                seen |= {"reason_kind": "size", "guard": "hidden: size[1]"}
                one(name, "attend", step, draw.uniform(3, 6), cls="recompile", **seen)
                one(name, "attend", step, draw.uniform(1.5, 2.5), cls="backward", **seen)
            length = new
        if step == steps // 2 and drafters > 1:
            why = "Unexpected recompilation: runtime guards failed even though they passed"
            one(names[1], "chunk_loss", step, 3.0, cls="race_duplicate", reason=why, reason_kind="race")
        if step == steps - 5:
            why = "Unsupported: Dynamo recompile limit exceeded; last reason: k == 3"
            one(names[-1], "drafter_layer", step, 0.2, cls="eager_fallback", reason=why, reason_kind="limit")
        for name in names:
            clock[name] += draw.uniform(0.9, 1.1)
        together = max(clock.values())
        for name in names:
            clock[name] = together
            loss = 1.2 + 7 * math.exp(-step / 22) + draw.gauss(0, 0.12)
            log.emit(
                "step", thread=name, device=f"cuda:{names.index(name)}", step=step, t=together, loss=loss, tokens=8192,
                rows=4, seconds=1.0, lr=6e-4, grad_norm=1.0, bucket=length,
            )  # fmt: skip
    log.emit("run_finished", thread="main", t=max(clock.values()))
    return log


def huge(*, lanes: int = 64, events: int = 100_000) -> list[dict[str, Any]]:
    """Events of many lanes, half of them compiles, each with a reason of its own; as a log would be read."""
    draw = random.Random(1)
    classes = ("first", "recompile", "backward", "race_duplicate", "eager_fallback", "cache_hit", "failed")
    clock = [0.0] * lanes
    found: list[dict[str, Any]] = []
    base = {"v": 1, "attempt": 1, "node": 0}
    for n in range(events // 2):
        lane = n % lanes
        seconds = draw.expovariate(20)
        start = clock[lane] + draw.expovariate(2)
        clock[lane] = start + seconds
        cls = classes[draw.choices(range(7), (1, 60, 30, 5, 1, 2, 1))[0]]
        reason = f"tensor 'x' size mismatch at index 1. expected {n}, actual {n + 1}" if cls != "first" else None
        shared = {**base, "thread": f"drafter-{lane}", "device": f"cuda:{lane % 8}", "step": n // lanes + 1}
        waited = draw.choice((0.0, 0.02))
        fields = compile_fields(start=start, seconds=seconds, wait_seconds=waited, cls=cls, reason=reason)
        found.append({**shared, "kind": "compile", "seq": 2 * n, "t": clock[lane], **fields})
        clock[lane] += 0.05
        loss = 5 * math.exp(-n / events) + draw.random()
        found.append({**shared, "kind": "step", "seq": 2 * n + 1, "t": clock[lane], "loss": loss, "seconds": 0.1})
    return found
