"""notebooks/07_compile_any_model.ipynb, run headless with a few steps: what it recorded, and that the fix fixes it."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from little_notebooks import ROOT, outputs

from dflash_lib import runs, timeline

NOTEBOOK = ROOT / "notebooks" / "07_compile_any_model.ipynb"


def test_it_records_two_threads_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    executed = runs.execute(NOTEBOOK, {"steps": 4, "lengths": [8, 12], "bucket": 16}, tmp_path / "run", progress=False)
    book = nbformat.read(executed, 4)
    found = [o for cell in book.cells for o in cell.get("outputs", ())]
    assert not [o for o in found if o.output_type == "error"]
    assert sum("image/png" in o.get("data", {}) for o in found) == 2
    assert "gone" in outputs(executed) and runs.run_state(tmp_path / "run") == "completed"
    written, padded = timeline.load(tmp_path / "run" / "as-written"), timeline.load(tmp_path / "run" / "padded")
    for run in (written, padded):
        assert [lane.name for lane in run.lanes] == ["worker-0", "worker-1"]
        assert [lane.step_numbers for lane in run.lanes] == [[1, 2, 3, 4]] * 2
    assert written.offenders() and not padded.offenders()
    assert {cls: row[0] for cls, row in padded.by_class().items()} == {"first": 2, "backward": 2}
