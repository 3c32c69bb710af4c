"""The drafter's loss against the target's frozen head, without ever holding the logits of all slots.

Because the head is frozen, nothing of a slot's logits is needed once its gradient with respect to the hidden row is
known. So the gradient is formed in the forward pass, chunk by chunk of whole blocks: logits, objective, ``dL/dlogits``
in place of the logits, and one product back to ``[slots, H]``. Nothing is recomputed, one chunk of logits is the
most memory, and sums are left unnormalised: whoever knows the weight over all threads, nodes and accumulation steps
divides (a mean of means is a known bug). Every objective is described in docs/objectives.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dflash_lib.config import ConfigError
from dflash_lib.head import Head

OBJECTIVES: tuple[str, ...] = ("ce", "dpace", "forward_kl", "reverse_kl", "tv")
NEED_TARGET = frozenset({"forward_kl", "reverse_kl", "tv"})
# Most logits of one chunk: 768 MiB in bfloat16 on a GPU. On a CPU 64 MiB in float32, a few times over: small chunks
# stay nearer to its caches, and every lane needs its own.
CHUNK_LOGITS = {"cuda": 3 * 2**27, "cpu": 2**24}


@dataclass(frozen=True, eq=False)
class LossResult:
    """Sums over the predicted slots (1..B-1) of all blocks.

    Attributes:
        loss_sum: sum of weight * loss, a scalar of at least float32; its gradient reaches ``hidden``.
        weight_sum: sum of weights, a scalar; no gradient. Divide the one by the other only after adding both up over
            threads, nodes and accumulation steps.
        correct: ``[B-1]`` slots whose most probable token is the label, among
        counted: ``[B-1]`` slots with a weight above 0.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    correct: Tensor
    counted: Tensor

    def mean(self) -> Tensor:
        """Loss per weight of this result alone; 0 (with gradient 0) where nothing counts."""
        return self.loss_sum / torch.where(self.weight_sum > 0, self.weight_sum, 1.0)

    def accuracy(self) -> Tensor:
        """``[B-1]`` share of correct slots; 0 where none was counted."""
        return self.correct / self.counted.clamp(min=1)


def drafter_loss(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    weights: Tensor,
    *,
    block_size: int,
    objective: str = "ce",
    alpha: float = 0.5,
    target_hidden: Tensor | None = None,
    label_source: Literal["text", "argmax"] = "text",
    chunk_blocks: int | None = None,
    chunk: Callable[..., Any] | None = None,
) -> LossResult:
    """Weighted loss of all block slots; slot 0 (the anchor) is never predicted.

    Args:
        hidden: ``[R, Q, H]`` of the drafter, after its final norm.
        head: the target's frozen head.
        labels, weights: ``[R, Q]`` of ``Blocks``.
        block_size: B, so that chunks hold whole blocks.
        objective: "ce", "dpace", "forward_kl", "reverse_kl" or "tv".
        alpha: of D-PACE.
        target_hidden: ``[R, Q, H]`` of ``Blocks.predicting``: for the last three objectives and for argmax labels.
        label_source: "argmax" replaces the labels by the target's most probable tokens.
        chunk_blocks: blocks of a chunk; None: :func:`chunk_blocks_for`.
        chunk: instead of :func:`loss_chunk`: a lane's own compiled form of it.

    Raises:
        ConfigError: an objective or label source that does not exist, or one that lacks ``target_hidden``.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(f"objective: {objective!r} is not one of {', '.join(OBJECTIVES)}")
    if label_source not in ("text", "argmax"):
        raise ConfigError(f"label_source: {label_source!r} is not 'text' or 'argmax'")
    teacher = target_hidden if needs_target(objective, label_source) else None
    if teacher is None and needs_target(objective, label_source):
        raise ConfigError(f"target_hidden: objective {objective!r} with {label_source!r} labels needs it")
    blocks = hidden.shape[0] * hidden.shape[1] // block_size

    def predicted(values: Tensor) -> Tensor:
        """``[R, Q, ...]`` -> ``[blocks, B-1, ...]`` without slot 0."""
        return values.reshape(blocks, block_size, *values.shape[2:])[:, 1:]

    options = _Options(
        objective,
        alpha,
        label_source,
        chunk_blocks or chunk_blocks_for(head.weight.shape[0], block_size, hidden.device),
        chunk or loss_chunk,
    )
    loss_sum, weight_sum, correct, counted = _HeadLoss.apply(
        predicted(hidden),
        head,
        predicted(labels),
        predicted(weights),
        None if teacher is None else predicted(teacher),
        options,
    )
    return LossResult(loss_sum, weight_sum, correct, counted)


def needs_target(objective: str, label_source: str) -> bool:
    """Whether the target's own logits are part of the loss, so that ``target_hidden`` must be given."""
    return objective in NEED_TARGET or label_source == "argmax"


@dataclass(frozen=True)
class _Options:
    objective: str
    alpha: float
    label_source: str
    chunk_blocks: int
    chunk: Callable[..., Any]


def chunk_blocks_for(vocabulary: int, block_size: int, device: torch.device) -> int:
    """Blocks of a chunk: the largest power of two whose logits fit in ``CHUNK_LOGITS``, so that rows fill tiles."""
    budget = CHUNK_LOGITS.get(device.type, CHUNK_LOGITS["cuda"])
    return 1 << max(0, (budget // (vocabulary * (block_size - 1))).bit_length() - 1)


class _HeadLoss(torch.autograd.Function):
    """Forward computes the sums and, where wanted, the gradient; backward only scales it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, labels: Tensor, weights: Tensor, teacher: Tensor | None, options: _Options
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        blocks, predicted = hidden.shape[:2]
        want_gradient = ctx.needs_input_grad[0]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums = torch.zeros(2, dtype=wide, device=hidden.device)
        correct = torch.zeros(predicted, dtype=torch.long, device=hidden.device)
        counted = torch.zeros_like(correct)
        gradient = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if want_gradient else None
        # Equal chunks, the last one filled up with blocks of weight 0: one shape, one compile.
        count = -(-blocks // options.chunk_blocks)
        size = -(-blocks // count)
        for start in range(0, blocks, size):
            here = slice(start, min(start + size, blocks))
            loss, weight, right, number, slope = options.chunk(
                _filled(hidden[here], size),
                head.weight,
                head.bias,
                _filled(labels[here], size),
                _filled(weights[here], size),
                None if teacher is None else _filled(teacher[here], size),
                head.scale,
                head.softcap,
                options.objective,
                options.alpha,
                options.label_source,
                want_gradient,
            )
            sums += torch.stack((loss, weight))
            correct += right
            counted += number
            if gradient is not None:
                gradient[here] = slope[: here.stop - here.start]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct, counted)
        loss_sum, weight_sum = sums.unbind()
        ctx.mark_non_differentiable(weight_sum)
        return loss_sum, weight_sum, correct, counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * loss_gradient.to(gradient.dtype), None, None, None, None, None


def _filled(values: Tensor, size: int) -> Tensor:
    """Contiguous, with zeros up to ``size`` blocks."""
    if len(values) == size:
        return values.contiguous()
    return torch.cat((values, values.new_zeros(size - len(values), *values.shape[1:])))


def loss_chunk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    teacher: Tensor | None,
    scale: float,
    softcap: float | None,
    objective: str,
    alpha: float,
    label_source: str,
    want_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Sums and gradient of some whole blocks; a pure function, to be compiled on CUDA.

    Args:
        hidden: ``[blocks, B-1, H]``. weight, bias, scale, softcap: the head's.
        labels, weights: ``[blocks, B-1]``. teacher: the target's hidden states there, or None.

    Returns:
        loss sum, weight sum, correct ``[B-1]``, counted ``[B-1]``, gradient ``[blocks, B-1, H]`` or None.
    """
    logits = _logits(hidden, weight, bias, scale, softcap)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    scores = logits.to(wide)
    log_total = scores.logsumexp(-1, keepdim=True)
    reference = None if teacher is None else _logits(teacher, weight, bias, scale, softcap).to(wide)
    if label_source == "argmax":
        assert reference is not None
        labels = reference.argmax(-1)
    log_right = (scores.gather(-1, labels[..., None]) - log_total).squeeze(-1)
    counts = weights > 0
    weights = dpace_weights(log_right.exp(), counts, alpha) if objective == "dpace" else weights.to(wide)

    probabilities = (scores - log_total).exp()
    if objective in ("ce", "dpace"):
        losses = -log_right
        vocabulary = torch.arange(scores.shape[-1], device=scores.device)
        slopes = torch.where(vocabulary == labels[..., None], probabilities - 1.0, probabilities)
    else:
        assert reference is not None
        losses, slopes = _distillation(objective, scores - log_total, probabilities, reference)
    sums = (losses * weights).sum(), weights.sum()
    right = ((scores.argmax(-1) == labels) & counts).sum(0)
    if not want_gradient:
        return *sums, right, counts.sum(0), None
    slopes = slopes * weights[..., None]
    if softcap is not None:
        slopes = slopes * (1.0 - (scores / softcap).square())
    if scale != 1.0:
        slopes = slopes * scale
    return *sums, right, counts.sum(0), slopes.to(hidden.dtype) @ weight.to(hidden.dtype)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """As ``Head.logits``, in the dtype of ``hidden``."""
    dtype = hidden.dtype
    logits = functional.linear(hidden, weight.to(dtype), None if bias is None else bias.to(dtype))
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def dpace_weights(right: Tensor, counts: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): a slot weighs what it can still contribute to the accepted length.

    With q_i the probability of the right token in slot i, ``s_i = (1 - alpha) q_i + alpha`` and
    ``p_i = s_1 ... s_i``, slot j weighs the sum of p_i over i >= j. Slots that do not count are passed over: they
    neither multiply nor add, and weigh 0.

    Args:
        right: ``[blocks, B-1]`` q_i. counts: bool, same shape. alpha: floor of s_i, in [0, 1].
    """
    reach = torch.where(counts, (1.0 - alpha) * right + alpha, 1.0).cumprod(-1) * counts
    return reach.flip(-1).cumsum(-1).flip(-1) * counts


def _distillation(objective: str, log_draft: Tensor, draft: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Loss ``[.., ]`` and its derivative by the drafter's logits ``[.., V]``, against the target's logits."""
    log_target = reference.log_softmax(-1)
    target = log_target.exp()
    if objective == "forward_kl":
        return (target * (log_target - log_draft)).sum(-1), draft - target
    if objective == "reverse_kl":
        difference = log_draft - log_target
        losses = (draft * difference).sum(-1)
        return losses, draft * (difference - losses[..., None])
    sign = torch.sign(draft - target)
    losses = 0.5 * (draft - target).abs().sum(-1)
    return losses, 0.5 * draft * (sign - (draft * sign).sum(-1, keepdim=True))
