"""Everything that needs a GPU, in one command of under ten minutes, or in a few that share the work.

    python benchmarks/gpu_check.py --seconds 570 --parts step decode drafter --out call1.json
    python benchmarks/gpu_check.py --list                # the parts, their commands, what they take

Parts run in the order of the list. What is timed has the GPU to itself; the others wait for compilers most of the time
and run beside each other afterwards, as long as the seconds last. Each is a command of its own in a process group of
its own, which is ended when its time is up. Its lines are passed on as they come; the results file is written whenever
a part ends, with whatever the part had written by then. docs/gpu_check.md says which calls cover everything.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Part:
    """One command. In it ``{out}`` is where it writes its results and ``{seconds}`` what it may take.

    ``seconds``: the most it gets. ``timed``: it needs the GPU to itself. ``gpus``: as many it needs at least.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    timed: bool = False
    gpus: int = 1


def _script(name: str, *words: str) -> tuple[str, ...]:
    return (f"benchmarks/{name}.py", *words, "--seconds", "{seconds}", "--out", "{out}")


# Those with a test marked gpu, by name: where a GPU is, the packages that other tests import need not be.
TESTS = tuple(f"tests/test_{name}.py" for name in ("decode", "target", "recompiles", "hazards"))
KEPT = "runs/several_gpus"  # timeline pictures and events of runs on several GPUs
VARIANTS = ("graph", "trainer", "no-attention", "no-loss", "no-optimizer", "no-blocks", "bfloat16", "keep")
PARTS = (  # in order of importance
    Part("step", _script("step"), 200, timed=True),
    Part("decode", _script("gpu_decode"), 150, timed=True),
    Part(
        "several", _script("several_gpus", "--parts", "scaling", "dedicated", "--keep", KEPT), 560, timed=True, gpus=2
    ),
    Part("variants", _script("step", "--profile", "--variants", *VARIANTS), 540, timed=True),
    Part("attention", ("benchmarks/attention.py",), 300, timed=True),
    Part("drafter", _script("gpu_drafter"), 580),
    Part("storm", _script("gpu_race", "--parts", "storm"), 500),
    Part("steady", _script("gpu_train", "--parts", "steady"), 300),
    Part("tests", ("-m", "pytest", "-v", "-m", "gpu", *TESTS), 400),
    Part("hazards", ("-m", "dflash_lib", "hazards"), 400),
    Part("check", ("benchmarks/step_check.py", "--timeout", "{seconds}"), 240),
    Part("race", _script("gpu_race", "--parts", "first", "grid"), 560),
)


@dataclass(frozen=True)
class Outcome:
    """How one part ended: its exit code (None: out of time), its last lines, the results it wrote."""

    name: str
    code: int | None
    seconds: float
    tail: list[str]
    results: Any

    def line(self) -> str:
        verdict = {0: "holds", None: "out of time"}.get(self.code, f"FAILED ({self.code})")
        return f"{self.name:9} {verdict:12} {self.seconds:6.1f} s  {self.tail[-1][:400] if self.tail else ''}"


def run(part: Part, end: float) -> Outcome:
    """Runs one part until it ends, its own limit passes, or the whole command's time is up."""
    began = time.monotonic()
    seconds = max(1.0, min(part.seconds, end - began))
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        out = Path(folder, "results.json")
        given = {"{out}": str(out), "{seconds}": str(max(1, int(seconds - 8)))}  # it ends itself, with its stacks
        command = [sys.executable, "-u", *(given.get(word, word) for word in part.command)]
        paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            command,
            cwd=HERE.parent,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        tail: deque[str] = deque(maxlen=40)
        reader = threading.Thread(target=_pass_on, args=(part.name, process, tail), daemon=True)
        reader.start()
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):  # also what a part that ended has left running
            os.killpg(process.pid, signal.SIGTERM)  # so that it can end process groups of its own
            process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(5)
        results = None
        with suppress(OSError, ValueError):  # nothing was written, or it was ended while writing
            results = json.loads(out.read_text())
    return Outcome(part.name, code, round(time.monotonic() - began, 1), list(tail), results)


def _pass_on(name: str, process: subprocess.Popen[str], tail: deque[str]) -> None:
    """Prints what a part prints, as it comes; of a progress bar a line every 20 seconds."""
    shown = 0.0
    for line in process.stdout or ():
        if not (line := line.rstrip()):
            continue
        if "%|" not in line:
            tail.append(line)
        elif time.monotonic() < shown + 20:
            continue
        shown = time.monotonic()
        print(f"[{name}] {line[:240]}", flush=True)


def run_all(parts: Sequence[Part], end: float, note: Callable[[Outcome], None]) -> None:
    """First what is timed, one after the other, then the rest side by side; ``note`` gets each outcome at once."""
    for part in parts:
        if part.timed:
            note(run(part, end))
    rest = [part for part in parts if not part.timed]
    with ThreadPoolExecutor(max_workers=max(1, len(rest))) as pool:
        for _ in pool.map(lambda part: note(run(part, end)), rest):
            pass


def main() -> int:
    """0 when every part held, 1 when one did not, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=["step", "decode", "steady", "tests", "storm"])
    parser.add_argument("--seconds", type=float, default=570, help="for everything")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu_check.json")
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    if options.list:
        for part in PARTS:
            alone = "alone" if part.timed else "beside others"
            print(f"{part.name:9} {part.seconds:4} s, {alone:13}  python {' '.join(part.command)}")
        return 0
    print(f"gpu_check: {', '.join(options.parts)}, {options.seconds:.0f} s at most", flush=True)
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: there is no GPU here; every part has a CPU twin in make test", file=sys.stderr)
        return 2
    there = torch.cuda.device_count()
    chosen = [part for part in PARTS if part.name in options.parts and part.gpus <= there]
    for name in set(options.parts) - {part.name for part in chosen}:
        print(f"gpu_check: {name} needs more GPUs than {there}; left out", flush=True)
    report: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(0), "gpus": there}
    outcomes: list[Outcome] = []
    writing = threading.Lock()
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def note(outcome: Outcome) -> None:
        with writing:
            outcomes.append(outcome)
            print(outcome.line(), flush=True)
            partial = options.out.with_suffix(".part")
            partial.write_text(json.dumps({**report, "parts": [asdict(one) for one in outcomes]}, indent=1) + "\n")
            partial.replace(options.out)

    run_all(chosen, end, note)
    print("--- summary")
    for outcome in outcomes:
        print(outcome.line())
    return int(any(outcome.code != 0 for outcome in outcomes) or len(chosen) < len(set(options.parts)))


if __name__ == "__main__":
    sys.exit(main())
