"""Bugs the field has already had: each is put back into a copy of the module, and its test must then fail.

Bugs of the target (features one layer off, mask ids, chat templates), of decoding (trimming by mask id), of resuming
and of averaging across threads have their tests beside those modules.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tiny_drafters import Largest, drafter_config
from torch import Tensor

from dflash_lib import blocks, drafter, layer, loss
from dflash_lib.config import ConfigError, RunConfig
from dflash_lib.head import Head

LENGTH, ANCHORS = 64, 5
CONFIG = drafter_config()
SIZE, HIDDEN, VOCABULARY = CONFIG.block_size, CONFIG.hidden_size, CONFIG.vocab_size
RANDOM = torch.Generator().manual_seed(0)
RESPONSE = torch.ones(1, LENGTH, dtype=torch.bool)


@contextmanager
def with_bug(module: types.ModuleType, *edits: tuple[str, str]) -> Iterator[Any]:
    """A copy of the module with each first text (found exactly once) replaced by the second."""
    source = inspect.getsource(module)
    for right, wrong in edits:
        assert source.count(right) == 1, f"{right!r} is there {source.count(right)} times"
        source = source.replace(right, wrong)
    copy = types.ModuleType(f"{module.__name__}_with_bug")
    copy.__file__ = module.__file__
    sys.modules[copy.__name__] = copy
    try:
        exec(compile(source, f"{module.__file__} (with a bug)", "exec"), copy.__dict__)
        yield copy
    finally:
        del sys.modules[copy.__name__]


class Row:
    """One row, its blocks (made by the module given) and a drafter's hidden states as a function of what goes in."""

    def __init__(self, module: Any = blocks, response: Tensor = RESPONSE, count: int = ANCHORS) -> None:
        length = response.shape[1]
        self.ids = torch.arange(length)[None] % (VOCABULARY - 1)
        self.anchors, self.keep = module.draw_anchors(response, count, seed=0, epoch=0, row_ids=[0])
        self.made = module.make_blocks(
            self.ids,
            response,
            self.anchors,
            self.keep,
            block_size=SIZE,
            gamma=4.0,
            mask_token_id=VOCABULARY - 1,
        )
        self.mask = module.visible_dense(self.anchors, self.keep, length, SIZE)
        self.model = drafter.Drafter(CONFIG)
        self.features = torch.randn(1, length, 2 * HIDDEN, generator=RANDOM, dtype=torch.float64).requires_grad_()
        slots = torch.randn(1, count * SIZE, HIDDEN, generator=RANDOM, dtype=torch.float64)
        self.embeddings = slots.requires_grad_()
        positions = module.context_positions(None, length, 1)
        self.hidden = self.model(self.features, self.embeddings, positions, self.made.positions, self.mask)

    def reach(self, block: int, slot: int) -> tuple[set[int], set[int]]:
        """Context places and block slots that a slot's hidden state depends on."""
        out = self.hidden[0, block * SIZE + slot].sum()
        slopes = torch.autograd.grad(out, (self.features, self.embeddings), retain_graph=True)
        context, slots = (set(slope[0].abs().sum(-1).nonzero().flatten().tolist()) for slope in slopes)
        return context, slots


# --- each check is true for what is right and false (or an error) with the bug ---------------------------------------


def sees_all_context_before_its_anchor_and_nothing_else(module: Any) -> bool:
    row = Row(module)
    return all(row.reach(block, 3)[0] == set(range(int(row.anchors[0, block]))) for block in range(ANCHORS))


def the_anchors_own_feature_is_unseen(module: Any) -> bool:
    row = Row(module)
    return all(int(row.anchors[0, block]) not in row.reach(block, 1)[0] for block in range(ANCHORS))


def slots_of_a_block_see_each_other_in_both_directions(module: Any) -> bool:
    row = Row(module)
    return all(row.reach(block, 1)[1] == set(range(block * SIZE, (block + 1) * SIZE)) for block in range(ANCHORS))


def labels_stand_at_the_slots_own_place(module: Any) -> bool:
    row = Row(module)
    places = (row.anchors[:, :, None] + torch.arange(SIZE)).flatten(1)
    inside = places < LENGTH
    return torch.equal(row.made.labels[inside], row.ids[0, places[inside]])


def a_block_learns_only_its_own_document(module: Any) -> bool:
    documents = (torch.arange(LENGTH) // 16)[None]
    anchors, keep = module.draw_anchors(RESPONSE, 40, seed=0, epoch=0, row_ids=[0], document_ids=documents)
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    options = {"block_size": SIZE, "gamma": 4.0, "mask_token_id": 1, "document_ids": documents}
    made = module.make_blocks(ids, RESPONSE, anchors, keep, **options)
    left = 16 - anchors % 16  # tokens of the document from the anchor on
    return torch.equal((made.weights.view(1, 40, SIZE) > 0).sum(-1), (left - 1).clamp(max=SIZE - 1))


def anchors_near_the_end_are_drawn(module: Any) -> bool:
    anchors, keep = module.draw_anchors(RESPONSE, LENGTH, seed=0, epoch=0, row_ids=[0])
    return anchors[keep].tolist() == list(range(LENGTH - 1))


def rows_shorter_than_a_block_are_used(module: Any) -> bool:
    row = Row(module, torch.ones(1, 3, dtype=torch.bool))
    return row.keep.sum() == 2 and (row.made.weights > 0).sum() == 3 and bool(row.hidden.isfinite().all())


def epochs_draw_other_anchors(module: Any) -> bool:
    first, second = (module.draw_anchors(RESPONSE, 5, seed=0, epoch=epoch, row_ids=[0])[0] for epoch in (0, 1))
    return not torch.equal(first, second)


def block_mask_serves_all_heads_and_never_makes_the_grid(module: Any) -> bool:
    response = torch.ones(1, 512, dtype=torch.bool)
    anchors, keep = module.draw_anchors(response, 64, seed=0, epoch=0, row_ids=[0])
    with Largest() as largest:
        mask = module.block_mask(anchors, keep, 512, 16)
    return mask.kv_num_blocks.shape[:2] == (1, 1) and largest.size < 64 * 16 * (512 + 64 * 16) / 64


def a_row_without_anchors_gives_zero(module: Any) -> bool:
    """``module`` is layer: its attention is what makes NaN of a fully masked row."""
    row = Row(response=torch.zeros(1, 12, dtype=torch.bool))
    made, mask = row.made, row.mask
    attention = module.sdpa_attention
    positions = blocks.context_positions(None, 12, 1)
    hidden = row.model(row.features, row.embeddings, positions, made.positions, mask, attention=attention)
    head = Head(torch.randn(VOCABULARY, HIDDEN, generator=RANDOM, dtype=torch.float64))
    result = loss.drafter_loss(hidden, head, made.labels, made.weights, block_size=SIZE)
    value = result.mean()
    value.backward()
    slopes = torch.cat([parameter.grad.flatten() for parameter in row.model.parameters()])
    return not row.keep.any() and float(value.detach()) == 0 and bool((slopes == 0).all())


def logits_of_all_slots_never_exist(module: Any) -> bool:
    hidden = torch.randn(1, 32 * SIZE, HIDDEN, generator=RANDOM).requires_grad_()
    labels = torch.zeros(1, 32 * SIZE, dtype=torch.long)
    head = Head(torch.randn(VOCABULARY * 10, HIDDEN, generator=RANDOM))
    with Largest() as largest:
        module.drafter_loss(hidden, head, labels, torch.ones(labels.shape), block_size=SIZE, chunk_blocks=4)
    return largest.size <= 4 * SIZE * VOCABULARY * 10


def lanes_add_up(module: Any) -> bool:
    """Lanes with 3 and 29 weighted slots, added up and divided once, equal one lane with both."""
    hidden = torch.randn(2, 4 * SIZE, HIDDEN, generator=RANDOM)
    head = Head(torch.randn(VOCABULARY, HIDDEN, generator=RANDOM))
    labels = torch.zeros(2, 4 * SIZE, dtype=torch.long)
    weights = torch.ones(2, 4 * SIZE)
    weights[0, 4:] = 0

    def run(rows: slice) -> Any:
        return module.drafter_loss(hidden[rows], head, labels[rows], weights[rows], block_size=SIZE)

    lanes, whole = [run(slice(0, 1)), run(slice(1, 2))], run(slice(0, 2))
    together = sum(lane.loss_sum for lane in lanes) / sum(lane.weight_sum for lane in lanes)
    return torch.allclose(together, whole.loss_sum / whole.weight_sum)


def slot_zero_is_not_predicted(module: Any) -> bool:
    hidden = torch.randn(1, 4 * SIZE, HIDDEN, generator=RANDOM).requires_grad_()
    head = Head(torch.randn(VOCABULARY, HIDDEN, generator=RANDOM))
    labels = torch.zeros(1, 4 * SIZE, dtype=torch.long)
    module.drafter_loss(hidden, head, labels, torch.ones(labels.shape), block_size=SIZE).loss_sum.backward()
    touched = hidden.grad.view(4, SIZE, HIDDEN).abs().sum((0, 2)) > 0
    return touched.tolist() == [False] + [True] * (SIZE - 1)


def rotary_settings_are_copied(module: Any) -> bool:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 9}
    theirs = transformers.GPTNeoXConfig(**sizes, vocab_size=50, rotary_pct=0.25)
    target = SimpleNamespace(config=theirs, layer_ids=(1,), mask_token_id=49, hidden_size=64, device="cpu")
    model = module.Drafter(module.DrafterConfig.from_target(target, RunConfig(drafter_layers=1)))
    return model.frequencies.shape == (2,)  # a quarter of a head of 16 is rotated: two pairs


def a_mask_id_outside_the_embedding_is_refused(module: Any) -> bool:
    fields = {**vars(CONFIG), "mask_token_id": VOCABULARY}
    try:
        module.DrafterConfig(**fields)
    except ConfigError as error:
        return "outside the embedding" in str(error)
    return False


def the_head_is_the_targets_own(module: Any) -> bool:
    """No embedding and no head among the drafter's parameters: nothing there to be left at random."""
    return not any("embed" in name or "head" in name for name in module.Drafter(CONFIG).state_dict())


BUGS: dict[str, tuple[types.ModuleType, Callable[[Any], bool], list[tuple[str, str]]]] = {
    "visibility by block index": (
        blocks,
        sees_all_context_before_its_anchor_and_nothing_else,
        [("high=torch.where(keep, anchors, 0)", "high=torch.where(keep, own - context_length, 0)")],
    ),
    "<= for <": (
        blocks,
        the_anchors_own_feature_is_unseen,
        [("(key < high[row, block])", "(key <= high[row, block])")],
    ),
    "causal inside the block": (
        blocks,
        slots_of_a_block_see_each_other_in_both_directions,
        [("(key < first + block_size)", "(key <= query + own[row, 0])")],
    ),
    "blocks see each other": (
        blocks,
        slots_of_a_block_see_each_other_in_both_directions,
        [("(key >= first) &", "(key >= own[row, 0]) &")],
    ),
    "left-shifted labels": (
        blocks,
        labels_stand_at_the_slots_own_place,
        [("torch.where(inside, at_places(input_ids), 0)", "torch.where(inside, at_places(input_ids.roll(-1, 1)), 0)")],
    ),
    "the next document's text is learned": (
        blocks,
        a_block_learns_only_its_own_document,
        [("counts = counts & (at_places(document_ids) == document_ids.gather(1, anchors)[:, :, None])", "pass")],
    ),
    "anchors near the end dropped": (
        blocks,
        anchors_near_the_end_are_drawn,
        [("starts[:, :-1] = usable[:, :-1] & usable[:, 1:]", "starts[:, :-16] = usable[:, :-16] & usable[:, 1:-15]")],
    ),
    "rows shorter than a block": (
        blocks,
        rows_shorter_than_a_block_are_used,
        [("flat = places.clamp(max=length - 1).flatten(1)", "flat = places.flatten(1)")],
    ),
    "the same anchors in every epoch": (
        blocks,
        epochs_draw_other_anchors,
        [("None if fixed else epoch, row_id", "None, row_id")],
    ),
    "BlockMask per head": (
        blocks,
        block_mask_serves_all_heads_and_never_makes_the_grid,
        [("every))[:, :, None]", "every))[:, :, None].repeat(1, 1, 32, 1, 1)")],
    ),
    "dense mask by create_block_mask": (
        blocks,
        block_mask_serves_all_heads_and_never_makes_the_grid,
        [
            (
                "    intervals = _intervals(anchors, keep, context_length, block_size, document_ids, window)\n",
                "    from torch.nn.attention.flex_attention import create_block_mask\n"
                "    rule = visible(anchors, keep, context_length, block_size, document_ids, window)\n"
                "    grid = (len(anchors), 1, anchors.shape[1] * block_size)\n"
                "    return create_block_mask(rule, *grid, context_length + grid[2], device=str(anchors.device))\n"
                "    intervals = _intervals(anchors, keep, context_length, block_size, document_ids, window)\n",
            )
        ],
    ),
    "NaN from fully masked rows": (
        layer,
        a_row_without_anchors_gives_zero,
        [
            (
                "out = functional.scaled_dot_product_attention("
                "query, key, value, attn_mask=mask | ~seen, enable_gqa=True)",
                "groups = query.shape[1] // key.shape[1]\n"
                "    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) / query.shape[-1] ** 0.5\n"
                "    shares = scores.masked_fill(~mask, float('-inf')).softmax(-1)\n"
                "    return shares @ value.repeat_interleave(groups, 1)",
            )
        ],
    ),
    "logits of all slots at once": (
        loss,
        logits_of_all_slots_never_exist,
        [("count = -(-blocks // options.chunk_blocks)", "count = 1")],
    ),
    "mean of means across lanes": (
        loss,
        lanes_add_up,
        [("return LossResult(loss_sum, weight_sum,", "return LossResult(loss_sum / weight_sum, weight_sum * 0 + 1,")],
    ),
    "slot 0 predicted": (
        loss,
        slot_zero_is_not_predicted,
        [("*values.shape[2:])[:, 1:]", "*values.shape[2:])")],
    ),
    "rotary settings not copied": (
        drafter,
        rotary_settings_are_copied,
        [("rope=settings_of(model),", 'rope={"rope_theta": 10_000.0},')],
    ),
    "mask id outside the embedding": (
        drafter,
        a_mask_id_outside_the_embedding_is_refused,
        [("if not 0 <= self.mask_token_id < self.vocab_size:", "if False:")],
    ),
    "tied head re-initialised at random": (
        drafter,
        the_head_is_the_targets_own,
        [
            (
                "        self.norm = _Norm(config.hidden_size, **factory)\n",
                "        self.norm = _Norm(config.hidden_size, **factory)\n"
                "        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **factory)\n",
            )
        ],
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_not_there_and_would_be_found(bug: str) -> None:
    module, check, edits = BUGS[bug]
    assert check(module), "the bug is here"
    with with_bug(module, *edits) as broken:
        try:
            found = not check(broken)
        except (RuntimeError, IndexError):
            found = True  # it breaks outright
    assert found, "the check does not see the bug"
