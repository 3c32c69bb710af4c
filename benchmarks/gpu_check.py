"""Everything that needs a GPU, in one command: `make gpu-check`, one GPU, under nine minutes.

    python benchmarks/gpu_check.py --out benchmarks/results/gpu_check.json
    python benchmarks/gpu_check.py --list

Checks of correctness run beside each other, since they wait for compilers most of the time; what is timed runs alone
afterwards. Each is a command of its own that can be run by itself; one that fails or runs out of time does not stop the
others. The last lines say what held.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Check:
    """One command; ``{out}`` in it is where it writes its results. ``timed``: it needs the GPU to itself."""

    name: str
    command: tuple[str, ...]
    seconds: int
    timed: bool = False


CHECKS = (
    Check("tests", ("-m", "pytest", "-q", "-m", "gpu", "tests"), 300),
    Check("train", ("benchmarks/gpu_train.py", "--out", "{out}"), 300),
    Check("race", ("benchmarks/gpu_race.py", "--budget", "280", "--out", "{out}"), 300),
    Check("hazards", ("-m", "dflash_lib", "hazards"), 300),
    Check("step", ("benchmarks/step.py", "--check", "--out", "{out}"), 170, timed=True),
    Check("decode", ("benchmarks/gpu_decode.py", "--out", "{out}"), 110, timed=True),
)


@dataclass(frozen=True)
class Outcome:
    """How one check ended: its exit code (None: out of time), its last lines, the results it wrote."""

    name: str
    code: int | None
    seconds: float
    tail: list[str]
    results: Any


def run(check: Check, end: float) -> Outcome:
    """Runs one check until it ends, its own limit passes, or the whole command's time is up."""
    began = time.monotonic()
    seconds = max(1.0, min(check.seconds, end - began))
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        out, log = Path(folder, "results.json"), Path(folder, "log.txt")
        command = [sys.executable, "-u", *(word.replace("{out}", str(out)) for word in check.command)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                cwd=HERE.parent,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
        tail = log.read_text(errors="replace").replace("\r", "\n").splitlines()[-12:]
        results = json.loads(out.read_text()) if out.exists() and out.stat().st_size else None
    return Outcome(check.name, code, round(time.monotonic() - began, 1), tail, results)


def main() -> int:
    """0 when every check held, 1 when one did not, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu_check.json")
    parser.add_argument("--budget", type=float, default=530, help="seconds for everything")
    parser.add_argument("--only", nargs="+", choices=[check.name for check in CHECKS], help="these checks")
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    options = parser.parse_args()
    chosen = [check for check in CHECKS if options.only is None or check.name in options.only]
    if options.list:
        for check in chosen:
            print(f"{check.name:8} python {' '.join(check.command)}")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: there is no GPU here; every check has a CPU twin in make test", file=sys.stderr)
        return 2
    end = time.monotonic() + options.budget
    together = [check for check in chosen if not check.timed]
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(max_workers=max(1, len(together))) as pool:
        outcomes += pool.map(lambda check: run(check, end), together)
    outcomes += [run(check, end) for check in chosen if check.timed]
    report = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(0), "checks": [asdict(o) for o in outcomes]}
    partial = options.out.with_suffix(".part")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(options.out)
    for outcome in outcomes:
        verdict = {0: "holds", None: "out of time"}.get(outcome.code, f"FAILED ({outcome.code})")
        print(
            f"{outcome.name:8} {verdict:12} {outcome.seconds:6.1f} s  {outcome.tail[-1][:300] if outcome.tail else ''}"
        )
    return int(any(outcome.code != 0 for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
