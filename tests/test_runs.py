"""Run folders, their status and environment, and notebooks executed in them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import little_notebooks
import nbformat
import pytest
from little_notebooks import ROOT

from dflash_lib import launch, runs
from dflash_lib.config import ConfigError, RunConfig
from dflash_lib.run_folder import RUN_DIR_VARIABLE


@pytest.fixture(autouse=True)
def _kernels_find_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)


def config(tmp_path: Path, **fields: Any) -> RunConfig:
    return RunConfig(runs_dir=str(tmp_path), **fields)


# --- folders --------------------------------------------------------------------------------------------------------
def test_a_folder_is_named_after_the_run_and_the_time(tmp_path: Path) -> None:
    folders = [runs.new_run_dir(config(tmp_path, name="first")) for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(re.fullmatch(r"first-\d{8}-\d{6}(-\d+)?", folder.name) for folder in folders)
    assert json.loads((folders[0] / "config.json").read_text())["name"] == "first"


def test_an_exact_folder_and_the_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs.new_run_dir(config(tmp_path, run_dir=str(tmp_path / "here"))) == tmp_path / "here"
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path / "launched"))
    assert runs.new_run_dir(config(tmp_path)) == tmp_path / "launched"


def test_a_notebooks_runs_lie_beside_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "dflash_lib").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert runs.runs_root("runs") == tmp_path / "runs"
    monkeypatch.chdir(tmp_path)
    assert runs.runs_root("runs") == tmp_path / "runs"


@pytest.mark.parametrize("state", ["completed", "running"])
def test_a_run_is_not_written_over(tmp_path: Path, state: Any) -> None:
    runs.write_status(tmp_path, state)
    with pytest.raises(ConfigError, match=f"^run_dir: .* holds a run that is {state}; "):
        runs.new_run_dir(config(tmp_path, run_dir=str(tmp_path)))
    for resumed in (tmp_path, tmp_path / "checkpoints" / "step-000010"):
        if state == "running":  # two writers in one folder
            with pytest.raises(ConfigError, match="stop that run first"):
                runs.new_run_dir(config(tmp_path, run_dir=str(tmp_path), resume=str(resumed)))
            continue
        assert runs.new_run_dir(config(tmp_path, run_dir=str(tmp_path), resume=str(resumed))) == tmp_path


def test_a_folder_of_runs_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^runs_dir: .*file/.* cannot be made"):
        runs.new_run_dir(config(tmp_path / "file"))


# --- status ---------------------------------------------------------------------------------------------------------
def test_a_status_keeps_its_start_and_its_step(tmp_path: Path) -> None:
    assert runs.read_status(tmp_path) is None
    assert runs.run_state(tmp_path) == "new"
    first = runs.write_status(tmp_path, "running", step=0)
    assert (first["pid"], first["ended"], first["v"]) == (os.getpid(), None, 1)
    runs.write_status(tmp_path, "running", step=7)
    try:
        raise ValueError("bad row")
    except ValueError as error:
        last = runs.write_status(tmp_path, "failed", error=error, thread="drafter-1")
    assert last == runs.read_status(tmp_path)
    assert (last["started"], last["step"], last["state"]) == (first["started"], 7, "failed")
    assert last["ended"] >= last["started"]
    assert (last["error"]["thread"], last["error"]["type"], last["error"]["message"]) == (
        "drafter-1",
        "ValueError",
        "bad row",
    )
    assert "test_runs.py" in last["error"]["traceback"]


def test_statuses_match_the_contract(tmp_path: Path) -> None:
    rule = json.loads((Path(__file__).parent / "schemas" / "status.schema.json").read_text())
    jsonschema.validate(runs.write_status(tmp_path, "running"), rule)
    jsonschema.validate(runs.write_status(tmp_path, "failed", error=ValueError("x")), rule)
    jsonschema.validate(runs.write_status(tmp_path, "stopped", step=3), rule)


def test_a_process_that_died_without_a_word(tmp_path: Path) -> None:
    code = (
        f"import time; from dflash_lib.runs import write_status as w; w({str(tmp_path)!r}, 'running'); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    while runs.read_status(tmp_path) is None:
        time.sleep(0.05)
    assert runs.run_state(tmp_path) == "running"
    child.kill()
    child.wait()
    assert runs.run_state(tmp_path) == "died"
    # its number, given to a younger process since
    status = runs.read_status(tmp_path)
    assert status is not None
    runs.write_json(tmp_path / "status.json", {**status, "pid": os.getpid()})
    os.utime(tmp_path / "status.json", (1e9, 1e9))
    assert runs.run_state(tmp_path) == "died"


def test_the_environment_tells_the_machine_and_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MY_PASSWORD", "hunter2")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "hunter2")
    environment = runs.write_environment(tmp_path, hazards={"tracing flag": "patched"})
    text = (tmp_path / "environment.json").read_text()
    assert "hunter2" not in text
    assert json.loads(text) == environment
    assert environment["variables"]["OMP_NUM_THREADS"] == "3"
    assert environment["packages"]["torch"]
    assert environment["hazards"] == {"tracing flag": "patched"}
    assert environment["memory_gib"] > 0.5


def test_the_core_needs_neither_torch_nor_notebooks() -> None:
    code = (
        "import sys, dflash_lib.runs as r; r.new_run_dir, r.sweep, r.table; heavy = 'torch papermill polars "
        "jupyter_client matplotlib ipywidgets'.split(); print([m for m in heavy if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    tail = runs.Tail(file)
    assert tail.poll() == []
    with file.open("ab", buffering=0) as stream:
        stream.write(b'{"a": 1}\n{"a": ')
        assert tail.poll() == [{"a": 1}]
        stream.write(b'2}\nnot json\n[3]\n{"a": 4}\n')
        assert tail.poll() == [{"a": 2}, {"a": 4}]
    assert tail.poll() == []


# --- notebooks ------------------------------------------------------------------------------------------------------
def test_a_notebook_runs_in_its_folder_with_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a kernelspec named python3 that leads elsewhere, as a user's home may have
    kernel = tmp_path / "share" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text(json.dumps({"argv": ["false"], "display_name": "x", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    source = little_notebooks.write(
        tmp_path / "a.ipynb",
        "steps = 3\nlr = 0.1",
        "import sys\nfrom dflash_lib import RunConfig, runs\n"
        "print(sys.executable, steps, lr, runs.new_run_dir(RunConfig()), sep='|')",
    )
    out = runs.execute(source, {"steps": 5}, tmp_path / "run", progress=False)
    assert out == tmp_path / "run" / "notebook.ipynb"
    assert little_notebooks.outputs(out).strip() == f"{sys.executable}|5|0.1|{tmp_path / 'run'}"
    status = runs.read_status(tmp_path / "run")
    assert status is not None
    assert status["state"] == "completed"
    assert status["ended"] > status["started"]


def test_an_error_in_a_notebook_is_the_runs_failure(tmp_path: Path) -> None:
    source = little_notebooks.write(
        tmp_path / "a.ipynb",
        "",
        "from dflash_lib import runs\nimport os\nruns.write_status(os.environ['DFLASH_RUN_DIR'], 'completed', step=4)",
        "def evaluate():\n    raise ValueError('no prompts')\nevaluate()",
    )
    with pytest.raises(runs.NotebookFailed, match="ValueError: no prompts"):
        runs.execute(source, {}, tmp_path / "run", progress=False)
    status = runs.read_status(tmp_path / "run")
    assert status is not None
    assert (status["state"], status["step"], status["error"]["type"]) == ("failed", 4, "ValueError")
    assert "evaluate" in status["error"]["traceback"]
    executed = nbformat.read(tmp_path / "run" / "notebook.ipynb", 4)
    assert any(o.output_type == "error" for cell in executed.cells for o in cell.get("outputs", ()))


def test_the_trainers_own_failure_is_not_written_over(tmp_path: Path) -> None:
    source = little_notebooks.write(
        tmp_path / "a.ipynb",
        "",
        "from dflash_lib import runs\nimport os\nhere, error = os.environ['DFLASH_RUN_DIR'], ValueError('bad row')\n"
        "runs.write_status(here, 'failed', step=9, error=error, thread='drafter-1')\nraise error",
    )
    with pytest.raises(runs.NotebookFailed):
        runs.execute(source, {}, tmp_path / "run", progress=False)
    status = runs.read_status(tmp_path / "run")
    assert status is not None
    assert (status["step"], status["error"]["thread"]) == (9, "drafter-1")


def test_a_kernel_that_dies_is_a_failure(tmp_path: Path) -> None:
    source = little_notebooks.write(tmp_path / "a.ipynb", "", "import os\nos.kill(os.getpid(), 9)")
    with pytest.raises(runs.NotebookFailed, match="the kernel died"):
        runs.execute(source, {}, tmp_path / "run", progress=False)
    assert runs.run_state(tmp_path / "run") == "failed"


@pytest.mark.parametrize("wait", ["time.sleep(600)", "await Run(trainer).wait()"])
def test_ctrl_c_reaches_the_cell_first(tmp_path: Path, wait: str) -> None:
    """A cell that blocks, and one that waits as notebook 01 does: an idle event loop does not hear the signal."""
    source = little_notebooks.write(
        tmp_path / "a.ipynb",
        "",
        "import time, pathlib, types\nfrom dflash_lib.supervise import Run\n"
        "trainer = types.SimpleNamespace(run_dir=pathlib.Path('run'), abort=lambda: None)\n"
        "trainer.stop = lambda: trainer.run._finished.set()\n"
        "def Run(trainer, make=Run):\n    trainer.run = make(trainer, progress=False)\n    return trainer.run",
        f"try:\n    pathlib.Path('begun').touch()\n    {wait}\nfinally:\n"
        "    time.sleep(0.5)\n    pathlib.Path('tidied').touch()",
    )
    code = f"from dflash_lib import runs; runs.execute({str(source)!r}, {{}}, {str(tmp_path / 'run')!r})"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        while not (tmp_path / "begun").exists():
            assert child.poll() is None
            time.sleep(0.05)
        time.sleep(1)  # the event loop is idle now
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=240)  # other tests may have the cores
    finally:
        child.kill()  # it outlives a test that failed, and its kernel with it
    assert (tmp_path / "tidied").exists()
    assert runs.run_state(tmp_path / "run") == "stopped"
    assert child.returncode != 0
    assert b"KeyboardInterrupt" in errors


def test_the_terminals_bar_names_what_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"steps": 2}')
    with launch.progress_bar(tmp_path, "demo"):
        for number in (1, 2):
            with (tmp_path / "events.jsonl").open("a") as log:
                log.write(json.dumps({"v": 1, "kind": "step", "step": number, "loss": 1.5}) + "\n")
    shown = capsys.readouterr().err
    assert "preparing: " in shown and shown.rstrip().endswith("all steps done; decoding and pictures follow]")
