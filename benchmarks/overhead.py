"""The share of a training step that is neither target nor drafter: events, dashboard and bookkeeping.

    python benchmarks/overhead.py            # the packaged target, sizes of the demo
    python benchmarks/overhead.py --tiny     # a random tiny target: for the test of this script

One run, one process: each part's processor time is added up by thread while the run goes on, so that what other
programs do on the machine, and waiting, do not count. The ratio is

    (events + subscribers + step bookkeeping + dashboard's publisher + supervisor) / processor time of all threads

over all steps after the first two (in which things compile). Prints one JSON line last; exit code 1 when the ratio
is above ``--limit`` (0.03).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from dflash_lib import fx_patch  # noqa: E402

fx_patch.install()

import synthetic  # noqa: E402

from dflash_lib import dashboard  # noqa: E402
from dflash_lib.config import RunConfig  # noqa: E402
from dflash_lib.events import EventLog  # noqa: E402
from dflash_lib.threads import DrafterWorker, Trainer  # noqa: E402

FIRST = 3  # the step at which counting begins


class Meter:
    """Processor seconds by part; a part inside another counts once, as the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.on = False
        self._here = threading.local()

    def measured(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._here, "inside", False):
                return function(*args, **kwargs)
            self._here.inside, began = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._here.inside = False
                if self.on:
                    self.seconds[part] += time.thread_time() - began

        return timed


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One run with every part metered."""
    meter = Meter()
    EventLog.emit = meter.measured("events", EventLog.emit)  # type: ignore[method-assign]
    DrafterWorker.at_boundary = meter.measured("boundary", DrafterWorker.at_boundary)  # type: ignore[method-assign]
    DrafterWorker.batches = meter.measured("batches", DrafterWorker.batches)  # type: ignore[method-assign]
    DrafterWorker.watch_for_drift = meter.measured("drift", DrafterWorker.watch_for_drift)  # type: ignore[method-assign]
    learn = DrafterWorker.learn_from
    spent: dict[str, float] = {}

    def learned(worker: DrafterWorker, batch: Any, replica: Any) -> None:
        if replica.step == FIRST - 1 and worker.lane not in spent:
            spent[worker.lane] = -time.thread_time()
            if worker.rank == 0:
                meter.on, began["at"] = True, time.process_time()
                began["dashboard"] = board.redraw_seconds
        learn(worker, batch, replica)

    began: dict[str, float] = {}
    DrafterWorker.learn_from = learned  # type: ignore[method-assign]
    ended: dict[str, float] = {}
    finish = DrafterWorker.finish

    def finished(worker: DrafterWorker, replica: Any, *, stopped: bool) -> None:
        if worker.rank == 0:
            meter.on, ended["at"] = False, time.process_time()
            ended["dashboard"] = board.redraw_seconds
        finish(worker, replica, stopped=stopped)

    DrafterWorker.finish = finished  # type: ignore[method-assign]
    values: dict[str, Any] = {"steps": options.steps, "devices": options.devices, "drift_every": 5}
    given: dict[str, Any] = {}
    if options.tiny:
        values |= {"anchors": 6, "block_size": 4, "drafter_layers": 1, "rows": 2, "backend": "eager"}
        data = synthetic.rows("tiny", 24, shortest=40)
        given = {"target": synthetic.target("tiny", "cpu"), "dataset": data, "heldout": data}
    else:
        values |= {"anchors": 16, "block_size": 8, "drafter_layers": 2, "rows": 2, "max_length": 256}
        values |= {"buckets": [128, 256], "backend": "aot_eager"}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(RunConfig.from_dict({**values, "run_dir": folder}), **given)
        board = dashboard.Dashboard(trainer)
        trainer.start().join()
        memory = _peak_gib()
    total = ended["at"] - began["at"]
    parts = dict(meter.seconds) | {"dashboard": ended["dashboard"] - began["dashboard"]}
    return {
        "ratio": round(sum(parts.values()) / total, 5),
        "limit": options.limit,
        "parts": {name: round(seconds / total, 5) for name, seconds in sorted(parts.items())},
        "steps": options.steps - FIRST + 1,
        "cpu_seconds": round(total, 2),
        "peak_gib": memory,
        "torch": torch.__version__,
    }


def _peak_gib() -> float | None:
    """Most memory the process has had."""
    try:
        import resource
    except ImportError:
        return None
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


def main() -> int:
    """Measures, prints, and says by the exit code whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    parser.add_argument("--limit", type=float, default=0.03)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = measure(options)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)
    return int(result["ratio"] > options.limit)


if __name__ == "__main__":
    sys.exit(main())
