"""Notebook 04 under papermill with tiny parameters: its files, its pictures, and a checkpoint of another target."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import nbformat
import pytest
from tiny_models import make_drafter_of

from dflash_lib import checkpoint, runs, target
from dflash_lib.acceptance import Settings
from dflash_lib.config import ConfigError

HERE = Path(__file__).parent
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
