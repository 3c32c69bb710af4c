"""Benchmarks of the trainer on a CPU: the same scripts, tiny, so that what a GPU runs is known to run."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(script, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)


def test_storm_and_steady(tmp_path):
    done = run("gpu_train.py", "--device", "cpu", "--tiny", "--out", str(tmp_path / "r.json"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    parts = json.loads((tmp_path / "r.json").read_text())["parts"]
    assert parts["storm"]["steps"] == 10 and parts["storm"]["compiles"]["recompile"] >= 3
    assert max(parts["storm"]["recompiles_at_steps"]) > 2  # in mid-training
    assert parts["steady"]["steps"] == 24 and parts["steady"]["compiles"] == {"first": 2}
    assert parts["steady"]["late_recompiles"] == 0
    assert done.stdout.splitlines()[-1].startswith("gpu_train: ok")


def test_overhead_is_a_ratio_of_parts(tmp_path):
    """A tiny step is fifty times shorter than a real one, so no limit is held here."""
    done = run("overhead.py", "--tiny", "--limit", "1", "--out", str(tmp_path / "r.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "r.json").read_text())
    assert set(found["parts"]) == {"events", "boundary", "batches", "drift", "dashboard"}
    assert 0 < found["ratio"] < 0.5
    assert abs(found["ratio"] - sum(found["parts"].values())) < 1e-3


def test_several_devices_equal_one_and_a_target_thread_feeds_them(tmp_path):
    arguments = ("--device", "cpu", "--tiny", "--parts", "equal", "dedicated", "--out", str(tmp_path / "r.json"))
    done = run("several_gpus.py", *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    parts = json.loads((tmp_path / "r.json").read_text())["parts"]
    assert parts["equal"]["worst_weight_difference"] < 1e-4 and not parts["equal"]["drift_alarms"]
    assert parts["dedicated"]["dedicated"]["steps"] == 20
