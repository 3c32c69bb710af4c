"""A replica's step against plain torch: parameters one by one, the mean over everything, clip_grad_norm_, AdamW."""

import copy
import itertools

import pytest
import torch
from tiny_drafters import drafter_config

from dflash_lib.blocks import context_positions, draw_anchors, make_blocks, visible_dense
from dflash_lib.config import RunConfig
from dflash_lib.drafter import Drafter
from dflash_lib.head import Head
from dflash_lib.loss import drafter_loss
from dflash_lib.replica import Replica, learning_rate

VOCABULARY, HIDDEN, LENGTH, BLOCK = 61, 16, 24, 4


def config(**changes):
    return RunConfig.from_dict({"steps": 8, "anchors": 3, "block_size": BLOCK, "lr": 1e-2, "clip": 0.05, **changes})


def small(dtype):
    return drafter_config(
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_heads=2,
        num_kv_heads=1,
        vocab_size=VOCABULARY,
        target_layer_ids=(1, 2),
        num_target_layers=4,
        block_size=BLOCK,
        dtype=dtype,
    )


class Example:
    """Random rows with everything that a replica is fed."""

    def __init__(self, rows, seed, dtype, anchors=3, response=True):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 60, (rows, LENGTH), generator=generator)
        mask = torch.zeros(rows, LENGTH, dtype=torch.bool)
        mask[:, 5 + seed % 3 :] = response
        chosen, keep = draw_anchors(mask, anchors, seed=seed, epoch=0, row_ids=range(rows))
        self.blocks = make_blocks(ids, mask, chosen, keep, block_size=BLOCK, gamma=4.0, mask_token_id=60)
        self.features = torch.randn(rows, LENGTH, 2 * HIDDEN, generator=generator, dtype=dtype)
        table = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(99), dtype=dtype)
        self.embeddings, self.head = table[self.blocks.inputs], Head(weight=table)
        self.positions = context_positions(None, LENGTH, rows)
        self.mask = visible_dense(chosen, keep, LENGTH, BLOCK)

    def feed(self, replica):
        return replica.accumulate(self.features, self.embeddings, self.positions, self.blocks, self.mask, self.head)

    def loss(self, drafter):
        hidden = drafter(self.features, self.embeddings, self.positions, self.blocks.positions, self.mask)
        return drafter_loss(hidden, self.head, self.blocks.labels, self.blocks.weights, block_size=BLOCK)


def train_plainly(drafter, steps, choices):
    """The reference: one mean over all rows of the step, torch's own clipping, torch's own AdamW."""
    parameters = list(drafter.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": choices.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=choices.lr, betas=tuple(choices.betas))
    losses = []
    for step, examples in enumerate(steps):
        optimizer.zero_grad()
        results = [example.loss(drafter) for example in examples]
        loss = sum(result.loss_sum for result in results) / sum(result.weight_sum for result in results)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, choices.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(choices, step)
        optimizer.step()
        losses.append((loss.item(), norm.item()))
    return losses


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_is_what_plain_torch_does(dtype, tolerance, fused):
    choices = config(weight_decay=0.1, fused_optimizer=fused)
    drafter = Drafter(small(dtype), seed=3)
    plain = copy.deepcopy(drafter)
    replica = Replica(drafter, choices, torch.device("cpu"))
    steps = [[Example(2, 10 * step + part, dtype) for part in range(2)] for step in range(5)]
    measured = []
    for examples in steps:
        for example in examples:
            example.feed(replica)
        figures = replica.update().read()
        measured.append((figures.loss, figures.grad_norm))
        assert figures.loss == pytest.approx(figures.loss_all)
    expected = train_plainly(plain, steps, choices)
    torch.testing.assert_close(torch.tensor(measured), torch.tensor(expected), rtol=tolerance * 10, atol=tolerance)
    for (name, found), wanted in zip(replica.drafter.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance * 100, atol=tolerance * 10, msg=name)


def test_accumulation_equals_one_big_batch():
    """Parts of different weight: a mean of means would differ (2 rows and 1 row, and rows without an answer)."""
    found = []
    for parts in ([[0, 1], [2]], [[0, 1, 2]]):
        replica = Replica(Drafter(small(torch.float64)), config(), torch.device("cpu"))
        rows = [Example(1, seed, torch.float64, anchors=1 + seed) for seed in range(3)]
        for _ in range(3):
            for part in parts:
                for index in part:
                    rows[index].feed(replica)
            figures = replica.update().read()
        found.append((figures.loss_all, replica.masters.clone()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-10, atol=1e-12)


def test_no_weight_at_all_is_loss_zero_and_no_nan():
    replica = Replica(Drafter(small(torch.float32)), config(), torch.device("cpu"))
    before = replica.masters.clone()
    Example(2, 1, torch.float32, response=False).feed(replica)
    figures = replica.update().read()
    assert (figures.loss, figures.loss_all, figures.weight_all, figures.grad_norm) == (0, 0, 0, 0)
    assert torch.equal(replica.masters, before)


def test_accuracy_counts_right_tokens_by_slot():
    replica = Replica(Drafter(small(torch.float32), seed=1), config(), torch.device("cpu"))
    example = Example(3, 2, torch.float32)
    result = example.feed(replica)
    accuracy = replica.update().read().accuracy
    assert accuracy == pytest.approx((result.correct / result.counted.clamp(min=1)).tolist())
    assert len(accuracy) == BLOCK - 1


@pytest.mark.parametrize("fused", [True, False])
def test_state_goes_on_exactly_where_it_was(fused):
    choices, dtype = config(fused_optimizer=fused), torch.float32
    steps = [Example(2, step, dtype) for step in range(6)]

    def train(replica, examples):
        for example in examples:
            example.feed(replica)
            replica.update()
        return replica

    whole = train(Replica(Drafter(small(dtype)), choices, torch.device("cpu")), steps)
    half = train(Replica(Drafter(small(dtype)), choices, torch.device("cpu")), steps[:3])
    resumed = Replica(Drafter(small(dtype), seed=8), choices, torch.device("cpu"))
    resumed.load_state(copy.deepcopy(half.state()))
    assert resumed.step == 3
    train(resumed, steps[3:])
    assert torch.equal(resumed.masters, whole.masters)
    assert resumed.fingerprint() == whole.fingerprint()


def test_state_of_another_drafter_is_refused_by_name():
    replica = Replica(Drafter(small(torch.float32)), config(), torch.device("cpu"))
    state = replica.state()
    state["masters"]["fc.weight"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"fc\.weight.*\(3, 3\)"):
        replica.load_state(state)


def test_a_fingerprint_sees_one_bit_and_two_values_exchanged():
    replica = Replica(Drafter(small(torch.float32)), config(), torch.device("cpu"))
    whole = replica.fingerprint()
    weight = replica.drafter.fc.weight
    with torch.no_grad():
        weight.view(torch.int32)[0, 0] ^= 1
        assert replica.fingerprint() != whole
        weight.view(torch.int32)[0, 0] ^= 1
        assert replica.fingerprint() == whole
        first, second = weight[0, 0].item(), weight[0, 1].item()
        weight[0, 0], weight[0, 1] = second, first
    assert replica.fingerprint() != whole


def test_the_drafters_parameters_are_the_masters():
    """One copy of the weights: what the optimizer changes is what the next forward uses and what a checkpoint saves."""
    replica = Replica(Drafter(small(torch.float32)), config(), torch.device("cpu"))
    begin, end = replica.masters.data_ptr(), replica.masters.data_ptr() + replica.masters.numel() * 4
    for name, parameter in replica.drafter.named_parameters():
        assert begin <= parameter.data_ptr() < end, name
        assert parameter.data_ptr() % 128 == begin % 128, name


def test_learning_rate_warms_up_then_falls_to_zero():
    choices = config(steps=100, warmup=0.1, lr=1.0)
    rates = [learning_rate(choices, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.5, abs=0.02)
    assert rates[-1] < 0.001
    assert {learning_rate(config(schedule="constant", warmup=0.0, lr=0.5), step) for step in range(8)} == {0.5}
