"""Nothing recompiles after a bucket's first step, over 2,000 steps of the packaged conversations' own lengths.

The real road: the packaged files through the packaged target's tokenizer and template, row stream, anchors, blocks,
two drafter threads of a Trainer; target and drafter are tiny and random. A lane compiles what it compiles on a GPU
(the layer and the loss of a chunk) with a backend that only traces, and recompiling is counted by the run's own events.
``python -m pytest -m soak tests/soak/test_real_lengths.py`` writes ``benchmarks/results/soak_recompiles.json``.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainers import VOCABULARY, tiny_config, tiny_target
from transformers import AutoTokenizer

from dflash_lib import data, events, packaged, replica, threads
from dflash_lib.data import Dataset, Row

RESULTS = Path(os.environ.get("SOAK_RESULTS", Path(__file__).parents[2] / "benchmarks" / "results"))
STEPS = 2000


def packaged_rows() -> Dataset:
    """Rows as the packaged target has them, in length and answers; their ids are folded into a tiny vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(packaged.folder())
    reader: Any = SimpleNamespace(tokenizer=tokenizer, stop_ids=(tokenizer.eos_token_id,))
    rows = data.load("packaged", reader, max_length=512).rows
    return Dataset([Row(row.id, row.ids % VOCABULARY, row.mask, row.source) for row in rows])


def trained(run_dir: Path) -> tuple[list[int], list[dict[str, Any]]]:
    """The buckets, and the events of the run."""
    dataset = packaged_rows()
    config = tiny_config(run_dir, compile=True, backend="eager", steps=STEPS, rows=1, drafter_layers=2, drift_every=0)
    trainer = threads.Trainer(config, target=tiny_target(), dataset=dataset, heldout=dataset)
    trainer.start().join()
    return trainer.ready.buckets, events.read(run_dir / "events.jsonl")


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_nothing_recompiles_over_the_packaged_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = torch.device("cuda")
    monkeypatch.setattr(
        threads, "entry_points", lambda config, device, *rest: replica.entry_points(config, on_gpu, *rest)
    )
    buckets, log = trained(tmp_path / "run")
    steps = [event for event in log if event["kind"] == "step"]
    compiles = [event for event in log if event["kind"] == "compile"]
    lanes = sorted({event["thread"] for event in steps})
    firsts = {lane: first_steps(steps, lane) for lane in lanes}
    late = [event for event in compiles if event["step"] not in firsts[event["thread"]].values()]
    result = {
        "torch": version("torch"),
        "steps": STEPS,
        "lanes": len(lanes),
        "buckets": buckets,
        "steps_by_bucket": dict(Counter(event["bucket"] for event in steps if event["thread"] == lanes[0])),
        "first_steps": firsts,
        "compiles": len(compiles),
        "compiles_after_first_steps": len(late),
        "alarms": sum(event["kind"] == "alarm" for event in log),
    }
    (RESULTS / "soak_recompiles.json").write_text(json.dumps(result, indent=1) + "\n")
    assert len(steps) == 2 * STEPS and len(buckets) > 1
    assert not late, late[0]
    assert len(compiles) == 2 * (len(buckets) + 1), "in each lane a layer for each bucket, one loss"


def first_steps(steps: list[dict[str, Any]], lane: str) -> dict[int, int]:
    """bucket -> first step of this lane in it."""
    found: dict[int, int] = {}
    for event in sorted((event for event in steps if event["thread"] == lane), key=lambda event: event["step"]):
        found.setdefault(event["bucket"], event["step"])
    return found
