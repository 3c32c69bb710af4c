"""notebooks/05_batch_report.ipynb, run headless: on runs that exist, and on a batch that it starts itself."""

from __future__ import annotations

from pathlib import Path

import little_notebooks
import nbformat
import pytest
from little_notebooks import ROOT

from dflash_lib import runs
from dflash_lib.config import RunConfig
from dflash_lib.events import EventLog

NOTEBOOK = ROOT / "notebooks" / "05_batch_report.ipynb"

TRAIN = """
from dflash_lib import RunConfig, runs
from dflash_lib.events import EventLog
folder = runs.new_run_dir(RunConfig(steps=3, lr=lr))
log = EventLog(folder / "events.jsonl")
for step in (1, 2, 3):
    log.emit("step", thread="drafter-0", step=step, loss=5 - step * lr, tokens=10, seconds=0.1)
"""


@pytest.fixture(autouse=True)
def _kernels_find_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def pictures(executed: Path) -> list[str]:
    book = nbformat.read(executed, 4)
    found = [o.get("data", {}) for cell in book.cells for o in cell.get("outputs", ())]
    assert not [o for cell in book.cells for o in cell.get("outputs", ()) if o.output_type == "error"]
    return [data["image/png"] for data in found if "image/png" in data]


def test_it_reports_on_runs_that_exist(tmp_path: Path) -> None:
    for k, lr in enumerate((0.1, 0.2)):
        folder = tmp_path / "batch" / f"run-{k}"
        folder.mkdir(parents=True)
        runs.write_text(folder / "config.json", RunConfig(lr=lr).to_json())
        with EventLog(folder / "events.jsonl") as log:
            for step in range(1, 6):
                log.emit(
                    "step", thread="drafter-0", step=step, loss=5 - lr * step, grad_norm=1.0, tokens=9, seconds=0.1
                )
        runs.write_status(folder, "completed", step=5)
    executed = runs.execute(
        NOTEBOOK, {"batch": str(tmp_path / "batch"), "metric": "grad_norm"}, tmp_path / "r", progress=False
    )
    assert len(pictures(executed)) == 1
    assert "run-1" in little_notebooks.outputs(executed)
    assert (tmp_path / "batch" / "comparison.png").exists()
    assert runs.run_state(tmp_path / "r") == "completed"


def test_it_runs_a_batch_of_its_own(tmp_path: Path) -> None:
    train = little_notebooks.write(tmp_path / "train.ipynb", "lr = 0.1", TRAIN)
    wanted = {"notebook": str(train), "grid": {"lr": [0.1, 0.5]}, "base": {}, "out": str(tmp_path / "batch")}
    executed = runs.execute(NOTEBOOK, wanted, tmp_path / "r", progress=False)
    assert len(pictures(executed)) == 1
    said = little_notebooks.outputs(executed)
    assert "[2/2] lr=0.5" in said
    assert [runs.run_state(folder) for folder in runs.folders(tmp_path / "batch")] == ["completed", "completed"]
