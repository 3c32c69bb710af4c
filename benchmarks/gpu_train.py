"""Three drafter threads on one GPU: recompiles in mid-training without an error or a hang, and none where none must be.

    python benchmarks/gpu_train.py --out gpu_train.json              # one GPU, under 10 minutes, no jupyter
    python benchmarks/gpu_train.py --device cpu --tiny --out t.json  # the same script on CPU threads

Parts, each in a process of its own with a watchdog, so that a hang is a result; a line when a part begins and at each
thread's first step, and the results file has a part before the next begins:

steady   300 steps of rows padded to buckets: zero recompiles after each bucket's first step, no alarm, replicas equal
         bit for bit
storm    averaged gradients, compiled flex_attention, unpadded rows of a few lengths (a recompile for each, in each
         thread, whenever it comes), all compile caches off: every thread finishes every step
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import several_gpus  # installs fx_patch, before anything compiles
import synthetic

from dflash_lib import events

SECONDS = {"steady": 280, "storm": 300}


def storm(options: argparse.Namespace) -> dict[str, Any]:
    """Every new length compiles anew (automatic dynamic shapes are off), so that recompiles come again and again."""
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 64
    size = "tiny" if options.tiny else "smollm2"
    lengths = {"shortest": 16, "multiple": 16} if options.tiny else {"shortest": 256, "multiple": 256}
    return report(
        options,
        size,
        data=synthetic.rows(size, 64, **lengths),
        steps=10 if options.tiny else 60,
        rows=1,
        bucket_lengths=False,
        compile_caches=False,
    )


def steady(options: argparse.Namespace) -> dict[str, Any]:
    """Mixed lengths in two buckets: each costs a compile in each thread, of which the first takes half a minute."""
    size = "tiny" if options.tiny else "smollm2"
    found = report(
        options,
        size,
        data=synthetic.rows(size, 240, shortest=40),
        steps=24 if options.tiny else 300,
        rows=1 if options.tiny else 4,
        buckets=[128] if options.tiny else [512, 1024],
    )
    return found | {"ok": found["ok"] and not found["late_recompiles"]}


def report(options: argparse.Namespace, size: str, **changes: Any) -> dict[str, Any]:
    """One run, and what its events say: steps by thread, compiles by class, recompiles after a shape's first step."""
    lanes = ["cuda:0"] * 3 if options.device == "cuda" else ["cpu"] * 2
    backend = "inductor" if options.device == "cuda" else "eager"
    found = several_gpus.train(options, size, lanes, backend=backend, **changes)
    log = events.read(Path(found["run_dir"]) / "events.jsonl")
    steps = [event for event in log if event["kind"] == "step"]
    compiles = [event for event in log if event["kind"] == "compile"]
    begun = {(thread, bucket) for thread, bucket in {(step["thread"], step["bucket"]) for step in steps}}
    first = {
        (thread, min(s["step"] for s in steps if (s["thread"], s["bucket"]) == (thread, bucket)))
        for thread, bucket in begun
    }
    late = [e for e in compiles if (e["thread"], e["step"]) not in first]
    mid = sorted({e["step"] for e in compiles if e["cls"] == "recompile"})
    return {
        "ok": found["steps"] == changes["steps"] and not found["alarms"],
        "steps": found["steps"],
        "seconds": found["seconds"],
        "compiles": found["compiles"],
        "compile_seconds": round(sum(e["seconds"] for e in compiles), 1),
        "recompiles_at_steps": mid,
        "late_recompiles": len(late),
        "shapes": len({step["bucket"] for step in steps}),
        "alarms": found["alarms"],
        "tokens_per_s": found.get("tokens_per_s"),
        "step_ms": found.get("step_ms"),
        "host_ms": found.get("host_ms"),
        "peak_gib": found["peak_gib"],
        "loss": [round(found["losses"][0], 3), round(found["losses"][-1], 3)] if found["losses"] else None,
    }


PARTS = {"steady": steady, "storm": storm}


def main() -> int:
    """Runs the parts, prints one short line for each last, writes the results; 0 when all hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small enough for a test on two cores")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=570, help="for everything")
    parser.add_argument("--keep", help="folder for the runs' timeline pictures and events")
    parser.add_argument("--out", type=Path, default=Path("gpu_train.json"))
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=300, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        faulthandler.dump_traceback_later(options.limit, exit=True)
        several_gpus.say(f"{options.part}: begins")
        options.out.write_text(json.dumps(PARTS[options.part](options)))
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the part that runs, too
    results: dict[str, Any] = {"torch": torch.__version__, "device": options.device, "parts": {}}
    if options.device == "cuda":
        results["gpu"] = torch.cuda.get_device_name(0)
    began = time.monotonic()
    end = began + options.seconds * several_gpus.patience(options)
    several_gpus.say(f"gpu_train: {', '.join(options.parts)} on {options.device}, {options.seconds:.0f} s at most")
    for part in options.parts:
        seconds = min(SECONDS[part] * several_gpus.patience(options), end - time.monotonic())
        results["parts"][part] = (
            several_gpus.run_part(__file__, options, part, seconds) if seconds > 20 else {"error": "no time left"}
        )
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    for part, result in results["parts"].items():
        print(f"{part}: {json.dumps(result)}"[:700], flush=True)
    ok = all(result.get("ok") for result in results["parts"].values())
    print(
        f"gpu_train: {'ok' if ok else 'FAILED'} in {time.monotonic() - began:.0f} s, torch {torch.__version__}",
        flush=True,
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
