"""After each bucket's first step nothing recompiles, whatever the rows, anchors and absent blocks are."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_drafters import drafter_config
from torch._dynamo.utils import counters

from dflash_lib import blocks, layer, loss
from dflash_lib.drafter import Drafter
from dflash_lib.head import Head

BUCKETS = (128, 256, 384, 512, 640, 768)  # as many as there may be
ANCHORS, SIZE, HIDDEN, VOCABULARY = 6, 8, 32, 64


def compiles_by_step(steps: int, device: str, backend: str) -> list[tuple[int, int]]:
    """Trains on rows of mixed lengths, padded to buckets; (bucket, graphs compiled so far) of each step."""
    torch._dynamo.reset()
    on_gpu = device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = Drafter(drafter_config(head_dim=16, vocab_size=VOCABULARY, dtype=dtype), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator(device).manual_seed(0)
    head = Head(torch.randn(VOCABULARY, HIDDEN, generator=generator, device=device, dtype=dtype))
    lane_layer = torch.compile(layer.layer_forward, backend=backend, dynamic=False, fullgraph=True)
    lane_chunk = torch.compile(loss.loss_chunk, backend=backend, dynamic=False, fullgraph=True)
    lengths = random.Random(0)
    seen = []
    for step in range(steps):
        length = min(768, max(2, int(lengths.lognormvariate(5.4, 0.8))))
        bucket = next(size for size in BUCKETS if length <= size)
        response = torch.zeros(1, bucket, dtype=torch.bool)
        response[:, length // 2 : length] = True  # short rows have absent blocks, the shortest none at all
        ids = torch.randint(0, VOCABULARY, (1, bucket), generator=torch.Generator().manual_seed(step))
        anchors, keep = blocks.draw_anchors(response, ANCHORS, seed=0, epoch=0, row_ids=[step])
        made = blocks.make_blocks(
            ids, response, anchors, keep, block_size=SIZE, gamma=4.0, mask_token_id=VOCABULARY - 1
        ).to(device)
        form = blocks.block_mask if on_gpu else blocks.visible_dense
        mask = form(made.anchors, made.keep, bucket, SIZE)
        features = torch.randn(1, bucket, 2 * HIDDEN, generator=generator, device=device, dtype=dtype)
        positions = blocks.context_positions(None, bucket, 1, device)
        embeddings = torch.nn.functional.embedding(made.inputs, head.weight)
        hidden = model(features, embeddings, positions, made.positions, mask, layer=lane_layer)
        result = loss.drafter_loss(
            hidden, head, made.labels, made.weights, block_size=SIZE, chunk_blocks=4, chunk=lane_chunk
        )
        result.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((bucket, counters["stats"]["unique_graphs"]))
    return seen


def assert_only_first_steps_compile(steps: int, device: str, backend: str) -> None:
    counters.clear()
    seen = compiles_by_step(steps, device, backend)
    known: set[int] = set()
    before = 0
    for step, (bucket, graphs) in enumerate(seen):
        if bucket in known:
            assert graphs == before, f"step {step} recompiled for bucket {bucket}, which was known"
        known.add(bucket)
        before = graphs
    assert known == set(BUCKETS), "the lengths reach every bucket"
    assert before == len(BUCKETS) + 1, "a layer for each bucket, one loss"


def test_nothing_recompiles_after_a_buckets_first_step() -> None:
    assert_only_first_steps_compile(60, "cpu", "eager")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_nothing_recompiles_in_2000_steps() -> None:
    assert_only_first_steps_compile(2000, "cpu", "eager")


@pytest.mark.gpu
def test_nothing_recompiles_on_a_gpu() -> None:
    assert_only_first_steps_compile(300, "cuda", "inductor")
