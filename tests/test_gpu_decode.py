"""benchmarks/gpu_decode.py on a CPU with a tiny target: the same code, eager, over the same static buffers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tiny_models import make_target, one_thread, own_greedy

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_decode.py"


def script():
    spec = importlib.util.spec_from_file_location("gpu_decode", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_cpu_twin_is_lossless_and_writes_its_results(tmp_path, monkeypatch, capsys):
    bench = script()
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    monkeypatch.setattr(bench.target, "load", lambda name, dtype, **_: make_target("llama", dtype=dtypes[dtype]))
    monkeypatch.setattr(bench, "some_prompts", lambda loaded, count: [[3 + i, 4, 5 + i] for i in range(count)])
    out = tmp_path / "results" / "gpu_decode.json"
    with one_thread():
        result = bench.main(
            ["--device", "cpu", "--prompts", "5", "--few", "2", "--batch", "3", "--tokens", "30", "--out", str(out)]
        )
    assert json.loads(out.read_text()) == result
    found = result["lossless_float32"]
    assert [(one["prompts"], one["batch"]) for one in found] == [(2, 1)] * 2 + [(5, 3)] * 2 + [(5, 1)] * 2
    assert all(one["wrong"] == 0 and one["lossless"] and one["tokens"] == 30 * one["prompts"] for one in found)
    assert found[3]["lengths_seen"] >= 4, "spoiled drafts must show many acceptance lengths"
    assert [(one["cuda_graphs"], one["prompts"]) for one in result["speed_bfloat16"]] == [(False, 2), (False, 5)]
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].endswith("begins: target smollm2 on cpu") and "same" in lines[2]
    assert lines[-1].startswith('{"lossless": true')


def test_what_is_measured_is_on_disk_when_a_later_stage_dies(tmp_path, monkeypatch):
    bench = script()
    monkeypatch.setattr(bench.target, "load", lambda name, dtype, **_: make_target("llama", dtype=torch.float32))
    monkeypatch.setattr(bench, "some_prompts", lambda loaded, count: [[3 + i, 4, 5 + i] for i in range(count)])
    monkeypatch.setattr(bench, "measure_speed", lambda *_: 1 / 0)
    with one_thread(), pytest.raises(ZeroDivisionError):
        bench.main(["--device", "cpu", "--prompts", "2", "--tokens", "4", "--out", str(tmp_path / "r.json")])
    assert len(json.loads((tmp_path / "r.json").read_text())["lossless_float32"]) == 2


def test_spoiled_drafts_are_right_except_where_they_are_spoiled():
    target = make_target("llama")
    text = [3, 4, *own_greedy(target, [3, 4], 30)]
    drafts = script().SpoiledText([text], 6, 1, torch.device("cpu"))
    drafts.begin([0], torch.zeros(0), torch.zeros(0))
    wrong = 0
    for position in range(2, 20):
        found = drafts.draft(torch.tensor([text[position]]), torch.tensor([position]), 64)[0].tolist()
        wrong += sum(a != b for a, b in zip(found, text[position + 1 : position + 6], strict=True))
    assert 0 < wrong < 0.4 * 18 * 5
