"""Numbers for TensorBoard and trackio, read back by their own readers."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from fake_trainer import FakeTrainer

from dflash_lib import sinks
from dflash_lib.config import ConfigError, RunConfig
from dflash_lib.events import read


def trainer(tmp_path: Path) -> FakeTrainer:
    config = RunConfig(steps=6, name="sinks", runs_dir=str(tmp_path))
    return FakeTrainer(config, seconds=0.01, compile_seconds=0.02)


def losses(run: FakeTrainer, thread: str) -> list[tuple[int, float]]:
    found = read(run.run_dir / "events.jsonl")
    return [(e["step"], e["loss"]) for e in found if e["kind"] == "step" and e["thread"] == thread]


def test_tensorboard_reads_what_was_written_live_and_afterwards(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trainer(tmp_path)
    run.evaluate()
    sinks.follow(run, sinks.TensorBoard(tmp_path / "live"))
    run.start().join()
    (evaluated,) = (e for e in read(run.run_dir / "events.jsonl") if e["kind"] == "evaluation")
    sinks.export(run.run_dir, sinks.TensorBoard(tmp_path / "after"))
    for name in ("live", "after"):
        log = EventAccumulator(str(tmp_path / name))
        log.Reload()
        found = [(s.step, s.value) for s in log.Scalars("loss/drafter-1")]
        assert found == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in losses(run, "drafter-1")]
        assert log.Scalars("compile_seconds/drafter-0")[-1].value >= 0.02
        assert log.Scalars("tokens_per_s/drafter-0")[0].value == pytest.approx(512 / 0.01)
        (tau,) = log.Scalars("tau_mean/heldout")
        assert (tau.step, tau.value) == (evaluated["step"], pytest.approx(evaluated["sets"][0]["tau_mean"]))


def test_trackio_keeps_them(tmp_path: Path) -> None:
    """In a process of its own: trackio chooses its folder when it is imported."""
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_sinks import sinks, trainer
run = trainer(Path({str(tmp_path)!r}))
sinks.follow(run, sinks.Trackio("drafters", "one", {{"lr": 0.1}}, auto_log_cpu=False, auto_log_gpu=False))
run.start().join()
"""
    here = {
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **here}, capture_output=True, text=True, check=True)
    [folder] = tmp_path.glob("sinks-*")
    with sqlite3.connect(tmp_path / "trackio" / "drafters.db") as database:
        rows = database.execute("select step, metrics from metrics where run_name = 'one' order by id").fetchall()
    kept = [(step, json.loads(values)) for step, values in rows]
    wanted = [
        (e["step"], e["loss"])
        for e in read(folder / "events.jsonl")
        if e["kind"] == "step" and e["thread"] == "drafter-0"
    ]
    assert [(step, values["loss/drafter-0"]) for step, values in kept if "loss/drafter-0" in values] == wanted


def test_a_sink_that_fails_is_dropped_and_the_run_goes_on(tmp_path: Path) -> None:
    class Broken:
        def write(self, values: Mapping[str, float], step: int, wall_time: float) -> None:
            raise OSError("no space left on device")

        def close(self) -> None: ...

    run = trainer(tmp_path)
    sinks.follow(run, Broken())
    run.start().join()
    text = (run.run_dir / "events.jsonl").read_text()
    assert "the sink Broken failed and was dropped: OSError('no space left on device')" in text
    assert len(losses(run, "drafter-0")) == 6


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(ConfigError, match=r"\[tensorboard\]"):
        sinks.TensorBoard(tmp_path)
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match=r"\[trackio\]"):
        sinks.Trackio("x")
