"""Rows: conversations rendered with the target's own chat template, as token ids with a response mask.

Nothing is skipped silently: every line of a file becomes a row or is left out with a reason, and what is used but
worth knowing (repeats, overlap with held-out conversations, cut rows) is noted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dflash_lib.chat import Rendered, check_template, supervise, tokenise
from dflash_lib.conversations import Conversation, DataError, LeftOut, read
from dflash_lib.target import Target

_TOKENISE_AT_ONCE = 512


class Row:
    """One token row. Kept as arrays (5 bytes a token), read as lists.

    Attributes:
        id: its number in the dataset, which keys its anchors.
        ids: int32 ``[S]``.
        mask: bool ``[S]``, True where the target itself would have written the token.
        source: ``file:line``.
    """

    __slots__ = ("id", "ids", "mask", "source")

    def __init__(self, id: int, input_ids: Any, response_mask: Any, source: str = "") -> None:
        self.id = id
        self.ids = np.asarray(input_ids, dtype=np.int32)
        self.mask = np.asarray(response_mask, dtype=bool)
        self.source = source

    def __repr__(self) -> str:
        return f"Row({self.id}, {len(self)} tokens, {int(self.mask.sum())} of them answers, {self.source!r})"

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def input_ids(self) -> list[int]:
        ids: list[int] = self.ids.tolist()
        return ids

    @property
    def response_mask(self) -> list[bool]:
        mask: list[bool] = self.mask.tolist()
        return mask

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
        places: ``file:line`` of each distinct text (by its digest), with which overlap is found.
    """

    rows: list[Row]
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lines: int = 0
    places: dict[bytes, str] = field(default_factory=dict, repr=False)

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
    heldout: Dataset | str | Path | Sequence[str | Path] | None = None,
    progress: bool = True,
) -> Dataset:
    """Reads conversations and renders them with the target's own chat template.

    Args:
        paths: JSON lines files, or ``"packaged"``.
        max_length: of a row, in tokens; what lies beyond is cut, and a row left without an answer is left out.
        thinking: the template's ``enable_thinking``, as the target will be served.
        heldout: files (or their loaded dataset) that must not be trained on; what of them is in ``paths`` is noted.

    Raises:
        DataError: a file cannot be read, the template does not mark answers, or no line is left.
    """
    conversations, left_out = read(paths, split)
    tokenizer = target.tokenizer
    check_template(tokenizer, thinking=thinking)
    stop_texts = [text for text in tokenizer.convert_ids_to_tokens(list(target.stop_ids)) if text]
    dataset = Dataset([], left_out, lines=len(conversations) + len(left_out))
    _note_repeats(dataset, conversations, _places(heldout))
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
        raise DataError(
            f"no {split} conversation can be used: {len(left_out)} of {dataset.lines} lines left out{first}"
        )
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
        begin = int(mask.argmax()) + 1
        return f"its answer begins at token {begin}, beyond the length limit of {max_length}; raise max_length"
    return "has no valid anchor (no two answer tokens in a row within the length limit)"


def _digest(conversation: Conversation) -> bytes:
    return hashlib.blake2b(repr(conversation.text).encode(), digest_size=16).digest()


def _places(heldout: Dataset | str | Path | Sequence[str | Path] | None) -> dict[bytes, str]:
    if heldout is None:
        return {}
    if isinstance(heldout, Dataset):
        return heldout.places
    return {_digest(conversation): conversation.place for conversation in read(heldout, "heldout")[0]}


def _note_repeats(dataset: Dataset, conversations: list[Conversation], held: dict[bytes, str]) -> None:
    """Notes texts that stand there twice, or in the held-out files too. Ids are not looked at."""
    repeats: list[str] = []
    overlap: dict[str, list[str]] = {}
    for conversation in conversations:
        digest = _digest(conversation)
        first = dataset.places.setdefault(digest, conversation.place)
        if first != conversation.place:
            repeats.append(f"{conversation.place} repeats {first} exactly (both are used)")
        if digest in held:
            overlap.setdefault(held[digest], []).append(conversation.place)
    trained = [f"held-out {place} is also trained on ({', '.join(where)})" for place, where in overlap.items()]
    dataset.notes += _shortened(repeats, "exact repeats")
    dataset.notes += _shortened(trained, "held-out conversations that are trained on")


def _shortened(notes: list[str], what: str, most: int = 5) -> list[str]:
    return notes[:most] + ([f"{len(notes)} {what} in all"] if len(notes) > most else [])
