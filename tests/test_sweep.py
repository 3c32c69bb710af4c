"""Sweeps: what is refused before anything runs, what runs, what is not repeated; and runs compared."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import little_notebooks
import pytest
from little_notebooks import ROOT

from dflash_lib import runs
from dflash_lib.config import ConfigError, RunConfig
from dflash_lib.events import EventLog
from dflash_lib.sweep import Planned, _Sweep
from dflash_lib.sweep_plan import named, points

# The outside of a training run, in a second: some steps, a failure when told to, a halt while a file is there.
CELL = """
import os, pathlib, time
from dflash_lib import RunConfig, runs
from dflash_lib.events import EventLog
folder = runs.new_run_dir(RunConfig(steps=4, lr=lr, seed=seed))
runs.write_status(folder, "running")
log = EventLog(folder / "events.jsonl")
for step in range(1, 5):
    while pathlib.Path(os.environ.get("HALT", "/nowhere")).exists():
        time.sleep(0.05)
    log.emit("step", thread="drafter-0", step=step, loss=5 - step * lr, tokens=10, seconds=0.1)
if seed == 13:
    raise ValueError("unlucky")
runs.write_status(folder, "completed", step=4)
"""


@pytest.fixture(autouse=True)
def _kernels_find_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    return little_notebooks.write(tmp_path / "train.ipynb", "lr = 0.1\nseed = 0", CELL)


# --- the plan -------------------------------------------------------------------------------------------------------
def test_a_grid_is_every_combination_and_numbers_in_text_are_numbers() -> None:
    assert points({"lr": ["1e-3", 0.1], "seed": [0, 1]}, {}) == [
        {"lr": 0.001, "seed": 0},
        {"lr": 0.001, "seed": 1},
        {"lr": 0.1, "seed": 0},
        {"lr": 0.1, "seed": 1},
    ]


def test_folders_are_named_by_what_varies_and_by_everything() -> None:
    found = points({"lr": [0.1, 0.2], "steps": [5]}, {})
    first, again, other = named(found, {}), named(found, {}), named(found, {"seed": 1})
    assert list(first) == list(again)
    assert [name.split("-")[0] for name in first] == ["lr=0.1", "lr=0.2"]
    assert not set(first) & set(other), "another base is another run"
    wild = named([{"name": "a/../b c\n$"}, {"name": "x" * 300}], {})
    assert all("/" not in name and len(name) < 100 for name in wild)


@pytest.mark.parametrize(
    ("grid", "options", "said"),
    [
        ({"lr": "0.1"}, {}, "grid: lr: is not a list of values"),
        ({"lr": []}, {}, "grid: lr: is not a list of values"),
        ({}, {}, "grid: is empty"),
        ("lr", {}, "grid: is neither"),
        ({"learning_rate": [1]}, {}, "grid: learning_rate: is no parameter of train.ipynb"),
        ({"sed": [1]}, {}, "did you mean 'seed'?"),
        ({"lr": [0.1, -1]}, {}, "grid: lr: "),
        ({"lr": [0.1]}, {"base": {"lr": 0.2}}, "base: lr: is in the grid as well"),
        ({"lr": [0.1]}, {"base": {"seed": "x"}}, "base: seed: "),
        ({"lr": [0.1]}, {"base": {"stepz": 5}}, "base: stepz: is no parameter of train.ipynb; did you mean 'steps'?"),
        ({"lr": [0.1]}, {"parallel": 0}, "parallel: "),
        (
            {"lr": [0.1]},
            {"parallel": 2, "gpus_per_run": 2},
            "gpus_per_run: 2 runs at once with 2 GPUs each need more than the 3",
        ),
    ],
)
def test_what_every_run_would_refuse_is_refused_first(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grid: Any, options: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(ConfigError) as refused:
        runs.sweep(notebook, grid, out=tmp_path / "out", progress=False, **options)
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("notebook: train.ipynb\ngird: {lr: [1]}", "gird: is no key of a sweep; did you mean 'grid'?"),
        ("notebook: train.ipynb", "needs notebook: and either grid: or runs:"),
        ("grid: {lr: [1]", "line 1 is not valid YAML"),
        ("- 1", "holds no names and values"),
        ("notebook: nowhere.ipynb\ngrid: {lr: [1]}", "is no notebook that can be read"),
        ("notebook: train.ipynb\ngrid: {lr:1e-4}", "grid: lr:1e-4: is not a list of values"),
    ],
)
def test_a_sweep_file_with_a_fault(notebook: Path, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        runs.sweep_file(tmp_path / "s.yaml")
    assert said in str(refused.value)
    assert str(refused.value).startswith(str(tmp_path / "s.yaml"))


def test_slots_share_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    work = _Sweep(tmp_path, tmp_path, [], 4, 2, None, False)
    assert work._share(3) == {"CUDA_VISIBLE_DEVICES": "6,7", "OMP_NUM_THREADS": "2"}
    assert _Sweep(tmp_path, tmp_path, [], 1, None, None, False)._share(0) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    assert _Sweep(tmp_path, tmp_path, [], 2, 1, None, False)._share(1)["CUDA_VISIBLE_DEVICES"] == "6"


def test_a_stopped_run_goes_on_from_its_checkpoint(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(k))
    names = ("fresh", "stopped", "trained")
    for name, step in zip(names, (None, 2, 4), strict=True):
        (tmp_path / name).mkdir()
        runs.write_text(tmp_path / name / "config.json", RunConfig(steps=4).to_json())
        if step is not None:
            (tmp_path / name / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    work = _Sweep(notebook, tmp_path, [], 1, None, None, False)
    for name in names:
        work._start(Planned(tmp_path / name, {"lr": 0.1}))
    plans = [json.loads((tmp_path / name / "launch.json").read_text())["parameters"] for name in names]
    assert plans == [{"lr": 0.1}, {"lr": 0.1, "resume": str(tmp_path / "stopped")}, {"lr": 0.1}]


# --- doing it -------------------------------------------------------------------------------------------------------
def test_a_failing_run_does_not_stop_the_others_and_done_runs_are_not_repeated(notebook: Path, tmp_path: Path) -> None:
    plan = {"notebook": "train.ipynb", "out": str(tmp_path / "out"), "parallel": 2, "base": {"lr": 0.1}}
    (tmp_path / "s.yaml").write_text(json.dumps({**plan, "grid": {"seed": [0, 13]}}))  # JSON is YAML
    records = runs.sweep_file(tmp_path / "s.yaml", progress=False)
    assert [(r["parameters"]["seed"], r["state"], r["step"]) for r in records] == [
        (0, "completed", 4),
        (13, "failed", 0),
    ]
    assert records[1]["error"] == "ValueError: unlucky"
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["runs"] == records
    done = Path(records[0]["run_dir"]) / "notebook.ipynb"
    before = done.stat().st_mtime_ns
    table = runs.table(records)
    assert [line.split()[2] for line in table.splitlines()[3:5]] == ["completed", "failed"]

    again = runs.sweep(notebook, [{"seed": 0}, {"seed": 2}], base={"lr": 0.1}, out=tmp_path / "out", progress=False)
    assert [r["state"] for r in again] == ["completed", "completed"]
    assert done.stat().st_mtime_ns == before


def test_ctrl_c_leaves_a_state_that_goes_on(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halt = tmp_path / "halt"
    halt.touch()
    monkeypatch.setenv("HALT", str(halt))
    call = f"runs.sweep({str(notebook)!r}, {{'seed': [1, 2, 3]}}, out={str(tmp_path / 'out')!r}, parallel=1)"
    child = subprocess.Popen([sys.executable, "-c", f"from dflash_lib import runs; {call}"], stderr=subprocess.PIPE)
    while not list((tmp_path / "out").glob("*/events.jsonl")):
        assert child.poll() is None
        time.sleep(0.05)
    with pytest.raises(ConfigError, match=r"^out: another sweep is at work in"):
        runs.sweep(notebook, {"seed": [1, 2, 3]}, out=tmp_path / "out", progress=False)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=90)
    assert b"KeyboardInterrupt" in errors
    states = [run["state"] for run in json.loads((tmp_path / "out" / "sweep.json").read_text())["runs"]]
    assert states == ["stopped", "new", "new"]
    halt.unlink()
    records = runs.sweep(notebook, {"seed": [1, 2, 3]}, out=tmp_path / "out", parallel=2, progress=False)
    assert [r["state"] for r in records] == ["completed"] * 3


def test_a_run_that_takes_too_long_fails(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halt").touch()
    monkeypatch.setenv("HALT", str(tmp_path / "halt"))
    [record] = runs.sweep(notebook, {"seed": [1]}, out=tmp_path / "out", timeout=4, progress=False)
    assert (record["state"], record["error"]) == ("failed", "TimeoutError: took longer than 4 s")


# --- comparing ------------------------------------------------------------------------------------------------------
@pytest.fixture
def sweep_folder(tmp_path: Path) -> Path:
    """Three runs of two threads with known numbers; the third never took a step."""
    for k, lr in enumerate((0.1, 0.2, 0.3)):
        folder = tmp_path / f"run-{k}"
        folder.mkdir()
        runs.write_text(folder / "config.json", RunConfig(lr=lr, steps=20).to_json())
        with EventLog(folder / "events.jsonl") as log:
            for step in range(1, 21 if k < 2 else 1):
                for thread in (0, 1):
                    log.emit("step", thread=f"drafter-{thread}", step=step, t=step * 1.0, loss=10 - lr * step + thread,
                             tokens=100, seconds=1.0, grad_norm=float(step))  # fmt: skip
            log.emit("compile", thread="drafter-0", t=30.0, start=1.0, seconds=2.5, wait_seconds=0.5, cls="first")
            log.emit("compile", thread="drafter-0", t=30.0, start=1.0, seconds=1.5, wait_seconds=0.0, cls="recompile")
            log.emit("compile", thread="drafter-0", t=30.0, start=1.0, seconds=9.0, wait_seconds=0.0, cls="cache_hit")
        runs.write_status(folder, "completed" if k < 2 else "failed", error=None if k < 2 else ValueError("no\nrow"))
        if k == 0:
            sets = [{"name": "heldout", "tau_mean": 1.75, "speedup": 1.2}]
            runs.write_json(folder / "acceptance.json", {"v": 1, "sets": sets})
    return tmp_path


def test_a_run_in_numbers(sweep_folder: Path) -> None:
    row = runs.summary(sweep_folder / "run-0")
    # two threads: loss of step s is 10 - 0.1 s and one more; means over the first and the last ten steps
    assert row["loss_first"] == pytest.approx(10.5 - 0.1 * 5.5)
    assert row["loss"] == pytest.approx(10.5 - 0.1 * 15.5)
    assert row["tokens_per_s"] == pytest.approx(2 * 20 * 100 / 20)
    assert (row["step"], row["threads"], row["seconds"]) == (20, 2, 30.0)
    assert (row["compiles"], row["recompiles"], row["compile_seconds"], row["wait_seconds"]) == (3, 1, 13.0, 0.5)
    assert (row["tau_heldout"], row["speedup_heldout"]) == (1.75, 1.2)


def test_runs_as_a_frame_for_polars_and_pandas(sweep_folder: Path) -> None:
    frame = runs.frame(sweep_folder)
    assert frame["lr"].to_list() == [0.1, 0.2, 0.3]
    assert frame["state"].to_list() == ["completed", "completed", "failed"]
    assert frame["loss"].to_list()[2] is None
    assert "steps" not in frame.columns, "only what differs between runs"
    import pandas

    assert pandas.DataFrame(frame.to_dicts())["tau_heldout"].max() == 1.75


def test_a_metric_by_step(sweep_folder: Path) -> None:
    frame = runs.history(sweep_folder, "grad_norm")
    assert frame.shape == (80, 5)
    assert frame.filter(step=7)["grad_norm"].unique().to_list() == [7.0]
    assert runs.history(sweep_folder, "tokens_per_s")["tokens_per_s"].unique().to_list() == [100.0]
    with pytest.raises(ConfigError, match="metric: accuracy: no run has it; there is grad_norm, loss, seconds, tokens"):
        runs.history(sweep_folder, "accuracy")


def _columns(heads: list[str]) -> list[tuple[str, str]]:
    """The two lines of a table's head, column by column: they are divided by two blanks at the same place."""
    width = max(map(len, heads))
    above, below = (head.ljust(width) for head in heads)
    gaps = [i for i in range(width - 1) if above[i : i + 2] == below[i : i + 2] == "  "]
    starts = [0, *(i + 2 for i in gaps if above[i + 2].strip() or below[i + 2].strip())]
    ends = [*starts[1:], width]
    return [(above[a:b].strip(), below[a:b].strip()) for a, b in zip(starts, ends, strict=True)]


def test_a_table_and_a_picture(sweep_folder: Path) -> None:
    lines = runs.table(sweep_folder).splitlines()
    assert lines[1].split()[:4] == ["run", "lr", "state", "step"]
    assert [line.split()[0] for line in lines[3:6]] == ["run-0", "run-1", "run-2"]
    assert "main: ValueError: no row" in lines[5]
    assert len(lines) == 7 and lines[6].startswith("the same in all: ")
    # every column of the frame that has a value is told exactly once, in the table or below it
    told = [" ".join(head).replace(" ", "_").strip("_") for head in _columns(lines[:2])]
    told += [part.split()[0] for part in lines[6].removeprefix("the same in all: ").split(", ")]
    frame = runs.frame(sweep_folder)
    assert sorted(told) == sorted(name for name in frame.columns if frame[name].null_count() < 3)
    assert runs.draw(sweep_folder, sweep_folder / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in runs.draw(sweep_folder, sweep_folder / "a.svg", "grad_norm", "compile_seconds").read_text()


def test_folders_that_hold_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        runs.table(tmp_path)
