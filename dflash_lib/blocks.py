"""Training blocks: where they start, what they are fed and asked, and THE rule of what each may see.

A block is one anchor token and B-1 masked slots. Symbols of shapes, here and in drafter.py and loss.py:
R rows, S context length, N anchors a row, B slots a block, Q = N * B block slots, H hidden size.

The keys of a row are ``[context 0..S-1 | block 0 | block 1 | ...]``, the queries are the block slots. Block n with
anchor ``a`` sees exactly two intervals of keys: the context ``[low, a)`` of its own document, strictly before the
anchor (its own feature does not exist yet when the drafter is served), and its own block, in both directions.
An absent block sees nothing. Every form of the mask is made from these two intervals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import BoolTensor, FloatTensor, LongTensor, Tensor
from torch.nn.attention.flex_attention import BlockMask

TILE = 128  # queries and keys of one tile of the block-sparse mask
BEYOND = 2**30  # a place no key has: where an absent block's own keys would begin

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a batch of rows; always N a row, so that shapes never change.

    Attributes:
        anchors: ``[R, N]`` positions of the anchors in their rows, ascending; absent ones are 0, at the end.
        keep: ``[R, N]`` False where a block is absent.
        inputs: ``[R, Q]`` token ids fed in: the anchor's token, then the mask token.
        positions: ``[R, Q]`` slot i has its anchor's position within its document, plus i.
        labels: ``[R, Q]`` the token at the slot's own place (no shift); 0 where there is none.
        weights: ``[R, Q]`` float32; 0 for slot 0 and wherever there is nothing to learn.
        block_size: B.
    """

    anchors: LongTensor
    keep: BoolTensor
    inputs: LongTensor
    positions: LongTensor
    labels: LongTensor
    weights: FloatTensor
    block_size: int

    def to(self, device: torch.device | str) -> Blocks:
        """The same blocks on another device (asynchronously where the tensors are pinned)."""
        names = ("anchors", "keep", "inputs", "positions", "labels", "weights")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return Blocks(**moved, block_size=self.block_size)

    def predicting(self, last_hidden: Tensor) -> Tensor:
        """The target's own view of every slot: ``last_hidden [R, S, H]`` -> ``[R, Q, H]``.

        The token of slot i stands at ``a + i``, and the target predicts it from the hidden state one before.
        Places outside the row give its nearest state; the weight of their slots is 0.
        """
        rows, count = self.anchors.shape
        offsets = torch.arange(self.block_size, device=self.anchors.device) - 1
        places = (self.anchors[:, :, None] + offsets).reshape(rows, count * self.block_size)
        places = places.clamp(0, last_hidden.shape[1] - 1)
        return last_hidden.gather(1, places[:, :, None].expand(-1, -1, last_hidden.shape[2]))


def draw_anchors(
    response_mask: Tensor,
    count: int,
    *,
    seed: int,
    epoch: int,
    row_ids: Sequence[int],
    document_ids: Tensor | None = None,
    per_document: int | None = None,
    fixed: bool = False,
) -> tuple[LongTensor, BoolTensor]:
    """Draws up to ``count`` anchors a row, at random among the positions where a block can start.

    A block can start at a response position whose next position is a response position of the same document.
    Each row has a generator of its own, made from (seed, epoch, row id): what is drawn never depends on threads, on
    the batch a row is in, or on torch's own generators (which torch.compile rewinds).

    Args:
        response_mask: ``[R, S]`` bool, on the CPU: tokens to be learned.
        count: N, the blocks a row always has.
        seed, epoch, row_ids: decide the draw; ``row_ids`` has R entries.
        document_ids: ``[R, S]`` for packed rows, -1 where there is padding; None: one document a row.
        per_document: most anchors of one document, so that long documents leave room for short ones.
        fixed: the same draw in every epoch (costs acceptance; for experiments).

    Returns:
        ``anchors [R, N]`` ascending with absent ones 0 at the end, and ``keep [R, N]``.
    """
    usable = response_mask.bool().cpu()
    rows = usable.shape[0]
    if len(row_ids) != rows:
        raise ValueError(f"row_ids: {len(row_ids)} ids for {rows} rows")
    starts = torch.zeros_like(usable)
    starts[:, :-1] = usable[:, :-1] & usable[:, 1:]
    if document_ids is not None:
        documents = document_ids.cpu()
        starts[:, :-1] &= documents[:, :-1] == documents[:, 1:]
    anchors = torch.zeros(rows, count, dtype=torch.long)
    keep = torch.zeros(rows, count, dtype=torch.bool)
    for row, row_id in enumerate(row_ids):
        generator = torch.Generator().manual_seed(_row_seed(seed, None if fixed else epoch, row_id))
        places = starts[row].nonzero().flatten()
        places = places[torch.randperm(len(places), generator=generator)]
        if per_document is not None and document_ids is not None:
            places = _first_of_each(places, documents[row, places], per_document)
        chosen = places[:count].sort().values
        anchors[row, : len(chosen)] = chosen
        keep[row, : len(chosen)] = True
    return anchors, keep  # type: ignore[return-value]


def _row_seed(seed: int, epoch: int | None, row_id: int) -> int:
    text = f"anchors/{seed}/{'fixed' if epoch is None else epoch}/{row_id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _first_of_each(places: Tensor, documents: Tensor, most: int) -> Tensor:
    """The first ``most`` places of each document, in the order given."""
    rank = torch.empty_like(places)
    for document in documents.unique():
        mine = documents == document
        rank[mine] = torch.arange(int(mine.sum()))
    return places[rank < most]


def document_starts(document_ids: Tensor) -> LongTensor:
    """``[R, S]`` ids -> ``[R, S]``: where the document of each position begins. Documents are contiguous."""
    place = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return torch.where(begins, place, 0).cummax(dim=1).values  # type: ignore[return-value]


def context_positions(
    document_ids: Tensor | None, length: int, rows: int, device: torch.device | str | None = None
) -> LongTensor:
    """Positions ``[R, S]`` of the context: 0..S-1, counted from the document's beginning in packed rows."""
    if document_ids is not None:
        device = document_ids.device
    place = torch.arange(length, device=device).expand(rows, length)
    return place if document_ids is None else place - document_starts(document_ids)  # type: ignore[return-value]


def make_blocks(
    input_ids: Tensor,
    response_mask: Tensor,
    anchors: Tensor,
    keep: Tensor,
    *,
    block_size: int,
    gamma: float | None,
    mask_token_id: int,
    document_ids: Tensor | None = None,
    row_lengths: Tensor | None = None,
) -> Blocks:
    """What each block is fed, where it stands, what it is asked and how much each answer counts.

    The weight of slot i of a block with anchor a is ``exp(-(i-1)/gamma)`` if the block is kept, i is at least 1 and
    ``a + i`` is a response position inside the row and inside the anchor's document; otherwise 0. A block may
    hang over the end of its row: it keeps the slots that are inside.

    Args:
        input_ids, response_mask: ``[R, S]``.
        anchors, keep: of :func:`draw_anchors`, on any device.
        block_size: B. gamma: decay in slots; None for none (D-PACE brings its own weights).
        mask_token_id: what masked slots are fed.
        document_ids: ``[R, S]`` for packed rows, -1 where there is padding.
        row_lengths: ``[R]`` tokens before the padding; None: S, or whatever response_mask and document_ids say.
    """
    length = input_ids.shape[1]
    device = input_ids.device
    anchors, keep = anchors.to(device, non_blocking=True), keep.to(device, non_blocking=True)
    slot = torch.arange(block_size, device=device)
    places = anchors[:, :, None] + slot  # [R, N, B]
    inside = places < length
    flat = places.clamp(max=length - 1).flatten(1)

    def at_places(values: Tensor) -> Tensor:
        return values.gather(1, flat).view_as(places)

    if row_lengths is not None:
        inside = inside & (places < row_lengths.to(device)[:, None, None])
    counts = keep[:, :, None] & inside & (slot >= 1) & at_places(response_mask.bool())
    positions = places
    if document_ids is not None:
        counts = counts & (at_places(document_ids) == document_ids.gather(1, anchors)[:, :, None])
        positions = places - document_starts(document_ids).gather(1, anchors)[:, :, None]
    decay = torch.ones(block_size, device=device) if gamma is None else torch.exp(-(slot - 1).float() / gamma)
    inputs = torch.where(slot == 0, at_places(input_ids), mask_token_id)
    return Blocks(
        anchors=anchors,  # type: ignore[arg-type]
        keep=keep,  # type: ignore[arg-type]
        inputs=inputs.flatten(1),  # type: ignore[arg-type]
        positions=positions.flatten(1),  # type: ignore[arg-type]
        labels=torch.where(inside, at_places(input_ids), 0).flatten(1),  # type: ignore[arg-type]
        weights=(counts * decay).flatten(1),  # type: ignore[arg-type]
        block_size=block_size,
    )


class _Intervals(NamedTuple):
    """What each block sees, int32 ``[R, N]``: context keys ``[low, high)`` and block keys ``[own, own + B)``."""

    low: Tensor
    high: Tensor
    own: Tensor


def _intervals(
    anchors: Tensor, keep: Tensor, context_length: int, block_size: int, document_ids: Tensor | None, window: int | None
) -> _Intervals:
    count = anchors.shape[1]
    low = torch.zeros_like(anchors)
    if document_ids is not None:
        low = document_starts(document_ids).gather(1, anchors)
    if window is not None:
        low = torch.maximum(low, anchors - window)
    own = context_length + block_size * torch.arange(count, device=anchors.device)
    return _Intervals(
        low=torch.where(keep, low, 0).int(),
        high=torch.where(keep, anchors, 0).int(),
        own=torch.where(keep, own, BEYOND).int(),
    )


def visible(
    anchors: Tensor,
    keep: Tensor,
    context_length: int,
    block_size: int,
    document_ids: Tensor | None = None,
    window: int | None = None,
) -> MaskMod:
    """THE visibility rule, as flex_attention wants it: ``(row, head, query, key) -> bool``, on index tensors.

    Args:
        anchors, keep: ``[R, N]``. context_length: S. block_size: B.
        document_ids: ``[R, S]`` for packed rows: only the anchor's own document is seen.
        window: a block sees only the last ``window`` context tokens before its anchor; still none at or after it.
    """
    return _rule(_intervals(anchors, keep, context_length, block_size, document_ids, window), block_size)


def _rule(intervals: _Intervals, block_size: int) -> MaskMod:
    low, high, own = intervals

    def rule(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        first = own[row, block]
        in_context = (key >= low[row, block]) & (key < high[row, block])
        in_block = (key >= first) & (key < first + block_size)
        return in_context | in_block

    return rule


def visible_dense(
    anchors: Tensor,
    keep: Tensor,
    context_length: int,
    block_size: int,
    document_ids: Tensor | None = None,
    window: int | None = None,
) -> BoolTensor:
    """The rule as a dense mask ``[R, 1, Q, S + Q]``, True where visible: for scaled_dot_product_attention."""
    rule = visible(anchors, keep, context_length, block_size, document_ids, window)
    rows, count = anchors.shape
    slots = count * block_size
    row = torch.arange(rows, device=anchors.device)[:, None, None]
    query = torch.arange(slots, device=anchors.device)[None, :, None]
    key = torch.arange(context_length + slots, device=anchors.device)[None, None, :]
    return rule(row, torch.zeros_like(row), query, key)[:, None]  # type: ignore[return-value]


def block_mask(
    anchors: Tensor,
    keep: Tensor,
    context_length: int,
    block_size: int,
    document_ids: Tensor | None = None,
    window: int | None = None,
    tile: int = TILE,
) -> BlockMask:
    """The rule as flex_attention's BlockMask, in closed form: never evaluated over the Q x (S + Q) grid.

    A block's two intervals say which key tiles it touches and which it covers. A tile of queries sees a
    tile of keys if any of its blocks touches it, and sees all of it if all of them cover it. Work and memory are
    N x (S + Q) / tile. One mask serves all heads and layers; its tensors have constant shapes.
    """
    intervals = _intervals(anchors, keep, context_length, block_size, document_ids, window)
    low, high, own = (bound[:, :, None] for bound in intervals)
    device = anchors.device
    slots = anchors.shape[1] * block_size
    keys = context_length + slots
    start = tile * torch.arange(-(-keys // tile), device=device)
    end = start + tile
    # [R, N, key tiles]
    touches = ((low < high) & (low < end) & (high > start)) | ((own < end) & (own + block_size > start))
    covers = ((low <= start) & (high >= end)) | ((own <= start) & (own + block_size >= end))
    covers &= end <= keys

    # The blocks with a slot in each tile of queries: [query tiles, most blocks of a tile], the last one repeated.
    first_slot = tile * torch.arange(-(-slots // tile), device=device)
    last_block = (first_slot + tile - 1).clamp(max=slots - 1) // block_size
    most = (tile + block_size - 2) // block_size + 1
    members = (first_slot // block_size)[:, None] + torch.arange(most, device=device)
    members = torch.minimum(members, last_block[:, None])
    some = touches[:, members].any(dim=2)
    every = covers[:, members].all(dim=2) & (first_slot + tile <= slots)[:, None]

    kinds = torch.stack((some & ~every, every))[:, :, None]  # partial tiles and full ones, one mask for all heads
    (kv_num_blocks, full_kv_num_blocks), (kv_indices, full_kv_indices) = _ordered(kinds)
    (q_num_blocks, full_q_num_blocks), (q_indices, full_q_indices) = _ordered(kinds.transpose(-2, -1))
    return BlockMask(
        seq_lengths=(slots, keys),
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num_blocks,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num_blocks,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(tile, tile),
        mask_mod=_rule(intervals, block_size),
    )


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """``[.., rows, columns]`` bool -> how many columns each row has, and their indices in order, then the others."""
    order = torch.argsort(tiles.to(torch.int8), dim=-1, descending=True, stable=True)
    return tiles.sum(dim=-1, dtype=torch.int32), order.to(torch.int32).contiguous()
