"""Speculative decoding with a DFlash drafter, and plain decoding on the same machinery to measure it against.

One cycle: the drafter fills the block ``[anchor, MASK x (B-1)]`` in one pass; the target reads anchor and drafts in one
pass and makes its own choice after each; the longest run of drafts that equal those choices is kept, and the target's
choice after it is the next anchor. So every token is the target's own choice given the tokens before it: greedy output
equals greedy decoding, sampled output has the target's distribution, whatever the drafter says.

Sampling inverts the target's cumulative distribution with one uniform number per prompt and output position, drawn
beforehand from a generator of the call's own. Hence the same seed gives the same tokens in any batch, and
:func:`speculative` and :func:`plain` agree token by token at any temperature, not only in distribution.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash_lib.drafter import Drafter
from dflash_lib.session import PARTS, Decoded, DecodeError, Drafts, Options, Session
from dflash_lib.steps import DraftStep

__all__ = ["PARTS", "DecodeError", "Decoded", "Drafts", "Lossless", "lossless", "plain", "speculative"]


def speculative(
    target: Any,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    stop_ids: Iterable[int] = (),
    seed: int = 0,
    batch_size: int = 1,
    graphs: bool | None = None,
    static: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Decoded]:
    """Decodes each prompt with the drafter's help.

    Args:
        target: a :class:`dflash_lib.target.Target`.
        drafter: a :class:`dflash_lib.drafter.Drafter` on the target's device, or any :class:`Drafts`.
        prompts: token ids; lengths may differ.
        max_new_tokens: most new tokens a prompt.
        temperature: 0 takes the target's argmax; above 0 its distribution is sampled. Drafts are always argmax.
        stop_ids: a prompt ends with the first of these.
        seed: of the sampling; prompt i draws from (seed, i).
        batch_size: prompts decoded together; 1 is what speed-ups are quoted for.
        graphs: replay CUDA graphs instead of launching each kernel; None: on CUDA yes.
        static: attend over the whole cache, as under a CUDA graph, instead of the part in use; None: as ``graphs``.
        progress: called with (prompts done, prompts in all).

    Raises:
        DecodeError: an empty prompt, no new tokens asked for, a token outside the vocabulary, a prompt too long.
    """
    draft = drafter if not isinstance(drafter, Drafter) else None
    if isinstance(drafter, Drafter) and drafter.fc.weight.device != torch.device(target.device):
        raise DecodeError(f"drafter: is on {drafter.fc.weight.device}, the target on {target.device}; move one of them")
    block_size = draft.block_size if draft is not None else drafter.config.block_size

    def build(rows: int, capacity: int) -> Drafts:
        return draft if draft is not None else DraftStep(target, drafter, rows, capacity)

    options = Options(max_new_tokens, temperature, frozenset(stop_ids), seed, batch_size, graphs, static, progress)
    return _decode(target, build, block_size, prompts, options)


def plain(
    target: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    stop_ids: Iterable[int] = (),
    seed: int = 0,
    batch_size: int = 1,
    graphs: bool | None = None,
    static: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Decoded]:
    """One token a target pass on the same cache, graphs and bookkeeping: the baseline. As :func:`speculative`."""
    options = Options(max_new_tokens, temperature, frozenset(stop_ids), seed, batch_size, graphs, static, progress)
    return _decode(target, None, 1, prompts, options)


def _decode(
    target: Any, build: Any, block_size: int, prompts: Sequence[Sequence[int]], options: Options
) -> list[Decoded]:
    _check(target, prompts, options)
    outputs: list[Decoded] = []
    device = torch.device(target.device)
    place = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with torch.no_grad(), place:
        session = Session(target, build, block_size, max(map(len, prompts), default=1), options)
        for start in range(0, len(prompts), options.batch_size):
            indices = range(start, min(start + options.batch_size, len(prompts)))
            outputs += session.run(indices, prompts)
            if options.progress is not None:
                options.progress(len(outputs), len(prompts))
    return outputs


def _check(target: Any, prompts: Sequence[Sequence[int]], options: Options) -> None:
    if options.max_new_tokens < 1:
        raise DecodeError(f"max_new_tokens: is {options.max_new_tokens}; ask for at least 1")
    if options.batch_size < 1:
        raise DecodeError(f"batch_size: is {options.batch_size}; use at least 1")
    if options.temperature < 0:
        raise DecodeError(f"temperature: is {options.temperature}; use 0 for greedy decoding or a positive number")
    if options.graphs and torch.device(target.device).type != "cuda":
        raise DecodeError(f"graphs: CUDA graphs need a CUDA device, the target is on {target.device}")
    longest = int(getattr(target.config, "max_position_embeddings", 0) or 2**31)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise DecodeError(f"prompt {index}: is empty; a prompt needs at least one token")
        if len(prompt) >= longest:
            raise DecodeError(f"prompt {index}: has {len(prompt)} tokens, {target.name} reads at most {longest - 1}")
        if min(prompt) < 0 or max(prompt) >= target.vocab_size:
            raise DecodeError(f"prompt {index}: holds a token id outside 0..{target.vocab_size - 1}")


# --- is it lossless? ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Lossless:
    """Speculative against plain output, prompt by prompt.

    Attributes:
        prompts: how many were compared.
        same: prompts with equal tokens.
        ties: prompts whose first difference lies where the target itself hardly decides (see :func:`lossless`).
        wrong: prompts that differ elsewhere; any is a fault.
        undecided: prompts that differ and where arithmetic is too coarse to tell (bfloat16, float16, sampling).
        worst_gap: the largest float64 gap at a tie; 0 without one.
    """

    prompts: int
    same: int
    ties: int
    wrong: int
    undecided: int
    worst_gap: float

    @property
    def verdict(self) -> bool | None:
        """True: lossless; False: not; None: cannot be told in this precision."""
        return False if self.wrong else None if self.undecided else True


def lossless(
    target: Any,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Decoded],
    reference: Sequence[Decoded],
    *,
    temperature: float = 0.0,
    tie: float = 1e-3,
) -> Lossless:
    """Compares outputs token by token, with the tie rule for float32.

    A float32 forward of a block differs from one of a single token by rounding (6e-5 in SmolLM2's logits), so a first
    difference is allowed where the float64 gap between the target's two best tokens is under ``tie``. In float64 no
    difference is allowed. After a first difference the texts are different texts and are not compared further.
    """
    same = ties = wrong = undecided = 0
    worst, exact_model = 0.0, None
    for prompt, one, two in zip(prompts, ours, reference, strict=True):
        place = first_difference(one.tokens, two.tokens)
        if place is None:
            same += 1
        elif temperature > 0 or target.dtype in (torch.bfloat16, torch.float16):
            undecided += 1
        elif target.dtype == torch.float64:
            wrong += 1
        else:
            exact_model = exact_model if exact_model is not None else copy.deepcopy(target.model).double()
            gap = best_gap(exact_model, [*prompt, *two.tokens[:place]])
            ties, wrong = (ties + 1, wrong) if gap < tie else (ties, wrong + 1)
            worst = max(worst, gap) if gap < tie else worst
    return Lossless(len(prompts), same, ties, wrong, undecided, worst)


def first_difference(one: Sequence[int], two: Sequence[int]) -> int | None:
    """Index of the first token that differs (the shorter one's length if it is a beginning of the other), or None."""
    for index, (left, right) in enumerate(zip(one, two, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(two) else min(len(one), len(two))


@torch.no_grad()
def best_gap(model: Any, ids: Sequence[int]) -> float:
    """Difference of the two largest logits after ``ids``, from one whole forward of ``model``."""
    device = next(model.parameters()).device
    logits = model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False).logits[0, -1]
    best = logits.double().topk(2).values
    return float(best[0] - best[1])
