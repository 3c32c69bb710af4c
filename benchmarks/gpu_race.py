"""The race on one GPU: the crash, the deadlock, the first step, and every strategy under every workload.

    python benchmarks/gpu_race.py --out benchmarks/results/gpu_race.json       (one GPU, all parts, under 10 minutes)
    python benchmarks/gpu_race.py --parts storm --seconds 350 --out storm.json (the storm alone)
    python benchmarks/gpu_race.py --device cpu --tiny --out race.json          (the same on a CPU, for its logic)

Parts, in this order, and the claims at the end, a line each:
 storm  s  3 isolated threads, compiled flex_attention, caches off: at least 60 recompiles, 0 errors, no hang;
 first  c  first step: 3 threads reach theirs in at most 1.3 times what 1 needs at the same shapes (fresh caches);
 grid   d  the whole grid of strategies and workloads; in it
        a  crash: 3 threads, changing lengths, caches off; RuntimeErrors unpatched, none patched;
        b  deadlock: lazily compiled backwards of threads that share the GPU; stacks unpatched, no hang patched.
Needs torch and this package only. Each cell is a process of its own that ends itself after its timeout; what a cell
found is in the results file before the next one ends.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflash_lib import race_lab
from dflash_lib.race_lab import Result

PARTS = ("storm", "first", "grid")
NO_CACHES = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}


GOAL = 60  # recompiles of forward graphs, in one run


def storm_options(arguments: argparse.Namespace, strategy: str) -> dict[str, Any]:
    """A storm of the grid: what a strategy does shows soon."""
    if arguments.tiny:
        return {"steps": 4, "seconds": 30.0}
    return {"steps": 42 if strategy == "none" else 12, "repeat": 2, "seconds": 60.0, "environment": NO_CACHES}


def storm(arguments: argparse.Namespace, seconds: float) -> Result:
    """The long isolated run: 3 lanes x 23 lengths are 69 forward graphs, 66 of them recompiles, and 69 backwards."""
    size = {"steps": 4, "seconds": 60.0} if arguments.tiny else {"steps": 46, "seconds": seconds - 45.0}
    return race_lab.run(
        "thread_local",
        "compile_storm",
        threads=3,
        device=arguments.device,
        compare=arguments.device == "cpu",
        stall=60.0,
        timeout=max(60.0, seconds - 5.0),
        environment=NO_CACHES,
        **size,
    )


def options(arguments: argparse.Namespace, strategy: str, workload: str) -> dict[str, Any]:
    """How one cell of the grid runs."""
    common: dict[str, Any] = {"threads": 3, "device": arguments.device, "compare": arguments.device == "cpu"}
    if workload == "compile_storm":
        return {**common, "stall": 40.0, "timeout": 120.0, **storm_options(arguments, strategy)}
    if workload == "shared_gpu_backward":
        size = {"steps": 4, "seconds": 30.0} if arguments.tiny else {"steps": 4, "repeat": 1, "seconds": 60.0}
        return {**common, **size, "stall": 5.0 if arguments.device == "cpu" else 30.0, "environment": NO_CACHES}
    # Lanes that only call: what they compile is not the point, so it is cheap.
    return {**common, "steps": 2 if arguments.tiny else 60, "seconds": 20.0, "backend": "aot_eager"}


def first_steps(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds until the last of N threads has done its first step, for N = 1 and 3, each with empty caches."""
    seconds: dict[int, list[float]] = {1: [], 3: []}
    results: list[Result] = []
    for _ in range(1 if arguments.tiny else 2):
        for threads in seconds:
            with tempfile.TemporaryDirectory(prefix="dflash-cold-") as cold:
                result = race_lab.run(
                    "thread_local",
                    "compile_storm",
                    threads=threads,
                    device=arguments.device,
                    steps=1,
                    same_lengths=True,
                    compare=False,
                    stall=90.0,
                    environment={
                        "TORCHINDUCTOR_CACHE_DIR": str(Path(cold, "inductor")),
                        "TRITON_CACHE_DIR": str(Path(cold, "triton")),
                    },
                )
            results.append(result)
            if result.steps_done == threads:
                seconds[threads].append(max(result.first_step_seconds.values()))
    best = {threads: min(values) for threads, values in seconds.items() if values}
    return {
        "seconds": {str(threads): values for threads, values in seconds.items()},
        "ratio": best[3] / best[1] if len(best) == 2 else None,
        "outcomes": [result.outcome for result in results],
    }


def grid(arguments: argparse.Namespace, deadline: float, note: Callable[[Result], None]) -> None:
    """All cells, several processes at a time, the longest first; none is started that could outlast the deadline."""
    cells = [(strategy, workload) for workload in arguments.workloads for strategy in arguments.strategies]
    cells.sort(key=lambda cell: (cell != ("thread_local", "compile_storm"), cell[1] != "compile_storm"))

    def one(cell: tuple[str, str]) -> None:
        left = deadline - time.monotonic()
        if left > 30:
            given = options(arguments, *cell)
            note(race_lab.run(*cell, **{**given, "timeout": min(given.get("timeout", 120.0), left)}))

    with ThreadPoolExecutor(arguments.parallel) as pool:
        list(pool.map(one, cells))


def summary(stormed: Result | None, results: list[Result], first: dict[str, Any] | None) -> dict[str, Any]:
    """The claims: what was measured, and whether it holds. None where a cell did not run."""
    cells = {(result.strategy, result.workload): result for result in results}
    claims: dict[str, Any] = {}
    if stormed:
        recompiles = stormed.compiles - stormed.threads
        claims["s_storm"] = {
            "outcome": stormed.outcome,
            "recompiles": recompiles,
            "steps": f"{stormed.steps_done}/{stormed.steps_planned}",
            "errors": stormed.errors,
            "seconds": round(stormed.seconds, 1),
            "goal": GOAL,
            "holds": stormed.outcome == "ok" and recompiles >= GOAL,
        }
    for claim, workload in (("a_crash", "compile_storm"), ("b_deadlock", "shared_gpu_backward")):
        unpatched, patched = cells.get(("none", workload)), cells.get(("thread_local", workload))
        if unpatched and patched:
            claims[claim] = {
                "unpatched": {"outcome": unpatched.outcome, "errors": unpatched.errors, "compiles": unpatched.compiles},
                "patched": {"outcome": patched.outcome, "errors": patched.errors, "compiles": patched.compiles},
                "patched_steps": f"{patched.steps_done}/{patched.steps_planned}",
                "fails_unpatched": unpatched.outcome != "ok",
                "holds_patched": patched.outcome == "ok" and patched.steps_done == patched.steps_planned,
            }
    if first:
        claims["c_first_step"] = {**first, "goal": 1.3, "holds": first["ratio"] is not None and first["ratio"] <= 1.3}
    if cells:
        isolated = [result.outcome for (strategy, _), result in cells.items() if strategy == "thread_local"]
        claims["d_thread_local"] = {"cells": len(isolated), "ok": isolated.count("ok")}
    return claims


def device_name(device: str) -> str:
    """The GPU's name, asked in another process: this one never loads torch."""
    if device == "cpu":
        return "cpu"
    code = f"import torch; print(torch.cuda.get_device_name({device!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{device}: {(done.stderr.strip().splitlines() or ['no answer'])[-1]} (on a CPU: --device cpu --tiny)")
    return done.stdout.strip()


def main() -> int:
    """Runs the parts, writes the results file, prints a line a claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results JSON")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="a few steps a cell")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--strategies", nargs="+", default=list(race_lab.STRATEGIES), choices=race_lab.STRATEGIES)
    parser.add_argument("--workloads", nargs="+", default=list(race_lab.WORKLOADS), choices=race_lab.WORKLOADS)
    parser.add_argument("--parallel", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 4)), help="processes")
    parser.add_argument("--seconds", type=float, default=560.0, help="for everything")
    arguments = parser.parse_args()
    started = time.monotonic()
    print(
        f"gpu_race: {', '.join(arguments.parts)} on {arguments.device}, {arguments.seconds:.0f} s at most", flush=True
    )
    report: dict[str, Any] = {"device": device_name(arguments.device), "torch": None, "claims": {}, "cells": []}
    results: list[Result] = []
    stormed = first = None
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    writing = threading.Lock()

    def note(result: Result | None = None) -> None:
        """Prints a result, and writes all there is so far."""
        with writing:
            if result is not None:
                print(f"{time.monotonic() - started:5.0f} s  {race_lab.table([result]).splitlines()[-1]}", flush=True)
                report["torch"] = report["torch"] or result.torch or None
                report["cells"].append({**result.to_dict(), "explanation": race_lab.explain(result)})
                if result is not stormed:
                    results.append(result)
            report["claims"] = summary(stormed, results, first)
            report["seconds"] = time.monotonic() - started
            part = arguments.out.with_suffix(".part")
            part.write_text(json.dumps(report, indent=1))
            part.replace(arguments.out)

    end = started + arguments.seconds
    if "storm" in arguments.parts:
        stormed = storm(arguments, min(480.0, end - time.monotonic()))
        note(stormed)
    if "first" in arguments.parts:
        first = first_steps(arguments)  # alone on the machine: it is a time
        note()
    if "grid" in arguments.parts:
        grid(arguments, end, note)
    print(race_lab.table(results))
    print(f"{len(report['cells'])} cells, {report['seconds']:.0f} s, {report['device']}, torch {report['torch']}")
    for claim, found in report["claims"].items():
        print(f"{claim}: {json.dumps(found)}")
    return 0 if all(found.get("holds", True) for found in report["claims"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
