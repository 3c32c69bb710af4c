"""Simulated acceptance: what speculative decoding would accept on texts that are already there, without the target.

One forward of the target over a text gives the features; the drafter then walks the text as decoding would: draft from
an anchor, count the drafts that equal the text, go on at the token after them. On a text that the target wrote greedily
this is what decoding it accepts, cycle by cycle; on other texts the text's next token stands for the target's choice,
so the number is too low by the share of tokens that were not its first choice. Cheap enough to run during training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_lib.drafter import Drafter
from dflash_lib.steps import DraftStep


@dataclass(frozen=True)
class Simulated:
    """Attributes: accepted drafts of every cycle of each row; the block size."""

    accepted: list[list[int]]
    block_size: int

    @property
    def tau_mean(self) -> float:
        """Mean over rows of the row's mean acceptance length."""
        means = [1 + sum(row) / len(row) for row in self.accepted if row]
        return sum(means) / len(means) if means else 1.0

    @property
    def tau_pooled(self) -> float:
        cycles = [count for row in self.accepted for count in row]
        return 1 + sum(cycles) / len(cycles) if cycles else 1.0

    @property
    def per_position(self) -> list[float]:
        cycles = [count for row in self.accepted for count in row]
        return [sum(n >= slot for n in cycles) / max(len(cycles), 1) for slot in range(1, self.block_size)]


@torch.no_grad()
def simulated(
    target: Any,
    drafter: Drafter,
    rows: Sequence[Any],
    *,
    batch_size: int = 8,
    most_cycles: int | None = None,
) -> Simulated:
    """Walks the answers of rows.

    Args:
        target, drafter: on one device.
        rows: objects with ``input_ids`` and ``response_mask`` (``data.Row``), or pairs of the two.
        batch_size: rows walked side by side.
        most_cycles: stop a row's walk after so many cycles; None walks to its end.

    A cycle that reaches the end of an answer counts the drafts up to there, as decoding does at a stop token.
    """
    texts = [
        (list(r.input_ids), list(r.response_mask)) if hasattr(r, "input_ids") else (list(r[0]), list(r[1]))
        for r in rows
    ]
    accepted: list[list[int]] = []
    for start in range(0, len(texts), batch_size):
        accepted += _walk(target, drafter, texts[start : start + batch_size], most_cycles)
    return Simulated(accepted, drafter.config.block_size)


def _walk(
    target: Any, drafter: Drafter, texts: list[tuple[list[int], list[bool]]], most_cycles: int | None
) -> list[list[int]]:
    rows, longest = len(texts), max(len(ids) for ids, _ in texts)
    ids = torch.zeros(rows, longest, dtype=torch.long)
    for row, (text, _) in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    ids = ids.to(target.device)
    step = DraftStep(target, drafter, rows, longest)
    positions = torch.arange(longest, device=target.device).expand(rows, -1)
    step.begin(range(rows), target.features(ids).features, positions)
    ends = [_answer_ends(mask) for _, mask in texts]
    places = [_next_anchor(end, 0) for end in ends]
    accepted: list[list[int]] = [[] for _ in texts]
    while any(place is not None for place in places):
        anchors = torch.tensor([place or 0 for place in places], device=target.device)
        drafts = step.draft(_at(ids, anchors), anchors, longest).tolist()
        for row, place in enumerate(places):
            if place is None:
                continue
            text, end = texts[row][0], ends[row][place]
            following = text[place + 1 : end]
            count = _leading_matches(drafts[row], following)
            # The draft of the answer's last token is a committed token, so no bonus token follows it.
            accepted[row].append(min(count, len(following) - 1))
            done = most_cycles is not None and len(accepted[row]) >= most_cycles
            places[row] = None if done else _next_anchor(ends[row], place + count + 1)
    return accepted


def _answer_ends(mask: Sequence[bool]) -> list[int]:
    """For each position of an answer, where that answer ends (exclusive); 0 elsewhere."""
    ends, end = [0] * len(mask), 0
    for place in range(len(mask) - 1, -1, -1):
        end = 0 if not mask[place] else end or place + 1
        ends[place] = end
    return ends


def _next_anchor(ends: Sequence[int], place: int) -> int | None:
    """The first position from ``place`` on that can be an anchor: it and the next one belong to one answer."""
    return next((at for at in range(place, len(ends)) if ends[at] > at + 1), None)


def _leading_matches(drafts: Sequence[int], text: Sequence[int]) -> int:
    for index, (draft, token) in enumerate(zip(drafts, text, strict=False)):
        if draft != token:
            return index
    return min(len(drafts), len(text))


def _at(ids: Tensor, places: Tensor) -> Tensor:
    return ids.gather(1, places[:, None]).squeeze(1)
