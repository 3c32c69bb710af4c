"""Text of the target in batches, the plain way: what drafters are trained on, not how they are measured."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_lib.target import Target


@torch.no_grad()
def generate(
    target: Target, prompts: list[list[int]], draws: Sequence[random.Random], *, max_new_tokens: int, temperature: float
) -> list[tuple[list[int], bool]]:
    """Continues each prompt: (new tokens without the stop token, whether a stop token ended it).

    Batched with a cache, prompts padded on the left; rows that have ended are dropped from the batch once they are
    half of it. Not speculative: this is the text that drafters are trained on.
    """
    from transformers import DynamicCache

    if not prompts:
        return []
    device, width = target.device, max(map(len, prompts))
    stop = torch.tensor(target.stop_ids, device=device)
    ids = torch.full((len(prompts), width), target.stop_ids[0] if target.stop_ids else 0, device=device)
    mask = torch.zeros(len(prompts), width + max_new_tokens, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
        mask[row, width - len(prompt) : width] = 1
    positions = (mask[:, :width].cumsum(-1) - 1).clamp_min(0)
    cache = DynamicCache()
    rows = torch.arange(len(prompts), device=device)  # which prompt each row of the batch is
    alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
    new = torch.full((len(prompts), max_new_tokens), -1, dtype=torch.long, device=device)
    for step in range(max_new_tokens):
        logits = target.model(
            input_ids=ids, attention_mask=mask[:, : width + step], position_ids=positions,
            use_cache=True, logits_to_keep=1, **{target.cache_name: cache},
        ).logits[:, -1]  # fmt: skip
        token = _draw(logits, draws, temperature)
        new[rows, step] = torch.where(alive, token, -1)
        alive &= ~torch.isin(token, stop)
        if step % 8 == 7:  # looking costs a synchronisation with the device
            left = int(alive.sum())
            if left == 0:
                break
            if left <= 0.5 * len(rows):
                keep = alive.nonzero().flatten()
                cache.batch_select_indices(keep)
                rows, alive, token, mask, positions = rows[keep], alive[keep], token[keep], mask[keep], positions[keep]
                draws = [draws[row] for row in keep.tolist()]
        ids, positions = token[:, None], positions[:, -1:] + 1
        mask[:, width + step] = 1
    return [_until_stop(row, set(target.stop_ids)) for row in new.tolist()]


def _draw(logits: Tensor, draws: Sequence[random.Random], temperature: float) -> Tensor:
    """The best token, or one by inverting the distribution at a uniform number of the row's own generator."""
    if temperature <= 0:
        return logits.argmax(-1)
    sums = (logits.float() / temperature).softmax(-1).cumsum(-1)
    uniform = torch.tensor([draw.random() for draw in draws], device=logits.device)[:, None]
    return torch.searchsorted(sums, uniform * sums[:, -1:], right=True).squeeze(-1).clamp_max(logits.shape[-1] - 1)


def _until_stop(tokens: list[int], stop: set[int]) -> tuple[list[int], bool]:
    for position, token in enumerate(tokens):
        if token in stop:
            return tokens[:position], True
        if token < 0:
            return tokens[:position], False
    return tokens, False
