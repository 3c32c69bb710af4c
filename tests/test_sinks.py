"""Numbers for TensorBoard and trackio, read back by their own readers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_trainer import FakeTrainer

from dflash_lib import sinks
from dflash_lib.config import ConfigError, RunConfig


def trainer(tmp_path: Path) -> FakeTrainer:
    config = RunConfig(steps=6, name="sinks", runs_dir=str(tmp_path))
    return FakeTrainer(config, seconds=0.01, compile_seconds=0.02)


def losses(run: FakeTrainer, thread: str) -> list[tuple[int, float]]:
    from dflash_lib.events import read

    found = read(run.run_dir / "events.jsonl")
    return [(e["step"], e["loss"]) for e in found if e["kind"] == "step" and e["thread"] == thread]


def test_tensorboard_reads_what_was_written_live_and_afterwards(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trainer(tmp_path)
    sinks.follow(run, sinks.TensorBoard(tmp_path / "live"))
    run.start().join()
    sinks.export(run.run_dir, sinks.TensorBoard(tmp_path / "after"))
    for name in ("live", "after"):
        log = EventAccumulator(str(tmp_path / name))
        log.Reload()
        read = [(s.step, s.value) for s in log.Scalars("loss/drafter-1")]
        assert read == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in losses(run, "drafter-1")]
        assert log.Scalars("compile_seconds/drafter-0")[-1].value >= 0.02
        assert log.Scalars("tokens_per_s/drafter-0")[0].value == pytest.approx(512 / 0.01)


def test_trackio_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sent: list[tuple[dict[str, float], int]] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            sent.append((values, step))

        def finish(self) -> None:
            sent.append(({}, -1))

    import trackio

    asked: dict[str, Any] = {}
    monkeypatch.setattr(trackio, "init", lambda **k: asked.update(k) or Run())
    run = trainer(tmp_path)
    sinks.follow(run, sinks.Trackio("drafters", "one", {"lr": 0.1}))
    run.start().join()
    assert (asked["project"], asked["name"], asked["config"]) == ("drafters", "one", {"lr": 0.1})
    got = [(step, values["loss/drafter-0"]) for values, step in sent if "loss/drafter-0" in values]
    assert got == losses(run, "drafter-0")
    assert sent[-1] == ({}, -1)


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
