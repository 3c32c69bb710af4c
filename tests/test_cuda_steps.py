"""What a GPU is given without waiting for it, on meta tensors: no value is read, and nothing comes from the host.

A CUDA graph's capture breaks when the host reads a value or copies one to the device, and a training step that does so
waits for all work queued before it. Meta tensors have a device and no values: reading one raises, and what is made of
host values or moved between devices is seen by the mode below.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import make_drafter, make_target
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash_lib import blocks, loss, session
from dflash_lib.head import Head
from dflash_lib.steps import DraftStep


class NothingFromTheHost(TorchDispatchMode):
    """Raises where an operation makes a tensor of host values, moves one between devices, or reads one."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        found = function(*arguments, **(options or {}))
        name = str(function).removeprefix("aten.")
        devices = {leaf.device.type for leaf in tree_leaves((arguments, options, found)) if torch.is_tensor(leaf)}
        if name.startswith(self.READS):
            raise AssertionError(f"{name} reads a value on the host")
        if name.startswith(("lift_fresh", "_to_copy", "copy_")) and "cpu" in devices:
            raise AssertionError(f"{name} brings values from the host")
        return found


class Recorded:
    """Stands for steps.Captured: runs first, as there, then one in which nothing may come from the host."""

    def __init__(self, function: Any, reset: Any, pool: Any, stream: Any) -> None:
        reset()
        function()
        with NothingFromTheHost():
            function()


@pytest.mark.parametrize(
    ("family", "temperature"), [("llama", 0.0), ("llama", 0.9), ("gemma2", 0.0), ("gpt_neox", 0.0)]
)
def test_decoding_can_be_captured(family: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(family, dtype=torch.bfloat16).to("meta")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(session, "Captured", Recorded)
    drafter = make_drafter(target).to("meta")
    options = session.Options(30, temperature, frozenset(), 7, 3, True, None, None)
    with torch.no_grad():
        made = session.Session(target, lambda *sizes: DraftStep(target, drafter, *sizes), 6, 13, options)
        assert made.static and len(made.steps) == 3
        session.Session(target, None, 1, 13, options)


@pytest.mark.parametrize("window", [None, 40])
def test_a_step_of_training_waits_for_nothing(window: int | None) -> None:
    """Blocks, mask, forward, loss, backward: what benchmarks/step.py captures, and what a lane does between batches."""
    rows, length, count, size, vocabulary = 2, 96, 8, 6, 40
    drafter = make_drafter(make_target(dtype=torch.float32), dtype=torch.bfloat16).to("meta")
    head = Head(torch.empty(vocabulary, 32, dtype=torch.bfloat16, device="meta"))
    ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
    response = torch.ones(rows, length, dtype=torch.bool, device="meta")
    anchors = torch.zeros(rows, count, dtype=torch.long, device="meta")
    keep = torch.ones(rows, count, dtype=torch.bool, device="meta")
    features = torch.empty(rows, length, 64, dtype=torch.bfloat16, device="meta")

    def step() -> None:
        made = blocks.make_blocks(ids, response, anchors, keep, block_size=size, gamma=4.0, mask_token_id=39)
        blocks.block_mask(made.anchors, made.keep, length, size, window=window)
        hidden = drafter(
            features,
            torch.nn.functional.embedding(made.inputs, head.weight),
            blocks.context_positions(None, length, rows, "meta"),
            made.positions,
            blocks.visible_dense(made.anchors, made.keep, length, size, window=window),
        )
        loss.drafter_loss(hidden, head, made.labels, made.weights, block_size=size, chunk_blocks=5).mean().backward()

    step()
    with NothingFromTheHost():
        step()
    assert drafter.fc.weight.grad is not None


@pytest.mark.parametrize("act", [lambda x: x.sum().item(), lambda x: x + torch.tensor([1.0]).to(x), lambda x: x[x > 0]])
def test_what_would_break_a_capture_is_seen(act: Any) -> None:
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), NothingFromTheHost():
        act(torch.ones(3, device="meta"))
