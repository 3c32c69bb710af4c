"""What the dashboard costs: folding an event, and one redraw, in processor time of the publisher's thread.

python benchmarks/redraw.py
"""

from __future__ import annotations

import math
import time

from dflash_lib.dashboard import INTERVAL, SHARE
from dflash_lib.dashboard_panel import Panel
from dflash_lib.dashboard_state import Board


def board(lanes: int, steps: int) -> tuple[Board, float]:
    """A run of that size, and the seconds that folding one of its events took."""
    events = [
        event
        for step in range(1, steps + 1)
        for i in range(lanes)
        for event in _events(f"drafter-{i}", step, step + i / lanes)
    ]
    result = Board({"steps": 2 * steps})
    begun = time.thread_time()
    for event in events:
        result.apply(event)
    return result, (time.thread_time() - begun) / len(events)


def _events(thread: str, step: int, t: float) -> list[dict]:
    base = {"thread": thread, "device": "cuda:0", "step": step, "t": t}
    loss = 3 + 6 * math.exp(-step / 90) + 0.1 * math.sin(step)
    found = [
        {**base, "kind": "state", "state": "running"},
        {**base, "kind": "step", "loss": loss, "tokens": 512, "seconds": 0.1},
    ]
    if step % 10 == 1:
        found.append(
            {**base, "kind": "compile", "start": t, "seconds": 0.05, "cls": "recompile", "reason": "size " * 12}
        )
    return found


def redraw(of: Board, times: int = 20) -> float:
    """Mean seconds of a redraw in which everything moved."""
    panel = Panel("benchmark", print)
    panel.show(of, controls=True)
    begun = time.thread_time()
    for _ in range(times):
        of.now += 1.0
        panel.show(of, controls=True)
    return (time.thread_time() - begun) / times


def main() -> None:
    names = ("lanes", 6), ("events", 9), ("compiles", 10), ("us an event", 13), ("ms a redraw", 13), ("every", 8)
    print("".join(f"{name:>{width}}" for name, width in (*names, ("share of a core", 17))))
    for lanes, steps in ((3, 400), (8, 1000), (64, 1600)):
        of, fold = board(lanes, steps)
        cost = redraw(of)
        interval = min(10.0, max(INTERVAL, cost / SHARE))
        count = lanes * steps * 2 + len(of.compiles)
        numbers = f"{lanes:>6}{count:>9}{len(of.compiles):>10}{fold * 1e6:>13.1f}{cost * 1e3:>13.1f}"
        print(f"{numbers}{interval:>6.1f} s{cost / interval:>16.1%}")


if __name__ == "__main__":
    main()
