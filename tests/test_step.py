"""benchmarks/step.py on a CPU: the twin of what is timed on a GPU."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "step.py"


@pytest.fixture(scope="module")
def step() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_step", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()  # each variant compiles the same functions: together they would reach the recompile limit


@pytest.mark.parametrize("variant", ["default", "attention", "trainer"])
def test_a_step_is_measured_and_learns(step: Any, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "WARM_UP", 2)
    monkeypatch.setattr(step, "TIMED", 8)
    backend = "aot_eager" if variant == "default" else "eager"
    result = json.loads(json.dumps(step.measure("tiny", variant, "cpu", profile=False, backend=backend)))
    assert {"shape", "step_ms", "peak_gib", "first_step_s", "percent_of_790"} <= set(result)
    assert result["shape"] == "tiny" and result["step_ms"] > 0 and result["first_step_s"] > 0
    first, last = result["losses"]
    assert abs(first - math.log(256)) < 0.5 and last < first


@pytest.mark.parametrize(
    "variant", ["bfloat16", "no-attention", "no-loss", "no-optimizer", "no-blocks", "graph", "keep"]
)
def test_every_experiment_runs(step: Any, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variants of docs/step.md; without its optimizer the drafter stays as it is, without its blocks they do."""
    monkeypatch.setattr(step.layer, "recomputed", step.layer.recomputed)  # "keep" replaces it
    monkeypatch.setattr(step, "WARM_UP", 2)
    monkeypatch.setattr(step, "TIMED", 2)
    first, last = step.measure("tiny", variant, "cpu", profile=False, backend="eager")["losses"]
    assert math.isfinite(last) and (variant != "no-loss" or last < first)
    run = step.Step(step.SHAPES["tiny"], step.VARIANTS[variant], "cpu", "eager")
    before = run.drafter.fc.weight.detach().clone()
    run(), run()
    assert torch.equal(before, run.drafter.fc.weight) is (variant == "no-optimizer")
    assert (run.fixed is not None) is (variant == "no-blocks")


def test_the_command_passes_lines_on_and_writes_what_there_is(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    command = [sys.executable, str(SCRIPT), "--shapes", "tiny", "--variants", "eager", "--device", "cpu"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=True)
    (result,) = json.loads(out.read_text())
    assert (result["shape"], result["variant"]) == ("tiny", "eager")
    assert done.stdout.startswith("tiny eager: at most") and "tiny eager: first step after" in done.stdout
    late = subprocess.run([*command, "--seconds", "1"], capture_output=True, text=True, check=False)
    assert late.returncode == 1 and late.stdout.endswith("FAILED: tiny eager\n")


def test_flops_are_those_of_the_products_made(step: Any) -> None:
    """Every matrix product outside attention, as torch counts them, equals the formula without its attention term."""
    shape = step.SHAPES["tiny"]
    run = step.Step(shape, step.VARIANTS["eager"], "cpu")
    with FlopCounterMode(display=False) as counter:
        run()
    counts = {str(name): value for name, value in counter.get_flop_counts()["Global"].items()}
    products = sum(value for name, value in counts.items() if "mm" in name)
    slots = shape.rows * shape.anchors * shape.block_size
    wide = shape.heads * shape.head_dim
    attention = 3 * shape.layers * 4 * wide * slots * (shape.length / 2 + shape.block_size)
    assert products == pytest.approx(step.step_flops(shape) - attention)


def test_the_two_published_sizes(step: Any) -> None:
    """42 and 4 TFLOP a step: what the milliseconds of the best trainers are measured against."""
    assert step.step_flops(step.SHAPES["qwen3-4b"]) == pytest.approx(41.3e12, rel=0.02)
    assert step.step_flops(step.SHAPES["smollm2"]) == pytest.approx(3.8e12, rel=0.05)
