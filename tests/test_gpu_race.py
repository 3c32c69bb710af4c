"""benchmarks/gpu_race.py on a CPU: the logic of the one command that a GPU gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_its_cpu_twin_measures_every_claim(tmp_path: Path) -> None:
    out = tmp_path / "race.json"
    command = [sys.executable, "benchmarks/gpu_race.py", "--device", "cpu", "--tiny", "--parallel", "2"]
    command += [
        "--out",
        str(out),
        "--strategies",
        "none",
        "thread_local",
        "--workloads",
        "compile_storm",
        "shared_gpu_backward",
    ]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr[-2000:]  # 1: a tiny storm has no 60 recompiles
    report = json.loads(out.read_text())
    claims = report["claims"]
    assert claims["s_storm"]["outcome"] == "ok" and claims["s_storm"]["steps"] == "12/12"
    assert claims["s_storm"]["recompiles"] == 3 and not claims["s_storm"]["holds"]  # two lengths in each of three lanes
    assert len(report["cells"]) == 5 and report["cells"][0]["explanation"]
    assert claims["a_crash"]["fails_unpatched"] and claims["a_crash"]["holds_patched"]
    assert claims["b_deadlock"]["unpatched"]["outcome"] == "hang" and claims["b_deadlock"]["holds_patched"]
    assert set(claims["c_first_step"]["seconds"]) == {"1", "3"} and claims["c_first_step"]["ratio"] > 0
    assert claims["d_thread_local"] == {"cells": 2, "ok": 2}
    last = done.stdout.splitlines()[-1]
    assert last.startswith("d_thread_local: ") and len(last) < 200
