"""benchmarks/gpu_drafter.py without its commands: what it makes again, what it keeps, what it does when time is up."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gpu_drafter
import pytest


class Stages(gpu_drafter.Stages):
    """Commands that write what the real ones would, in no time."""

    def command(self, *words: Any, seconds: float, keep: bool = False) -> str:
        self.calls = [*getattr(self, "calls", []), str(words[0])]
        if words[0] == "regenerate":
            words[1].write_text("{}\n" * 5)
            (self.work / "heldout.jsonl").write_text("{}\n" * 2)
        elif words[0] == "train":
            run = words[words.index("--run-dir") + 1]
            chosen = dict(word.split("=") for word in map(str, words) if "=" in word)
            steps = int(chosen["steps"])
            for at in range(int(chosen["checkpoint_every"]) or steps, steps + 1, int(chosen["checkpoint_every"]) or 1):
                (run / "checkpoints" / f"step-{at:06d}").mkdir(parents=True)
            lines = [
                {"v": 1, "seq": step, "t": 0.05 * step, "attempt": 0, "kind": "step", "node": 0, "thread": "drafter-0"}
                | {"device": "cuda:0", "step": step, "seconds": 0.05, "loss": 10.0 / step, "accuracy": [0.5, 0.25]}
                for step in range(1, steps + 1)
            ]
            (run / "events.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        elif words[0] == "evaluate":
            out = words[words.index("--out") + 1]
            out.mkdir()
            step = int(words[1].name.partition("-")[2])
            (out / "acceptance.json").write_text(
                json.dumps({"sets": [{"name": "heldout", "tau_mean": 1 + step / 1e4}]})
            )
        return '{"real_tau_pooled": 1.5}'


def stages(tmp_path: Path, seconds: float = 500) -> Stages:
    (tmp_path / "work").mkdir(exist_ok=True)
    options = argparse.Namespace(
        work=tmp_path / "work", out=tmp_path / "r.json", device="cuda:0", tiny=False, seconds=seconds
    )
    return Stages(options)


def test_the_curve_is_of_one_run_and_a_second_call_makes_nothing_again(tmp_path: Path) -> None:
    first = stages(tmp_path)
    first.data(), first.short(), first.long()
    found = json.loads((tmp_path / "r.json").read_text())["stages"]
    assert list(found) == ["data", "short", "acceptance", "agreement", "long"]
    assert found["short"]["steps"] == 600 and found["short"]["loss"]["600"] < found["short"]["loss"]["50"]
    assert found["acceptance"]["tau_mean"] == 1.06
    steps = found["long"]["steps"]
    assert 4000 < steps < 6000, "two thirds of 500 s at 50 ms a step"
    taus = found["long"]["acceptance"]
    assert len(taus) >= 4 and list(taus) == sorted(taus, reverse=True), "the last checkpoint is measured first"
    second = stages(tmp_path)
    second.data(), second.short(), second.long()
    assert second.calls == ["benchmarks/simulated_agreement.py"]


def test_a_long_run_is_not_begun_when_little_time_is_left(tmp_path: Path) -> None:
    late = stages(tmp_path, seconds=100)
    late.data(), late.short(), late.long()
    assert "long" not in json.loads((tmp_path / "r.json").read_text())["stages"]
    assert not (tmp_path / "work" / "long").exists()


def test_a_command_is_ended_with_its_children_when_its_time_is_up(tmp_path: Path) -> None:
    made = gpu_drafter.Stages(
        argparse.Namespace(work=tmp_path, out=tmp_path / "r.json", device="cpu", tiny=True, seconds=60)
    )
    script = tmp_path / "slow.py"
    script.write_text("import time; time.sleep(60)")
    with pytest.raises(gpu_drafter.OutOfTime, match="ended after 6 s"):
        made.command(script, seconds=6)
    with pytest.raises(gpu_drafter.OutOfTime, match="no time left"):
        made.command(script, seconds=1)
