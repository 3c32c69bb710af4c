"""The chunked loss against full logits and autograd in float64, objective by objective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_drafters import Largest
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from dflash_lib import loss
from dflash_lib.config import ConfigError
from dflash_lib.head import Head
from dflash_lib.loss import drafter_loss

ROWS, BLOCKS, SIZE, HIDDEN, VOCABULARY = 2, 5, 6, 12, 37
SLOTS = BLOCKS * SIZE


class Given:
    """Random hidden states, labels and weights; some slots and one whole block weigh nothing."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=dtype)

        self.hidden = random(ROWS, SLOTS, HIDDEN)
        self.teacher = random(ROWS, SLOTS, HIDDEN)
        self.weight = random(VOCABULARY, HIDDEN) * 0.7
        self.bias = random(VOCABULARY) * 0.3
        self.labels = torch.randint(0, VOCABULARY, (ROWS, SLOTS), generator=generator)
        self.weights = torch.rand(ROWS, SLOTS, generator=generator) + 0.1
        self.weights[:, ::SIZE] = 0
        self.weights[torch.rand(ROWS, SLOTS, generator=generator) < 0.25] = 0
        self.weights[1, -SIZE:] = 0

    def heads(self) -> dict[str, Head]:
        return {
            "plain": Head(self.weight),
            "bias": Head(self.weight, self.bias),
            "cap": Head(self.weight, self.bias, softcap=2.0),
            "scale": Head(self.weight, None, softcap=3.0, scale=0.6),
        }


def dpace(right: Tensor, counts: Tensor, alpha: float) -> Tensor:
    """The formula of arXiv 2605.18810, slot by slot: ``right [blocks, B-1]`` probabilities of the right tokens."""
    result = torch.zeros_like(right)
    for block in range(len(right)):
        reach, product = [], 1.0
        for slot in range(right.shape[1]):
            if counts[block, slot]:
                product = product * ((1 - alpha) * float(right[block, slot]) + alpha)
                reach.append((slot, product))
        for slot, _ in reach:
            result[block, slot] = sum(value for later, value in reach if later >= slot)
    return result


def reference(given: Given, head: Head, objective: str, alpha: float, source: str) -> tuple[Tensor, ...]:
    """Loss sum, weight sum, gradient, correct and counted from full logits."""
    hidden = given.hidden.clone().requires_grad_()

    def scores(states: Tensor) -> Tensor:
        values = states @ head.weight.T + (0 if head.bias is None else head.bias)
        values = values * head.scale
        return values if head.softcap is None else head.softcap * (values / head.softcap).tanh()

    logits, theirs = scores(hidden), scores(given.teacher).detach()
    labels = theirs.argmax(-1) if source == "argmax" else given.labels
    weights = given.weights.double().clone()
    entropy = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    draft, target = logits.softmax(-1), theirs.softmax(-1)
    if objective == "dpace":
        right = draft.gather(-1, labels[..., None]).detach().view(-1, SIZE)[:, 1:]
        weights = weights.view(-1, SIZE)
        weights[:, 1:] = dpace(right, weights[:, 1:] > 0, alpha)
        weights = weights.view_as(labels)
    losses = {
        "ce": entropy,
        "dpace": entropy,
        "forward_kl": functional.kl_div(draft.log(), target, reduction="none").sum(-1),
        "reverse_kl": functional.kl_div(target.log(), draft, reduction="none").sum(-1),
        "tv": (draft - target).abs().sum(-1) / 2,
    }[objective]
    total = (losses * weights).sum()
    total.backward()
    counts = given.weights > 0
    correct = ((logits.argmax(-1) == labels) & counts).view(-1, SIZE)[:, 1:].sum(0)
    return total.detach(), weights.sum(), hidden.grad, correct, counts.view(-1, SIZE)[:, 1:].sum(0)


def run(given: Given, head: Head, **options: Any) -> tuple[loss.LossResult, Tensor]:
    hidden = given.hidden.clone().requires_grad_()
    result = drafter_loss(
        hidden, head, given.labels, given.weights, block_size=SIZE, target_hidden=given.teacher, **options
    )
    result.loss_sum.backward()
    return result, hidden.grad


@pytest.mark.parametrize("objective", loss.OBJECTIVES)
@pytest.mark.parametrize("form", ["plain", "bias", "cap", "scale"])
@pytest.mark.parametrize("source", ["text", "argmax"])
def test_value_and_gradient_of_every_objective(objective: str, form: str, source: str) -> None:
    given = Given()
    head = given.heads()[form]
    total, weight, slope, correct, counted = reference(given, head, objective, 0.3, source)
    for chunk_blocks in (1, 4, None):  # 10 blocks: ten chunks, three with a filled last one, one
        result, got = run(given, head, objective=objective, alpha=0.3, label_source=source, chunk_blocks=chunk_blocks)
        assert torch.allclose(result.loss_sum, total, atol=1e-10)
        assert torch.allclose(result.weight_sum, weight, atol=1e-6)
        assert torch.allclose(got, slope, atol=1e-10)
        assert torch.equal(result.correct, correct) and torch.equal(result.counted, counted)
        assert result.loss_sum.dim() == 0 and not result.weight_sum.requires_grad


def test_gradients_pass_gradcheck() -> None:
    """Numerical derivatives of the whole autograd function, scaled by what follows it."""
    given = Given()
    head = given.heads()["cap"]
    for objective in ("ce", "forward_kl", "reverse_kl"):

        def value(hidden: Tensor, objective: str = objective) -> Tensor:
            result = drafter_loss(
                hidden,
                head,
                given.labels[:1, : 2 * SIZE],
                given.weights[:1, : 2 * SIZE],
                block_size=SIZE,
                objective=objective,
                target_hidden=given.teacher[:1, : 2 * SIZE],
                chunk_blocks=1,
            )
            return 3.0 * result.mean()

        assert torch.autograd.gradcheck(value, given.hidden[:1, : 2 * SIZE].clone().requires_grad_())


def test_dpace_weights_are_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    right = torch.rand(20, 15, generator=generator, dtype=torch.float64)
    counts = torch.rand(20, 15, generator=generator) < 0.8
    for alpha in (0.0, 0.5, 1.0):
        assert torch.allclose(loss.dpace_weights(right, counts, alpha), dpace(right, counts, alpha))
    # By hand: q = (1, 0), alpha = 0.5: s = (1, 0.5), p = (1, 0.5), weights (1.5, 0.5).
    hand = loss.dpace_weights(torch.tensor([[1.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool), 0.5)
    assert hand.tolist() == [[1.5, 0.5]]


@pytest.mark.parametrize("objective", loss.OBJECTIVES)
def test_no_weight_gives_zero_and_never_nan(objective: str) -> None:
    given = Given()
    given.weights.zero_()
    result, slope = run(given, Head(given.weight), objective=objective)
    assert result.loss_sum == 0 and result.weight_sum == 0 and (slope == 0).all()
    assert result.mean() == 0 and result.counted.sum() == 0 and (result.accuracy() == 0).all()
    hidden = given.hidden.clone().requires_grad_()
    options: dict[str, Any] = {"block_size": SIZE, "objective": objective, "target_hidden": given.teacher}
    drafter_loss(hidden, Head(given.weight), given.labels, given.weights, **options).mean().backward()
    assert (hidden.grad == 0).all()


def test_sums_of_two_lanes_are_the_sum_of_both() -> None:
    """Unnormalised: adding two lanes' sums and dividing once equals one lane with both rows."""
    given = Given()
    head = Head(given.weight)
    whole, slope = run(given, head)
    parts, slopes = [], []
    for row in range(ROWS):
        hidden = given.hidden[row : row + 1].clone().requires_grad_()
        here = slice(row, row + 1)
        parts.append(drafter_loss(hidden, head, given.labels[here], given.weights[here], block_size=SIZE))
        parts[-1].loss_sum.backward()
        slopes.append(hidden.grad)
    assert torch.allclose(sum(part.loss_sum for part in parts), whole.loss_sum)
    assert torch.allclose(sum(part.weight_sum for part in parts), whole.weight_sum)
    assert torch.allclose(torch.cat(slopes), slope)
    mean_of_means = sum(part.mean() for part in parts) / 2
    assert not torch.allclose(mean_of_means, whole.mean()), "which is another number"


def test_evaluation_forms_no_gradient() -> None:
    given = Given()
    seen = []

    def watched(*arguments: Any) -> Any:
        result = loss.loss_chunk(*arguments)
        seen.append(result[-1])
        return result

    with torch.no_grad():
        result = drafter_loss(
            given.hidden, Head(given.weight), given.labels, given.weights, block_size=SIZE, chunk=watched
        )
    assert seen == [None] and torch.allclose(result.loss_sum, run(given, Head(given.weight))[0].loss_sum)


def test_logits_of_all_slots_never_exist() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 64 * SIZE, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(500, HIDDEN, generator=generator)
    labels = torch.zeros(1, 64 * SIZE, dtype=torch.long)
    with Largest() as largest:
        result = drafter_loss(hidden, Head(weight), labels, torch.ones(1, 64 * SIZE), block_size=SIZE, chunk_blocks=4)
        result.loss_sum.backward()
    assert largest.size == 4 * (SIZE - 1) * 500


def test_chunks_fit_their_budget() -> None:
    gpu = torch.device("cuda")
    assert loss.chunk_blocks_for(151_936, 16, gpu) == 128  # 1,920 rows: a multiple of 128, so no ragged tiles
    for vocabulary in (1000, 49_152, 151_936, 262_144):
        for size in (8, 10, 16):
            for device in (gpu, torch.device("cpu")):
                blocks = loss.chunk_blocks_for(vocabulary, size, device)
                assert blocks == 1 or blocks * (size - 1) * vocabulary <= loss.CHUNK_LOGITS[device.type]


def test_one_compile_serves_all_chunks() -> None:
    """Ten blocks in chunks of four: the last chunk is filled up, and nothing recompiles."""
    given = Given(dtype=torch.float32)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(loss.loss_chunk, backend=counter, dynamic=False, fullgraph=True)
    head = Head(given.weight, given.bias, softcap=2.0)
    result, slope = run(given, head, chunk_blocks=4, chunk=compiled)
    again, same = run(Given(1, torch.float32), head, chunk_blocks=4, chunk=compiled)
    assert counter.frame_count == 1
    want, want_slope = run(given, head)
    assert torch.allclose(result.loss_sum, want.loss_sum) and torch.allclose(slope, want_slope, atol=1e-6)
    assert not torch.allclose(slope, same) and not torch.allclose(again.loss_sum, want.loss_sum)


def test_bfloat16_sums_in_float32() -> None:
    given = Given()
    total, _, slope, _, _ = reference(given, Head(given.weight), "ce", 0.5, "text")
    hidden = given.hidden.bfloat16().requires_grad_()
    result = drafter_loss(hidden, Head(given.weight.bfloat16()), given.labels, given.weights, block_size=SIZE)
    result.loss_sum.backward()
    assert result.loss_sum.dtype == torch.float32 and hidden.grad.dtype == torch.bfloat16
    assert (result.loss_sum - total).abs() < 0.01 * total
    assert (hidden.grad - slope).norm() < 0.03 * slope.norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "mse"}, "objective: 'mse' is not one of ce, dpace, forward_kl, reverse_kl, tv"),
        ({"label_source": "teacher"}, "label_source: 'teacher' is not 'text' or 'argmax'"),
        ({"objective": "tv", "target_hidden": None}, "target_hidden: objective 'tv' with 'text' labels needs it"),
        (
            {"label_source": "argmax", "target_hidden": None},
            "target_hidden: objective 'ce' with 'argmax' labels needs it",
        ),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any], message: str) -> None:
    given = Given()
    everything: dict[str, Any] = {"target_hidden": given.teacher, **options}
    with pytest.raises(ConfigError) as error:
        drafter_loss(given.hidden, Head(given.weight), given.labels, given.weights, block_size=SIZE, **everything)
    assert str(error.value) == message
