"""A first real drafter on one GPU: regenerate, train, evaluate, all through ``python -m dflash_lib``; then the curve.

    python benchmarks/gpu_drafter.py --work runs/gpu-drafter --seconds 540 --out benchmarks/results/gpu_drafter.json
    python benchmarks/gpu_drafter.py --device cpu --tiny --out drafter.json       (the same on a CPU, for its logic)

Stages, in this order; what lies in ``--work`` already is not made again, so that a second call goes on where the first
one ended:

data       the target writes a few thousand conversations, 192 answer tokens at most
short      600 steps of 32 rows x 64 anchors, five layers, B 16, AdamW 1e-3; loss and accuracy by slot
acceptance tau of that drafter by real decoding of held-out prompts
agreement  tau as the simulation sees it, on the decoded texts and on held-out ones
long       as many steps as the time allows, a checkpoint every quarter; tau of each, the last one first: the curve

Every command's output goes through; the results file has each stage before the next begins.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dflash_lib import events  # noqa: E402
from dflash_lib.atomic import write_json  # noqa: E402


class OutOfTime(Exception):
    """A command was ended because its time was up."""


class Stages:
    """Runs commands within one budget, and keeps the results file up to date."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work = options, options.work
        self.began = time.monotonic()
        self.results: dict[str, Any] = {"device": options.device, "stages": {}}
        self.size = {"count": 12, "heldout": 3, "answer": 12, "steps": 6, "rows": 2, "anchors": 4, "prompts": 2}
        if not options.tiny:
            self.size = {"count": 6144, "heldout": 64, "answer": 192, "steps": 600, "rows": 32, "anchors": 64}
            self.size |= {"prompts": 24}

    def left(self) -> float:
        return self.options.seconds - (time.monotonic() - self.began)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:5.0f} s  {text}", flush=True)

    def note(self, stage: str, found: dict[str, Any]) -> None:
        self.results["stages"][stage] = found
        self.results["seconds"] = round(time.monotonic() - self.began, 1)
        write_json(self.options.out, self.results)
        self.say(f"{stage}: {json.dumps(found)[:600]}")

    def command(self, *words: object, seconds: float, keep: bool = False) -> str:
        """A Python command; its last line if ``keep``. It is ended, with all it started, when its time is up."""
        seconds = min(seconds, self.left() - 17)  # ending it takes up to 15
        if seconds < 5:
            raise OutOfTime(f"{words[0]}: no time left")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        # One word names the shell's command, anything with a suffix is a script of benchmarks/.
        line = [sys.executable, "-u", *(["-m", "dflash_lib"] if "." not in str(words[0]) else []), *map(str, words)]
        self.say(" ".join(map(str, words))[:200])
        pipe = subprocess.PIPE if keep else None
        process = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=pipe, text=True, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise OutOfTime(f"{words[0]}: ended after {seconds:.0f} s") from None
        finally:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGTERM)  # a run ends with a checkpoint
                process.wait(15)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            raise RuntimeError(f"{words[0]}: exit code {process.returncode}")
        return output.strip().splitlines()[-1] if keep else ""

    # --- stages ---------------------------------------------------------------------------------------------------
    def data(self) -> None:
        train, heldout = self.work / "train.jsonl", self.work / "heldout.jsonl"
        count, began = self.size["count"], time.monotonic()
        while not train.exists():
            given = ["--count", count, "--heldout", self.size["heldout"], "--heldout-out", heldout]
            given += ["--max-new-tokens", self.size["answer"], "--batch", self.size["count"] // 3]
            try:
                self.command("regenerate", train, *given, "--device", self.options.device, seconds=self.limit(170))
            except OutOfTime:  # the unfinished work is kept: as many as there are will do
                made = len(train.with_name("train.jsonl.part").read_text().splitlines()) - 1
                count = int(0.6 * made) - self.size["heldout"]
                if count < 200:
                    raise
        lines = [len(file.read_text().splitlines()) for file in (train, heldout)]
        self.note("data", {"conversations": lines[0], "heldout": lines[1], "seconds": self.since(began)})

    def limit(self, seconds: float) -> float:
        return 10 * seconds if self.options.device == "cpu" else seconds

    def since(self, began: float) -> float:
        return round(time.monotonic() - began, 1)

    def train(self, name: str, steps: int, every: int, seconds: float) -> dict[str, Any]:
        """A run, unless its checkpoints are there; what it has to say for itself, also when its time was up."""
        run = self.work / name
        if not list(run.glob("checkpoints/step-*")):
            tiny = self.options.tiny
            chosen = {
                "train_data": self.work / "train.jsonl",
                "heldout_data": self.work / "heldout.jsonl",
                "devices": self.options.device,
                "steps": steps,
                "rows": self.size["rows"],
                "anchors": self.size["anchors"],
                "lr": 1e-3,
                "max_length": 128 if tiny else 384,
                "buckets": 128 if tiny else 384,  # one bucket: one compile
                "drafter_layers": 1 if tiny else 5,
                "block_size": 4 if tiny else 16,
                "checkpoint_every": every,
                "keep_checkpoints": 8,
                "backend": "inductor" if self.options.device != "cpu" else "eager",
            }
            words = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
            try:
                self.command("train", "--no-evaluate", "--run-dir", run, *words, seconds=seconds)
            except OutOfTime as reason:
                self.say(str(reason))
        return self.curve(run)

    def curve(self, run: Path) -> dict[str, Any]:
        """Loss along the way, and accuracy by slot over the last 20 steps on training rows."""
        steps = [event for event in events.read(run / "events.jsonl") if event["kind"] == "step"]
        compiles = [event for event in events.read(run / "events.jsonl") if event["kind"] == "compile"]
        width = max(1, len(steps) // 12)
        chunks = [steps[end - min(10, width) : end] for end in range(width, len(steps) + 1, width)]
        last = [step["accuracy"] for step in steps[-20:]]
        times = sorted(step["seconds"] for step in steps)
        return {
            "steps": len(steps),
            "loss": {chunk[-1]["step"]: round(sum(s["loss"] for s in chunk) / len(chunk), 3) for chunk in chunks},
            "accuracy_by_slot": [round(sum(slot) / len(last), 3) for slot in zip(*last, strict=True)],
            "step_ms_median": round(1000 * times[len(times) // 2], 2),
            "train_seconds": round(sum(times), 1),
            "late_recompiles": sum(event["step"] not in (None, 0, 1) for event in compiles),
        }

    def acceptance(self, checkpoint: Path, prompts: int) -> dict[str, Any]:
        given = ["--prompts", self.work / "heldout.jsonl", "--count", prompts, "--device", self.options.device]
        given += ["--max-new-tokens", self.size["answer"] if self.options.tiny else 128]
        out = self.work / f"acceptance-{checkpoint.parent.parent.name}-{checkpoint.name}"
        if not (out / "acceptance.json").exists():
            self.command("evaluate", checkpoint, *given, "--out", out, seconds=self.limit(100))
        (one,) = json.loads((out / "acceptance.json").read_text())["sets"]
        return {
            key: value if isinstance(value, str | int | bool | None) else _short(value) for key, value in one.items()
        }

    def short(self) -> None:
        steps = self.size["steps"]
        self.note("short", self.train("short", steps, 0, self.limit(200)))
        checkpoint = max((self.work / "short" / "checkpoints").glob("step-*"))
        self.note("acceptance", self.acceptance(checkpoint, self.size["prompts"]))
        given = ["--count", self.size["prompts"], "--device", self.options.device]
        script = ["benchmarks/simulated_agreement.py", checkpoint, *given]
        self.note("agreement", json.loads(self.command(*script, seconds=self.limit(90), keep=True)))

    def long(self) -> None:
        """Steps for two thirds of what is left; the evaluations get the rest."""
        run, file = self.work / "long", self.work / "long-steps.json"
        if not file.exists():
            each = self.results["stages"]["short"]["step_ms_median"] / 1000
            steps = int((self.left() * 0.66 - 45) / each) if not self.options.tiny else 8
            if steps < (1 if self.options.tiny else 1000):
                return self.say(f"long: only {self.left():.0f} s are left; call it again with the same --work")
            write_json(file, steps)
        steps = json.loads(file.read_text())
        every = max(1, steps // 4)
        found = self.train("long", steps, every, self.left() - 60)
        self.note("long", found)
        checkpoints = sorted((run / "checkpoints").glob("step-*"), reverse=True)
        found["acceptance"] = {}
        for checkpoint in checkpoints:
            found["acceptance"][checkpoint.name] = self.acceptance(checkpoint, self.size["prompts"])
            self.note("long", found)
        return None


def _short(values: Any) -> Any:
    return [_short(value) for value in values] if isinstance(values, list) else round(values, 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "gpu-drafter", help="what is kept between calls")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="a few steps, for a CPU")
    parser.add_argument("--stages", nargs="+", choices=["data", "short", "long"], default=["data", "short", "long"])
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_drafter.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the command that runs, too
    options.work, options.out = options.work.absolute(), options.out.absolute()
    for folder in (options.work, options.out.parent):
        folder.mkdir(parents=True, exist_ok=True)
    stages = Stages(options)
    stages.say(f"gpu_drafter: {', '.join(options.stages)} on {options.device}, {options.seconds:.0f} s at most")
    try:
        for stage in options.stages:
            getattr(stages, stage)()
    except (OutOfTime, RuntimeError) as reason:
        stages.note("ended", {"because": str(reason)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
