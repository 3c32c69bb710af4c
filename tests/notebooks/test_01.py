"""Notebook 01 headless, through papermill: it leaves what it promises, and a worker's error reaches the shell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_texts import save_folder

from dflash_lib import events, runs

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "01_train_drafter.ipynb"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Parameters that make the notebook small: a random target in a folder, two files of conversations, eager."""
    folder = tmp_path_factory.mktemp("tiny")
    save_folder(folder / "target")
    for name, count in (("train", 12), ("heldout", 3)):
        lines = []
        for index in range(count):
            question, answer = f"{name} {index}: the quick brown fox?", "0123456789 the lazy dog. " * (1 + index % 3)
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            lines.append(json.dumps({"messages": turns}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "target": str(folder / "target"),
        "train_data": str(folder / "train.jsonl"),
        "heldout_data": str(folder / "heldout.jsonl"),
        "runs_dir": str(folder),
        "devices": ["cpu", "cpu"],
        "steps": 3,
        "rows": 1,
        "anchors": 4,
        "block_size": 4,
        "drafter_layers": 1,
        "buckets": None,
        "backend": "eager",
        "evaluate_prompts": 2,
        "evaluate_tokens": 6,
    }


def test_the_notebook_leaves_what_it_promises(tmp_path, tiny, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    parameters = {**tiny, "target_layers": [0, 2, 3], "run_dir": str(tmp_path), "lr": "1e-3"}  # as a shell gives it
    executed = runs.execute(NOTEBOOK, parameters, tmp_path, progress=False)
    cells = json.loads(executed.read_text())["cells"]
    outputs = [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    printed = "".join(
        "".join(output["text"])
        for output in outputs
        if output["output_type"] == "stream" and output["name"] == "stdout"
    )
    for words in ("drafter-0 on cpu: loss", "drafter-1 on cpu: loss", "tokens a pass", "What to expect", "run folder:"):
        assert words in printed, printed
    assert (tmp_path / "summary.txt").read_text() in printed
    assert any("image/png" in output.get("data", {}) for output in cells[-1]["outputs"])
    status = runs.read_status(tmp_path)
    assert (status["state"], status["step"], status["error"]) == ("completed", 3, None)
    left = {path.name for path in tmp_path.iterdir()}
    wanted = "timeline.png timeline.svg timeline.html timeline.trace.json loss.png acceptance.json notebook.ipynb"
    assert set(wanted.split()) <= left, left
    (found,) = json.loads((tmp_path / "acceptance.json").read_text())["sets"]
    assert found["prompts"] == 2 and 1 <= found["tau_mean"] <= 4 and found["lossless"]
    log = events.read(tmp_path / "events.jsonl")
    assert {event["thread"] for event in log if event["kind"] == "step"} == {"drafter-0", "drafter-1"}
    assert {event["thread"] for event in log if event["kind"] == "compile"} == {"drafter-0", "drafter-1"}


def test_a_workers_error_ends_papermill_with_its_traceback(tmp_path, tiny):
    """A backend that raises does so in the threads, where each compiles for itself."""
    notebook = json.loads(NOTEBOOK.read_text())
    fault = {
        "cell_type": "code",
        "execution_count": None,
        "id": "fault",
        "metadata": {},
        "outputs": [],
        "source": "import torch._dynamo as _dynamo\n\n\ndef _breaks(graph, inputs):\n"
        "    raise RuntimeError('this backend breaks')\n\n\n_dynamo.register_backend(_breaks, name='breaks')",
    }
    notebook["cells"].insert(2, fault)  # after isolation is installed
    (tmp_path / "faulty.ipynb").write_text(json.dumps(notebook))
    parameters = {**tiny, "target_layers": [0, 2, 3], "run_dir": str(tmp_path / "run"), "backend": "breaks"}
    (tmp_path / "p.json").write_text(json.dumps(parameters))  # JSON is YAML
    command = [sys.executable, "-m", "papermill", str(tmp_path / "faulty.ipynb"), str(tmp_path / "out.ipynb")]
    command += ["--no-progress-bar", "-k", "python3", "-f", str(tmp_path / "p.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JUPYTER_PLATFORM_DIRS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr[-2000:]
    assert "this backend breaks" in done.stderr and "learn_from" in done.stderr, done.stderr[-3000:]
    status = runs.read_status(tmp_path / "run")
    assert status["state"] == "failed"
    assert status["error"]["thread"].startswith("drafter-") and "learn_from" in status["error"]["traceback"]
