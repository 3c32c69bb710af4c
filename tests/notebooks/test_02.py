"""notebooks/02_thread_race.ipynb, run headless with two strategies under two workloads."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from little_notebooks import ROOT, outputs

from dflash_lib import runs

NOTEBOOK = ROOT / "notebooks" / "02_thread_race.ipynb"


def test_it_shows_the_race_and_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    wanted = {
        "strategies": "none, thread_local",
        "workloads": "symbolic_trace, shared_gpu_backward",
        "steps": 4,
        "threads": 2,
        "stall": 4,
        "out": str(tmp_path / "race"),
    }
    executed = runs.execute(NOTEBOOK, wanted, tmp_path / "run", progress=False)
    assert runs.run_state(tmp_path / "run") == "completed"
    results = {(r["strategy"], r["workload"]): r for r in json.loads((tmp_path / "race" / "race.json").read_text())}
    assert results["none", "symbolic_trace"]["errors"]
    assert results["none", "shared_gpu_backward"]["outcome"] == "hang"
    assert {r["outcome"] for (strategy, _), r in results.items() if strategy == "thread_local"} == {"ok"}
    said = outputs(executed)
    assert "device-autograd" in said  # the hang's stacks
    assert "thread_local under symbolic_trace: " in said
    last = nbformat.read(executed, 4).cells[-1].outputs
    assert [output.data["image/png"] for output in last if "image/png" in output.get("data", {})]
    assert (tmp_path / "race" / "race.png").stat().st_size > 10_000
