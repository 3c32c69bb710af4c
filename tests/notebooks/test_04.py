"""Notebook 04 under papermill with tiny parameters: its files, its pictures, and a checkpoint of another target."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import nbformat
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from test_evaluate import make_drafter_of  # noqa: E402

from dflash_lib import checkpoint, runs, target  # noqa: E402
from dflash_lib.acceptance import Settings  # noqa: E402
from dflash_lib.config import ConfigError  # noqa: E402

NOTEBOOK = HERE.parent.parent / "notebooks" / "04_evaluate_acceptance.ipynb"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    loaded = target.load("smollm2", dtype="float32", progress=False)
    folder = tmp_path_factory.mktemp("trained") / "checkpoints" / "step-000002"
    return checkpoint.save(make_drafter_of(loaded), folder, step=2, target="smollm2")


def prompt_file(folder):
    path = folder / "mine.jsonl"
    path.write_text(json.dumps({"prompt": "What is 7 times 8?"}))
    return path


def test_it_leaves_numbers_pictures_and_an_executed_notebook(saved, tmp_path):
    parameters = {
        "checkpoint": str(saved),
        "prompts": [str(prompt_file(tmp_path))],
        "max_new_tokens": 4,
        "simulate": False,
    }
    runs.execute(NOTEBOOK, {**parameters, "device": "cpu"}, tmp_path / "run", progress=False)
    found = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    jsonschema.validate(found, json.loads((HERE.parent / "schemas" / "acceptance.schema.json").read_text()))
    assert found["step"] == 2 and found["sets"][0]["name"] == "mine" and found["sets"][0]["lossless"] is True
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "completed"
    cells = nbformat.read(tmp_path / "run" / "notebook.ipynb", 4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert "image/png" in cells[-1].outputs[-1].data
    assert any("speed-up" in output.get("text", "") for output in outputs)


def test_a_wrong_parameter_is_named_in_one_line():
    with pytest.raises(ConfigError, match="max_new_token: is no parameter; did you mean 'max_new_tokens'"):
        Settings.from_namespace({"checkpoint": "runs", "max_new_token": 4}, set())
    with pytest.raises(ConfigError, match="count: "):
        Settings.from_namespace({"count": "many"}, set())


def test_the_notebook_is_committed_clean():
    notebook = nbformat.read(NOTEBOOK, 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert notebook.metadata.kernelspec.name == "python3"
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in code) == 1
    assert notebook.cells[0].cell_type == "markdown" and "fx_patch.install()" in code[0].source
