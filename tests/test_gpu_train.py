"""Benchmarks of the trainer on a CPU: the same scripts, tiny, so that what a GPU runs is known to run."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import several_gpus

ROOT = Path(__file__).resolve().parent.parent


def run(script, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=590, check=False)


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
    assert parts["dedicated"]["tiny dedicated"]["steps"] == parts["dedicated"]["tiny shared"]["steps"] == 20


def test_threads_and_processes_are_measured_in_processes_of_their_own(tmp_path):
    arguments = ("--device", "cpu", "--tiny", "--parts", "scaling", "--counts", "2", "--keep", str(tmp_path / "kept"))
    done = run("several_gpus.py", *arguments, "--out", str(tmp_path / "r.json"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "r.json").read_text())["parts"]["scaling"]
    assert found["tiny x2 threads"]["tokens_per_s"] > 0 and found["tiny x2 processes"]["tokens_per_s"] > 0
    assert {file.name for file in (tmp_path / "kept").iterdir()} == {
        "tiny-x2-shared-timeline.png",
        "tiny-x2-shared-events.jsonl",
    }


def test_a_part_that_is_cut_keeps_what_it_has_measured(tmp_path):
    script = tmp_path / "part.py"
    script.write_text(
        "import sys, time, pathlib; pathlib.Path(sys.argv[sys.argv.index('--out') + 1]).write_text('{\"ms\": 3}')\n"
        "time.sleep(60)\n"
    )
    found = several_gpus.run_part(str(script), argparse.Namespace(device="cpu", tiny=True), "slow", 2)
    assert found["ms"] == 3 and found["ok"] is False and found["error"] == "ended after 2 s"
