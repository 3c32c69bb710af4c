"""Anchors, labels, weights and the visibility rule, each against loops written from the rule's own words."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_lib import blocks
from dflash_lib.layer import flex_attention_call, sdpa_attention

MASK = 999


@dataclass
class Case:
    """Random rows and their blocks."""

    ids: Tensor
    response: Tensor
    documents: Tensor | None
    anchors: Tensor
    keep: Tensor
    block_size: int
    window: int | None

    @property
    def rule(self) -> tuple:
        return (self.anchors, self.keep, self.ids.shape[1], self.block_size, self.documents, self.window)


@st.composite
def cases(draw: st.DrawFn, longest: int = 90) -> Case:
    rows = draw(st.integers(1, 2))
    length = draw(st.integers(2, longest))
    count = draw(st.integers(1, 14))
    block_size = draw(st.sampled_from([2, 3, 8, 10, 16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    response = torch.rand(rows, length, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    documents = None
    if draw(st.booleans()):
        cuts = torch.rand(rows, length, generator=generator) < draw(st.sampled_from([0.02, 0.2]))
        documents = cuts.cumsum(1)
        padding = draw(st.integers(0, length // 2))
        if padding:
            documents[:, -padding:] = -1
            response[:, -padding:] = False
    ids = torch.randint(0, MASK, (rows, length), generator=generator)
    anchors, keep = blocks.draw_anchors(
        response, count, seed=draw(st.integers(0, 5)), epoch=0, row_ids=range(rows), document_ids=documents
    )
    return Case(ids, response, documents, anchors, keep, block_size, draw(st.sampled_from([None, None, 1, 7, 40])))


def brute_force(case: Case) -> Tensor:
    """The rule in the words of blocks.py, one query and one key at a time."""
    rows, length = case.ids.shape
    slots = case.anchors.shape[1] * case.block_size
    result = torch.zeros(rows, 1, slots, length + slots, dtype=torch.bool)
    for row in range(rows):
        documents = None if case.documents is None else case.documents[row].tolist()
        for query in range(slots):
            block = query // case.block_size
            if not case.keep[row, block]:
                continue
            anchor = int(case.anchors[row, block])
            for key in range(length):
                result[row, 0, query, key] = (
                    key < anchor
                    and (documents is None or documents[key] == documents[anchor])
                    and (case.window is None or key >= anchor - case.window)
                )
            for key in range(length, length + slots):
                result[row, 0, query, key] = (key - length) // case.block_size == block
    return result


@settings(max_examples=40, deadline=None)
@given(cases(longest=50))
def test_dense_mask_is_the_rule(case: Case) -> None:
    assert torch.equal(blocks.visible_dense(*case.rule), brute_force(case))


def tiles_of(dense: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Which tiles hold anything visible, and which hold nothing else; what is outside the mask is invisible."""
    queries, keys = dense.shape[-2:]
    padded = torch.nn.functional.pad(dense, (0, -keys % tile, 0, -queries % tile))
    grid = padded.unflatten(-1, (-1, tile)).unflatten(-3, (-1, tile))  # [R, 1, query tiles, tile, key tiles, tile]
    return grid.any(-1).any(-2), grid.all(-1).all(-2)


def listed(counts: Tensor, indices: Tensor, width: int) -> Tensor:
    """A BlockMask's lists as a grid of bools; each list is in order and names nothing twice."""
    grid = torch.zeros(*counts.shape, width, dtype=torch.bool)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in counts.shape)):
        where = tuple(place.tolist())
        chosen = indices[where][: int(counts[where])].long()
        assert torch.equal(chosen, chosen.unique())
        grid[where][chosen] = True
    return grid


def assert_tiles_agree(case: Case, tile: int) -> None:
    mask = blocks.block_mask(*case.rule, tile=tile)
    dense = blocks.visible_dense(*case.rule)
    some, every = tiles_of(dense, tile)
    queries, keys = some.shape[-2:]
    assert mask.kv_indices.shape[-1] == keys and mask.q_indices.shape[-1] == queries
    assert torch.equal(listed(mask.full_kv_num_blocks, mask.full_kv_indices, keys), every)
    assert torch.equal(listed(mask.kv_num_blocks, mask.kv_indices, keys), some & ~every)
    assert torch.equal(listed(mask.full_q_num_blocks, mask.full_q_indices, queries).transpose(-1, -2), every)
    assert torch.equal(listed(mask.q_num_blocks, mask.q_indices, queries).transpose(-1, -2), some & ~every)
    assert mask.shape[-2:] == dense.shape[-2:]


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([8, 16, 32]))
def test_full_tiles_are_all_visible_absent_ones_invisible_and_partial_ones_mixed(case: Case, tile: int) -> None:
    assert_tiles_agree(case, tile)


@pytest.mark.parametrize("block_size", [8, 10, 16, 128])
@pytest.mark.parametrize("packed", [False, True])
def test_tiles_at_the_real_tile_size(block_size: int, packed: bool) -> None:
    """B = 10 straddles tiles of 128; packed rows have a partial first tile; 700 is no multiple of a tile."""
    length = 700
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor([30, 300, 70, 300]))[None] if packed else None
    response = torch.ones(1, length, dtype=torch.bool)
    anchors, keep = blocks.draw_anchors(response, 45, seed=0, epoch=0, row_ids=[0], document_ids=documents)
    keep[:, 40:] = False
    anchors[:, 40:] = 0
    case = Case(torch.zeros(1, length, dtype=torch.long), response, documents, anchors, keep, block_size, None)
    assert_tiles_agree(case, blocks.TILE)
    mask = blocks.block_mask(*case.rule)
    assert packed or mask.full_kv_num_blocks.sum() > 0, "long contexts have full tiles"
    assert mask.kv_num_blocks.shape[1] == 1, "one mask for all heads"


@settings(max_examples=8, deadline=None)
@given(cases(longest=40))
def test_flex_attention_equals_dense_attention(case: Case) -> None:
    """The same rule through flex_attention (eager, forward: it has no backward on a CPU) and through SDPA."""
    rows, length = case.ids.shape
    slots = case.anchors.shape[1] * case.block_size
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(rows, 4, slots, 16, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, rows, 2, length + slots, 16, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        flex = flex_attention_call(query, key, value, blocks.block_mask(*case.rule))
    dense = sdpa_attention(query, key, value, blocks.visible_dense(*case.rule))
    assert torch.allclose(flex, dense, atol=1e-12)
    absent = ~case.keep.repeat_interleave(case.block_size, 1)
    assert (flex.transpose(1, 2)[absent] == 0).all() and (dense.transpose(1, 2)[absent] == 0).all()


def test_mask_tensors_have_constant_shapes() -> None:
    """Whatever is drawn: full rows, rows with few anchors, rows with none."""
    shapes = set()
    for share in (1.0, 0.02, 0.0):
        response = torch.zeros(1, 256, dtype=torch.bool)
        response[:, : int(256 * share)] = True
        anchors, keep = blocks.draw_anchors(response, 20, seed=0, epoch=0, row_ids=[0])
        mask = blocks.block_mask(anchors, keep, 256, 10)
        lists = (mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices)
        shapes.add(tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in lists))
    assert len(shapes) == 1


# --- anchors ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(cases(), st.one_of(st.none(), st.integers(1, 3)))
def test_anchors_are_where_a_block_can_start(case: Case, per_document: int | None) -> None:
    rows, length = case.ids.shape
    count = case.anchors.shape[1]
    anchors, keep = blocks.draw_anchors(
        case.response,
        count,
        seed=1,
        epoch=2,
        row_ids=range(rows),
        document_ids=case.documents,
        per_document=per_document,
    )
    documents = torch.zeros_like(case.ids) if case.documents is None else case.documents
    for row in range(rows):
        usable = [
            place
            for place in range(length - 1)
            if case.response[row, place]
            and case.response[row, place + 1]
            and documents[row, place] == documents[row, place + 1]
        ]
        chosen = anchors[row][keep[row]].tolist()
        assert chosen == sorted(set(chosen)) and set(chosen) <= set(usable)
        assert keep[row].tolist() == [True] * len(chosen) + [False] * (count - len(chosen))
        assert (anchors[row][~keep[row]] == 0).all()
        if per_document is None or case.documents is None:
            assert len(chosen) == min(count, len(usable))
        else:
            of_each = [int(documents[row, place]) for place in usable]
            budget = sum(min(per_document, of_each.count(document)) for document in set(of_each))
            assert len(chosen) == min(count, budget)
            taken = [int(documents[row, place]) for place in chosen]
            assert all(taken.count(document) <= per_document for document in taken)


def test_anchors_depend_on_seed_epoch_and_row_only() -> None:
    response = torch.ones(3, 200, dtype=torch.bool)

    def draw(ids: list[int], seed: int = 0, epoch: int = 0, fixed: bool = False) -> Tensor:
        return blocks.draw_anchors(response[: len(ids)], 8, seed=seed, epoch=epoch, row_ids=ids, fixed=fixed)[0]

    together = draw([5, 9, 11])
    torch.manual_seed(7)
    alone = torch.cat([draw([11]), draw([5]), draw([9])])
    assert torch.equal(together[[2, 0, 1]], alone), "not on the batch, its order, or torch's generator"
    assert not torch.equal(draw([5]), draw([5], epoch=1)) and not torch.equal(draw([5]), draw([5], seed=1))
    assert not torch.equal(draw([5]), draw([9]))
    assert torch.equal(draw([5], epoch=0, fixed=True), draw([5], epoch=3, fixed=True))
    before = torch.get_rng_state()
    draw([5])
    assert torch.equal(before, torch.get_rng_state()), "torch's own generator is left alone"


def test_every_place_is_drawn_equally_often() -> None:
    response = torch.zeros(1, 41, dtype=torch.bool)
    response[:, 10:] = True  # 30 places where a block can start
    hits = torch.zeros(41)
    for epoch in range(600):
        hits[blocks.draw_anchors(response, 10, seed=0, epoch=epoch, row_ids=[0])[0][0]] += 1
    assert hits[:10].sum() == 0 and hits[40] == 0
    assert (hits[10:40] - 200).abs().max() < 5 * math.sqrt(600 / 3 * 2 / 3)


# --- what a block is asked -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([None, 3.0, 7.0]), st.booleans())
def test_inputs_labels_positions_and_weights(case: Case, gamma: float | None, shorter: bool) -> None:
    rows, length = case.ids.shape
    row_lengths = torch.tensor([max(1, length - 5 - row) for row in range(rows)]) if shorter else None
    made = blocks.make_blocks(
        case.ids,
        case.response,
        case.anchors,
        case.keep,
        block_size=case.block_size,
        gamma=gamma,
        mask_token_id=MASK,
        document_ids=case.documents,
        row_lengths=row_lengths,
    )
    ends = [length] * rows if row_lengths is None else row_lengths.tolist()
    positions = blocks.context_positions(case.documents, length, rows)
    for row in range(rows):
        for block, anchor in enumerate(case.anchors[row].tolist()):
            for slot in range(case.block_size):
                at = block * case.block_size + slot
                place = anchor + slot
                assert made.inputs[row, at] == (case.ids[row, anchor] if slot == 0 else MASK)
                assert made.positions[row, at] == positions[row, anchor] + slot
                counts = (
                    bool(case.keep[row, block])
                    and slot > 0
                    and place < ends[row]
                    and bool(case.response[row, place])
                    and (case.documents is None or bool(case.documents[row, place] == case.documents[row, anchor]))
                )
                want = (1.0 if gamma is None else math.exp(-(slot - 1) / gamma)) if counts else 0.0
                assert made.weights[row, at].item() == pytest.approx(want)
                if place < ends[row]:
                    assert made.labels[row, at] == case.ids[row, place]


def test_positions_of_packed_rows_start_again_in_each_document() -> None:
    documents = torch.tensor([[4, 4, 4, 7, 7, -1, -1]])
    assert blocks.context_positions(documents, 7, 1).tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert blocks.context_positions(None, 3, 2).tolist() == [[0, 1, 2]] * 2


def test_the_target_predicts_a_slot_from_the_position_before() -> None:
    hidden = torch.arange(12.0).view(1, 12, 1)
    anchors, keep = torch.tensor([[0, 3, 10]]), torch.ones(1, 3, dtype=torch.bool)
    ids = torch.zeros(1, 12, dtype=torch.long)
    made = blocks.make_blocks(ids, ids.bool(), anchors, keep, block_size=4, gamma=7.0, mask_token_id=MASK)
    assert made.predicting(hidden).flatten().tolist() == [0, 0, 1, 2, 2, 3, 4, 5, 9, 10, 11, 11]
