"""notebooks/03_recompile_timeline.ipynb, run headless: on a run, in comparison with another, as a check that fails."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from little_notebooks import ROOT, outputs
from timeline_data import training

from dflash_lib import runs, timeline, timeline_notebook
from dflash_lib.errors import UserError
from dflash_lib.events import EventLog

NOTEBOOK = ROOT / "notebooks" / "03_recompile_timeline.ipynb"


@pytest.fixture(autouse=True)
def _kernels_find_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def recorded(folder: Path, changes: int) -> Path:
    with EventLog(folder / "events.jsonl") as log:
        training(log, drafters=2, steps=20, changes=changes)
    return folder


def test_it_draws_compares_and_fails_where_asked(tmp_path: Path) -> None:
    before, after = recorded(tmp_path / "runs" / "before", 4), recorded(tmp_path / "runs" / "after", 1)
    parameters = {
        "run": str(after),
        "compare_with": str(before),
        "axis": "step",
        "fail_after_step": 3,
        "out": str(after),
    }
    with pytest.raises(runs.NotebookFailed):
        runs.execute(NOTEBOOK, parameters, tmp_path / "view", progress=False)
    assert runs.run_state(tmp_path / "view") == "failed"
    book = nbformat.read(tmp_path / "view" / "notebook.ipynb", 4)
    data = [o["data"] for cell in book.cells for o in cell.get("outputs", ()) if "data" in o]
    assert sum("image/png" in d for d in data) == 2  # the comparison, and the timeline before the failing check
    assert any("<iframe" in d.get("text/html", "") for d in data)
    errors = [o for cell in book.cells for o in cell.get("outputs", ()) if o.output_type == "error"]
    assert len(errors) == 1 and "recompiled after step 3" in errors[0].evalue
    assert "changed" in outputs(tmp_path / "view" / "notebook.ipynb")
    assert {p.name for p in after.iterdir()} >= {*timeline.OUTPUTS, "comparison.png"}


def test_the_newest_of_several_runs_is_found_and_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run yet"):
        timeline_notebook.find(tmp_path)
    recorded(tmp_path / "a", 1)
    newest = recorded(tmp_path / "b", 1)
    assert timeline_notebook.find(tmp_path) == newest and timeline_notebook.find(tmp_path / "a") == tmp_path / "a"
    with pytest.raises(UserError, match="axes: is no parameter; did you mean 'axis'"):
        timeline_notebook.View.from_dict({"axes": "step"})
