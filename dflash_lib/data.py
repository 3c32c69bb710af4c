"""From conversations to token rows, and from rows to the batches of every step, in an order that can be resumed.

The order of rows is a function of (seed, epoch) and of nothing else: not of threads, batch size or history.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dflash_lib.chat import Rendered, check_template, supervise, tokenise
from dflash_lib.config import BUCKET_MULTIPLE, MAX_BUCKETS
from dflash_lib.conversations import Conversation, DataError, LeftOut, Message, read
from dflash_lib.regenerate import regenerate
from dflash_lib.target import Target, document_positions

__all__ = [
    "Conversation", "DataError", "Dataset", "LeftOut", "Message", "Row", "RowBatch", "RowStream",
    "buckets", "load", "order", "read", "regenerate",
]  # fmt: skip

_TOKENISE_AT_ONCE = 512
_GROUP = 16  # rows of like length that stay together in an epoch's order
_WINDOW = 64 * _GROUP


@dataclass(frozen=True, eq=False)
class Row:
    """One token row.

    Attributes:
        id: its number in the dataset, which keys its anchors.
        ids: int32 ``[S]``.
        mask: bool ``[S]``, True where the target itself would have written the token.
        source: ``file:line``.
    """

    id: int
    ids: np.ndarray
    mask: np.ndarray
    source: str

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def input_ids(self) -> list[int]:
        return [int(token) for token in self.ids]

    @property
    def response_mask(self) -> list[bool]:
        return [bool(value) for value in self.mask]

    @property
    def prompt(self) -> list[int]:
        """The ids before the first answer: what a decoder is given."""
        return self.input_ids[: int(self.mask.argmax())]


@dataclass
class Dataset:
    """Rows, and an account of every line that became none.

    Attributes:
        rows: in the order of files and lines; ``rows[i].id == i``.
        left_out: a reason for each line that is not used.
        notes: what is used and still worth knowing (repeats, overlap with held-out, rows cut at the limit).
        lines: how many lines were read; ``used`` of them have a row.
    """

    rows: list[Row]
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lines: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def used(self) -> int:
        return self.lines - len(self.left_out)

    def report(self, most: int = 20) -> str:
        """A summary, then each line left out with its reason (the first ``most``; all are in ``left_out``)."""
        tokens, learned = sum(map(len, self.rows)), sum(int(row.mask.sum()) for row in self.rows)
        text = [
            f"{self.used} of {self.lines} conversations used: {len(self.rows)} rows, {tokens:,} tokens, "
            f"{learned:,} of them answers; {len(self.left_out)} left out"
        ]
        text += [f"  left out {entry}" for entry in self.left_out[:most]]
        if len(self.left_out) > most:
            text.append(f"  ... and {len(self.left_out) - most} more")
        return "\n".join(text + [f"  note: {note}" for note in self.notes])


def load(
    paths: str | Path | Sequence[str | Path],
    target: Target,
    *,
    split: str = "train",
    max_length: int = 512,
    thinking: bool | None = None,
    heldout: str | Path | Sequence[str | Path] | None = None,
    progress: bool = True,
) -> Dataset:
    """Reads conversations and renders them with the target's own chat template.

    Args:
        paths: JSON lines files, or ``"packaged"``.
        max_length: of a row, in tokens; what lies beyond is cut, and a row left without an answer is left out.
        thinking: the template's ``enable_thinking``, as the target will be served.
        heldout: conversations that must not be trained on; those found in ``paths`` are reported.

    Raises:
        DataError: a file cannot be read, the template does not mark answers, or no line is left.
    """
    conversations, left_out = read(paths, split)
    tokenizer = target.tokenizer
    check_template(tokenizer, thinking=thinking)
    stop_texts = [text for text in tokenizer.convert_ids_to_tokens(list(target.stop_ids)) if text]
    dataset = Dataset([], left_out, _repeats(conversations), len(conversations) + len(left_out))
    if heldout is not None:
        dataset.notes += _overlap(conversations, read(heldout, "heldout")[0])
    texts: list[tuple[Conversation, Rendered]] = []
    for conversation in conversations:
        try:
            rendered = supervise(tokenizer, conversation.messages, stop_texts, thinking=thinking)
        except DataError as error:
            left_out.append(LeftOut(conversation.file, conversation.line, str(error)))
            continue
        texts += [(conversation, entry) for entry in rendered]
    _add_rows(dataset, texts, tokenizer, max_length, progress)
    left_out.sort(key=lambda entry: (entry.file, entry.line))
    if not dataset.rows:
        first = f"; the first: {left_out[0]}" if left_out else ""
        raise DataError(f"no {split} conversation can be used: {len(left_out)} of {dataset.lines} lines left out{first}")
    return dataset


def _add_rows(
    dataset: Dataset, texts: list[tuple[Conversation, Rendered]], tokenizer: Any, max_length: int, progress: bool
) -> None:
    why: dict[str, LeftOut] = {}
    used: set[str] = set()
    cut = 0
    bar = tqdm(total=len(texts), desc="tokenising", unit="row", disable=not progress or len(texts) < 2000)
    for first in range(0, len(texts), _TOKENISE_AT_ONCE):
        part = texts[first : first + _TOKENISE_AT_ONCE]
        for (conversation, _), (ids, mask) in zip(part, tokenise(tokenizer, [entry for _, entry in part]), strict=True):
            kept = mask[:max_length]
            if not (kept[:-1] & kept[1:]).any():
                reason = _no_anchor(mask, max_length)
                why.setdefault(conversation.place, LeftOut(conversation.file, conversation.line, reason))
                continue
            cut += len(ids) > max_length
            used.add(conversation.place)
            dataset.rows.append(Row(len(dataset.rows), ids[:max_length], kept, conversation.place))
        bar.update(len(part))
    bar.close()
    dataset.left_out += [entry for place, entry in why.items() if place not in used]
    if cut:
        dataset.notes.append(f"{cut} rows were cut at the length limit of {max_length} tokens")


def _no_anchor(mask: np.ndarray, max_length: int) -> str:
    """An anchor is a position of an answer whose next position is one too."""
    if not mask.any():
        return "no token of it belongs to an answer; check the chat template"
    if not mask[:max_length].any():
        return f"its answer begins at token {int(mask.argmax()) + 1}, beyond the length limit of {max_length}; raise max_length"
    return "has no valid anchor (no two answer tokens in a row within the length limit)"


def _repeats(conversations: list[Conversation]) -> list[str]:
    first: dict[Any, Conversation] = {}
    notes = []
    for conversation in conversations:
        before = first.setdefault(conversation.text, conversation)
        if before is not conversation:
            notes.append(f"{conversation.place} repeats {before.place} exactly (both are used)")
    return _shortened(notes, "exact repeats")


def _overlap(conversations: list[Conversation], heldout: list[Conversation]) -> list[str]:
    held = {conversation.text: conversation for conversation in heldout}
    found: dict[str, list[str]] = {}
    for conversation in conversations:
        if conversation.text in held:
            found.setdefault(held[conversation.text].place, []).append(conversation.place)
    notes = [f"held-out {place} is also trained on ({', '.join(where)})" for place, where in found.items()]
    return _shortened(notes, "held-out conversations that are trained on")


def _shortened(notes: list[str], what: str, most: int = 5) -> list[str]:
    return notes[:most] + ([f"{len(notes)} {what} in all"] if len(notes) > most else [])


# --- lengths and order --------------------------------------------------------------------------------------------
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
        input_ids: ``[R, S]``; response_mask: bool ``[R, S]``, False on padding.
        document_ids: ``[R, S]``, -1 on padding; None when each row is one conversation.
        row_lengths: ``[R]``, tokens before the padding.
    """

    row_ids: tuple[int, ...]
    epoch: int
    input_ids: Tensor
    response_mask: Tensor
    document_ids: Tensor | None
    row_lengths: Tensor

    @property
    def bucket(self) -> int:
        """S, the padded length."""
        return int(self.input_ids.shape[1])

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.row_lengths.sum())

    @property
    def positions(self) -> Tensor | None:
        """``[R, S]`` counted from 0 in each document; None when each row is one conversation."""
        return None if self.document_ids is None else document_positions(self.document_ids)


class RowStream:
    """Batches for any number of lanes, step after step, for ever; resumable with another number of lanes.

    A step takes the next ``lanes * accumulation * rows`` rows of the epoch's order. The last step of an epoch may
    have fewer: its absent rows are all padding, so shapes stay and every row is seen once an epoch.
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
    ) -> None:
        """
        Args:
            lanes: drafter threads, over all nodes.
            rows_per_lane: rows of one forward of one lane.
            bucket_lengths: pad to a few lengths; False pads each batch to its longest row (and recompiles).
            lengths: the buckets; None: chosen from the rows.
            packing: several conversations in one row of the largest bucket, invisible to each other.

        Raises:
            DataError: no rows, or a row longer than the largest of ``lengths``.
        """
        self.rows = rows.rows if isinstance(rows, Dataset) else list(rows)
        if not self.rows:
            raise DataError("there is no row to train on")
        self.lanes, self.rows_per_lane, self.accumulation, self.seed = lanes, rows_per_lane, accumulation, seed
        self.bucket_lengths, self.packing, self.pad_id = bucket_lengths, packing, pad_id
        longest = max(map(len, self.rows))
        self.lengths = sorted(lengths) if lengths else buckets([len(row) for row in self.rows])
        if longest > self.lengths[-1]:
            raise DataError(f"buckets: the longest row has {longest} tokens, the largest bucket {self.lengths[-1]}; lower max_length")
        self._bucket_of = [next(size for size in self.lengths if size >= len(row)) for row in self.rows]
        self.epoch, self.position = 0, 0
        self._entries = self._order(0)

    @property
    def state(self) -> dict[str, int]:
        """Where the next step begins: the epoch, and how many of its rows (or packs) are done."""
        return {"epoch": self.epoch, "position": self.position}

    def restore(self, state: dict[str, int]) -> None:
        """Goes on from a :attr:`state`, whatever the number of lanes was then."""
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._entries = self._order(self.epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Of the present epoch (with packing, epochs may differ by a step)."""
        return -(-len(self._entries) // (self.lanes * self.accumulation * self.rows_per_lane))

    def next_step(self) -> list[list[RowBatch]]:
        """``[lane][accumulation]``, the batches of the next optimizer step."""
        if self.position >= len(self._entries):
            self.epoch, self.position = self.epoch + 1, 0
            self._entries = self._order(self.epoch)
        size = self.lanes * self.accumulation * self.rows_per_lane
        taken = self._entries[self.position : self.position + size]
        self.position += len(taken)
        # Like lengths meet in one forward, and all lanes have like work at the same time.
        taken = sorted(taken, key=lambda entry: -sum(len(row) for row in entry))
        wide = self.lanes * self.rows_per_lane
        step: list[list[RowBatch]] = [[] for _ in range(self.lanes)]
        for number in range(self.accumulation):
            share = taken[number * wide : (number + 1) * wide]
            for lane in range(self.lanes):
                step[lane].append(self._batch(share[lane :: self.lanes]))
        return step

    def __iter__(self) -> Iterator[list[list[RowBatch]]]:
        while True:
            yield self.next_step()

    def _order(self, epoch: int) -> list[list[Row]]:
        """The epoch's entries: single rows, or packs filled in the order of the rows."""
        grouped = self._bucket_of if self.bucket_lengths and not self.packing and len(self.lengths) > 1 else None
        rows = [self.rows[index] for index in order(len(self.rows), self.seed, epoch, bucket_of=grouped)]
        return _pack(rows, self.lengths[-1]) if self.packing else [[row] for row in rows]

    def _batch(self, entries: list[list[Row]]) -> RowBatch:
        lengths = [sum(len(row) for row in entry) for entry in entries]
        longest = max(lengths, default=1)
        width = next(size for size in self.lengths if size >= longest) if self.bucket_lengths else longest
        if self.packing:
            width = self.lengths[-1]
        count = self.rows_per_lane
        ids = torch.full((count, width), self.pad_id, dtype=torch.long)
        mask = torch.zeros(count, width, dtype=torch.bool)
        documents = torch.full((count, width), -1, dtype=torch.long)
        for number, entry in enumerate(entries):
            begin = 0
            for document, row in enumerate(entry):
                end = begin + len(row)
                ids[number, begin:end] = torch.from_numpy(row.ids.astype(np.int64))
                mask[number, begin:end] = torch.from_numpy(row.mask)
                documents[number, begin:end] = document
                begin = end
        absent = count - len(entries)
        return RowBatch(
            tuple(entry[0].id for entry in entries) + (-1,) * absent,
            self.epoch,
            ids,
            mask,
            documents if self.packing else None,
            torch.tensor(lengths + [0] * absent),
        )


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
