"""Batches of every step, in an order that a resumed run meets again whatever its number of threads.

The order of rows is a function of (seed, epoch) and of nothing else: not of threads, batch size or history.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_lib.blocks import context_positions
from dflash_lib.config import BUCKET_MULTIPLE, MAX_BUCKETS
from dflash_lib.conversations import DataError
from dflash_lib.rows import Dataset, Row

_GROUP = 16  # rows of one bucket that stay together in an epoch's order
_WINDOW = 64 * _GROUP


def buckets(lengths: Sequence[int], max_buckets: int = MAX_BUCKETS, multiple: int = BUCKET_MULTIPLE) -> list[int]:
    """At most ``max_buckets`` row lengths, multiples of ``multiple``, that pad ``lengths`` least.

    Every bucket costs a compile in every thread, so one that saves less than 2 % of all tokens is not made.
    """
    counts = Counter(-(-max(1, length) // multiple) * multiple for length in lengths)
    sizes = sorted(counts)
    if not sizes:
        return [multiple]
    # best[k][j]: least padded tokens when sizes[:j] are covered by k buckets, the last of them sizes[j - 1]
    below = np.concatenate([[0], np.cumsum([counts[size] for size in sizes])])
    best = [{0: (0, [])}]  # type: list[dict[int, tuple[int, list[int]]]]
    for _ in range(min(max_buckets, len(sizes))):
        step: dict[int, tuple[int, list[int]]] = {}
        for j in range(1, len(sizes) + 1):
            options = [
                (cost + int(below[j] - below[i]) * sizes[j - 1], [*chosen, sizes[j - 1]])
                for i, (cost, chosen) in best[-1].items()
                if i < j
            ]
            if options:
                step[j] = min(options)
        best.append(step)
    costs = [step[len(sizes)] for step in best[1:] if len(sizes) in step]
    chosen = costs[0]
    for cost in costs[1:]:
        if cost[0] < 0.98 * chosen[0]:
            chosen = cost
    return chosen[1]


def order(rows: Sequence[Any] | int, seed: int, epoch: int, *, bucket_of: Sequence[int] | None = None) -> list[int]:
    """A permutation of row numbers that depends on (seed, epoch) only.

    With ``bucket_of`` (each row's bucket), rows of one bucket stay together in groups of 16 inside windows of 1024,
    so that a batch is padded little and every epoch still mixes all of them.
    """
    count = rows if isinstance(rows, int) else len(rows)
    draw = random.Random(f"dflash order {seed} {epoch}")
    mixed = list(range(count))
    draw.shuffle(mixed)
    if bucket_of is None:
        return mixed
    result: list[int] = []
    for first in range(0, count, _WINDOW):
        window = sorted(mixed[first : first + _WINDOW], key=lambda row: bucket_of[row])  # stable: mixed inside a bucket
        groups = [window[at : at + _GROUP] for at in range(0, len(window), _GROUP)]
        short = groups.pop() if len(groups[-1]) < _GROUP and len(groups) > 1 else []
        draw.shuffle(groups)
        result += [row for group in groups for row in group] + short
    return result


@dataclass(frozen=True, eq=False)
class RowBatch:
    """What one lane trains on in one forward: R rows padded to one length S. CPU tensors.

    Attributes:
        row_ids: id of each row (of the first document, where packed); -1 for an absent row (all padding).
        epoch: with the row id it keys the anchors.
        input_ids: ``[R, S]``. response_mask: bool ``[R, S]``, False on padding.
        document_ids: ``[R, S]``, -1 on padding; None when each row is one conversation.
        bucket: S.
        row_lengths: ``[R]``, tokens before the padding.
        parts: ids of the conversations in each row: one, several where packed, none where the row is absent.
    """

    row_ids: list[int]
    epoch: int
    input_ids: Tensor
    response_mask: Tensor
    document_ids: Tensor | None
    bucket: int
    row_lengths: Tensor
    parts: list[list[int]]

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.row_lengths.sum())

    @property
    def positions(self) -> Tensor:
        """``[R, S]``, counted from 0 in each document."""
        return context_positions(self.document_ids, self.bucket, len(self.row_ids))


class RowStream:
    """The batches of every step of every lane; a function of the step, so threads share one without locks of theirs.

    A step takes the next ``lanes * accumulation * rows_per_lane`` rows of the epoch's order. The last step of an
    epoch may have fewer: its absent rows are all padding, so shapes stay and every row is seen once an epoch.
    """

    def __init__(
        self,
        rows: Dataset | Sequence[Row],
        *,
        lanes: int = 1,
        rows_per_lane: int = 4,
        accumulation: int = 1,
        seed: int = 0,
        bucket_lengths: bool = True,
        lengths: Sequence[int] | None = None,
        packing: bool = False,
        pad_id: int = 0,
        state: dict[str, int] | None = None,
        first_step: int = 0,
    ) -> None:
        """
        Args:
            lanes: drafter threads, over all nodes.
            rows_per_lane: rows of one forward of one lane.
            bucket_lengths: pad to a few lengths; False pads each batch to its longest row (and recompiles).
            lengths: the buckets; None: chosen from the rows.
            packing: several conversations in one row of the largest bucket, invisible to each other.
            state: a :meth:`state` to go on from, whatever the number of lanes was then.
            first_step: number of the step that begins there.

        Raises:
            DataError: no rows, or a row longer than the largest of ``lengths``.
        """
        self.rows = rows.rows if isinstance(rows, Dataset) else list(rows)
        if not self.rows:
            raise DataError("there is no row to train on")
        self.lanes, self.rows_per_lane, self.accumulation, self.seed = lanes, rows_per_lane, accumulation, seed
        self.bucket_lengths, self.packing, self.pad_id = bucket_lengths, packing, pad_id
        self.lengths = sorted(lengths) if lengths else buckets([len(row) for row in self.rows])
        longest = max(map(len, self.rows))
        if longest > self.lengths[-1]:
            raise DataError(
                f"buckets: the longest row has {longest} tokens, the largest bucket {self.lengths[-1]}; "
                "lower max_length, or name a larger bucket"
            )
        self.bucket_of = [next(size for size in self.lengths if size >= len(row)) for row in self.rows]
        self._orders: dict[int, list[list[Row]]] = {}
        self._making = threading.Lock()
        # (first step, epoch, position): where each epoch begins, as far as anybody has asked; grows with the steps.
        begun = state or {}
        self._begins = [(first_step, int(begun.get("epoch", 0)), int(begun.get("position", 0)))]

    @property
    def rows_per_step(self) -> int:
        return self.lanes * self.accumulation * self.rows_per_lane

    def state(self, step: int) -> dict[str, int]:
        """Where ``step`` begins: the epoch, and how many of its rows (or packs) are done."""
        epoch, position = self._place(step)
        return {"epoch": epoch, "position": position}

    def batches(self, step: int, lane: int) -> list[RowBatch]:
        """The ``accumulation`` batches of one lane in one step."""
        epoch, position = self._place(step)
        taken = self._order(epoch)[position : position + self.rows_per_step]
        # Like lengths meet in one forward, and all lanes have like work at the same time.
        taken = sorted(taken, key=lambda entry: -sum(map(len, entry)))
        wide = self.lanes * self.rows_per_lane
        return [
            self._batch(epoch, taken[first : first + wide], lane) for first in range(0, self.accumulation * wide, wide)
        ]

    def step(self, step: int) -> list[list[RowBatch]]:
        """``[lane][accumulation]``: all of a step."""
        return [self.batches(step, lane) for lane in range(self.lanes)]

    def _place(self, step: int) -> tuple[int, int]:
        """(epoch, position) at which a step begins. Steps before ``first_step`` are not this stream's."""
        with self._making:
            while True:
                first, epoch, position = self._begins[-1]
                following = first + -(-(len(self._entries(epoch)) - position) // self.rows_per_step)
                if step < following:
                    break
                self._begins.append((following, epoch + 1, 0))
            first, epoch, position = next(begin for begin in reversed(self._begins) if begin[0] <= step)
        return epoch, position + (step - first) * self.rows_per_step

    def _order(self, epoch: int) -> list[list[Row]]:
        with self._making:
            return self._entries(epoch)

    def _entries(self, epoch: int) -> list[list[Row]]:
        """The epoch's entries: single rows, or packs filled in the order of the rows. Held: two epochs."""
        if epoch not in self._orders:
            grouped = self.bucket_of if self.bucket_lengths and not self.packing and len(self.lengths) > 1 else None
            rows = [self.rows[index] for index in order(len(self.rows), self.seed, epoch, bucket_of=grouped)]
            for old in sorted(self._orders)[:-1]:
                del self._orders[old]
            self._orders[epoch] = _pack(rows, self.lengths[-1]) if self.packing else [[row] for row in rows]
        return self._orders[epoch]

    def _batch(self, epoch: int, share: list[list[Row]], lane: int) -> RowBatch:
        entries, count = share[lane :: self.lanes], self.rows_per_lane
        # One length for all lanes of a forward: they wait for the longest anyway, and compile the same shapes.
        longest = max((sum(map(len, entry)) for entry in share), default=1)
        if self.packing:
            width = self.lengths[-1]
        elif self.bucket_lengths:
            width = next(size for size in self.lengths if size >= longest)
        else:
            width = max((sum(map(len, entry)) for entry in entries), default=1)
        ids = torch.full((count, width), self.pad_id, dtype=torch.long)
        mask = torch.zeros(count, width, dtype=torch.bool)
        documents = torch.full((count, width), -1, dtype=torch.long)
        lengths = torch.zeros(count, dtype=torch.long)
        for number, entry in enumerate(entries):
            begin = 0
            for document, row in enumerate(entry):
                end = begin + len(row)
                ids[number, begin:end] = torch.from_numpy(row.ids)
                mask[number, begin:end] = torch.from_numpy(row.mask)
                documents[number, begin:end] = document
                begin = end
            lengths[number] = begin
        parts = [[row.id for row in entry] for entry in entries] + [[] for _ in range(count - len(entries))]
        names = [part[0] if part else -1 for part in parts]
        return RowBatch(names, epoch, ids, mask, documents if self.packing else None, width, lengths, parts)


def _pack(rows: list[Row], length: int) -> list[list[Row]]:
    """First fit among the packs still open, in the order of the rows; 32 stay open, so it is quick and fills well."""
    packs: list[list[Row]] = []
    open_packs: list[tuple[int, list[Row]]] = []
    for row in rows:
        for number, (left, pack) in enumerate(open_packs):
            if len(row) <= left:
                pack.append(row)
                open_packs[number] = (left - len(row), pack)
                break
        else:
            packs.append([row])
            open_packs.append((length - len(row), packs[-1]))
            if len(open_packs) > 32:
                open_packs.remove(min(open_packs, key=lambda entry: entry[0]))
    return packs
