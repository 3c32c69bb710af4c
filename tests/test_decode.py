"""decode.py: greedy output is the target's own, sampled output has its distribution, whatever the drafter says."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from tiny_models import FAMILIES, Oracle, make_drafter, make_target, one_thread, own_greedy, train

from dflash_lib import decode, session
from dflash_lib.slots import Slots, causal_mask
from dflash_lib.steps import DraftStep

PROMPTS = [[3, 4, 5], [7, 8, 9, 10, 11, 12, 13], [20], [5] * 9, [33, 2]]
NEW = 24


@pytest.fixture(scope="module", autouse=True)
def threads():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def llama():
    return make_target("llama")


@pytest.fixture(scope="module")
def reference(llama):
    return [own_greedy(llama, prompt, NEW) for prompt in PROMPTS]


def tokens(decoded):
    return [one.tokens for one in decoded]


# --- greedy --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_greedy_is_the_targets_own_in_every_family(family):
    target = make_target(family)
    drafter = make_drafter(target)
    prompts = PROMPTS[:2]
    own = [own_greedy(target, prompt, 18) for prompt in prompts]
    assert max(len(set(text)) for text in own) > 3, "a constant text would prove nothing"
    assert tokens(decode.plain(target, prompts, max_new_tokens=18, batch_size=2)) == own
    for batch_size, static in ((1, False), (2, True)):
        given = {"max_new_tokens": 18, "batch_size": batch_size, "static": static}
        assert tokens(decode.speculative(target, drafter, prompts, **given)) == own


@pytest.mark.parametrize("right", [99, 2, 0])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_perfect_a_partly_right_and_a_wrong_drafter_give_the_same_text(llama, reference, right, batch_size):
    oracle = Oracle(6, PROMPTS, [own_greedy(llama, prompt, NEW + 8) for prompt in PROMPTS], right)
    found = decode.speculative(llama, oracle, PROMPTS, max_new_tokens=NEW, batch_size=batch_size)
    assert tokens(found) == reference
    for one in found:
        expected = min(right, 5)
        assert one.accepted and all(count == expected for count in one.accepted)
        assert one.tau == expected + 1
        assert one.per_position == [1.0] * expected + [0.0] * (5 - expected)


def test_a_trained_drafter_is_faster_and_as_true(llama):
    prompts = [[a, b, (a * b) % 37] for a in range(2, 8) for b in (3, 11)]
    texts = [[*prompt, *own_greedy(llama, prompt, 40)] for prompt in prompts]
    drafter = make_drafter(llama)
    before = decode.speculative(llama, drafter, prompts[:4], max_new_tokens=40)
    losses = train(llama, drafter, texts, prompt=3, steps=60)
    after = decode.speculative(llama, drafter, prompts[:4], max_new_tokens=40, batch_size=2)
    assert losses[-1] < 0.5 * losses[0]
    assert tokens(before) == tokens(after) == [text[3:] for text in texts[:4]]
    taus = [one.tau for one in after]
    assert sum(taus) / 4 > 1.5 * sum(one.tau for one in before) / 4
    assert all(1 <= tau <= 6 for tau in taus)


def test_batches_do_not_change_a_prompts_cycles(llama):
    drafter = make_drafter(llama, seed=4)
    alone = decode.speculative(llama, drafter, PROMPTS, max_new_tokens=NEW)
    for batch_size in (2, 5):
        together = decode.speculative(llama, drafter, PROMPTS, max_new_tokens=NEW, batch_size=batch_size)
        assert tokens(together) == tokens(alone)
        assert [one.accepted for one in together] == [one.accepted for one in alone]


def test_the_mask_token_is_an_ordinary_token_of_the_output(llama):
    """A target that says the mask id keeps it (trimming by it is a bug the field has had)."""
    prompt = PROMPTS[1]
    said = own_greedy(llama, prompt, NEW)
    drafter = make_drafter(llama, mask_token_id=said[3])
    assert said[3] in decode.speculative(llama, drafter, [prompt], max_new_tokens=NEW)[0].tokens
    assert tokens(decode.speculative(llama, drafter, [prompt], max_new_tokens=NEW)) == [said]


# --- where a text ends ---------------------------------------------------------------------------------------------
def test_a_stop_token_ends_the_text_inside_a_block(llama, reference):
    stop = reference[0][4]
    first = reference[0].index(stop)
    own = [own_greedy(llama, prompt, NEW, [stop]) for prompt in PROMPTS]
    oracle = Oracle(6, PROMPTS, [own_greedy(llama, prompt, NEW + 8) for prompt in PROMPTS])
    for batch_size in (1, 5):
        found = decode.speculative(llama, oracle, PROMPTS, max_new_tokens=NEW, stop_ids=[stop], batch_size=batch_size)
        plain = decode.plain(llama, PROMPTS, max_new_tokens=NEW, stop_ids=[stop], batch_size=batch_size)
        assert tokens(found) == tokens(plain) == own
        assert found[0].finished == "stop" and found[0].tokens[-1] == stop
        assert 1 + sum(count + 1 for count in found[0].accepted) >= first + 1
        assert all(one.finished == ("stop" if stop in one.tokens else "length") for one in found)


def test_drafts_after_a_stop_token_do_not_count(llama, reference):
    oracle = Oracle(6, [PROMPTS[0]], [own_greedy(llama, PROMPTS[0], NEW + 8)])
    fresh = next(i for i, token in enumerate(reference[0]) if i >= 2 and token not in reference[0][:i])
    found = decode.speculative(llama, oracle, [PROMPTS[0]], max_new_tokens=NEW, stop_ids=[reference[0][fresh]])[0]
    assert found.tokens == reference[0][: fresh + 1]
    assert found.accepted[-1] == (fresh - 1) % 6, "only drafts up to the stop token"


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7])
def test_exactly_as_many_tokens_as_asked_for(llama, reference, count):
    drafter = make_drafter(llama)
    for found in (
        decode.speculative(llama, drafter, PROMPTS, max_new_tokens=count, batch_size=2),
        decode.plain(llama, PROMPTS, max_new_tokens=count, batch_size=2),
    ):
        assert tokens(found) == [text[:count] for text in reference]
        assert all(one.finished == "length" for one in found)


def test_the_targets_longest_text_is_a_limit(llama):
    prompt = [1 + i % 30 for i in range(250)]
    found = decode.speculative(llama, make_drafter(llama), [prompt], max_new_tokens=50)[0]
    assert len(found.tokens) == 6 and found.finished == "length"


@pytest.mark.parametrize(
    ("prompts", "changes", "words"),
    [
        ([[1], []], {}, "prompt 1: is empty"),
        ([[1, 40]], {}, "prompt 0: holds a token id outside 0..39"),
        ([[1] * 256], {}, "prompt 0: has 256 tokens"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens: is 0"),
        ([[1]], {"temperature": -1.0}, "temperature: is -1.0"),
        ([[1]], {"batch_size": 0}, "batch_size: is 0"),
        ([[1]], {"graphs": True}, "graphs: CUDA graphs need a CUDA device"),
    ],
)
def test_what_cannot_be_decoded_is_said_in_one_line(llama, prompts, changes, words):
    with pytest.raises(decode.DecodeError, match=words) as caught:
        decode.speculative(llama, make_drafter(llama), prompts, **{"max_new_tokens": 4, **changes})
    assert "\n" not in str(caught.value)


def test_no_prompt_gives_no_result(llama):
    assert decode.speculative(llama, make_drafter(llama), [], max_new_tokens=4) == []


# --- sampling ------------------------------------------------------------------------------------------------------
def test_sampled_text_is_that_of_plain_sampling_with_the_same_seed_in_any_batch(llama):
    drafter = make_drafter(llama)
    given = {"max_new_tokens": NEW, "temperature": 0.9, "seed": 11}
    plain = tokens(decode.plain(llama, PROMPTS, **given))
    for batch_size, static in ((1, False), (3, True)):
        found = decode.speculative(llama, drafter, PROMPTS, batch_size=batch_size, static=static, **given)
        assert tokens(found) == plain
    assert tokens(decode.plain(llama, PROMPTS, **{**given, "seed": 12})) != plain


def test_sampling_leaves_the_process_generator_alone(llama):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    decode.speculative(llama, make_drafter(llama), [[1, 2]], max_new_tokens=6, temperature=1.0)
    assert torch.equal(torch.rand(3), expected)


PAIRS = 8 * 8
SAMPLES = 3000


@pytest.fixture(scope="module")
def small():
    """A target of 8 tokens, a prompt, and the exact distribution of its first three sampled tokens."""
    target = make_target("llama", vocab=8, seed=3)
    prompt, temperature = [1, 2], 2.5
    exact = torch.zeros(8, 8, 8, dtype=torch.float64)

    @torch.no_grad()
    def after(ids):
        logits = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double()
        return torch.softmax(logits / temperature, -1)

    first = after(prompt)
    for a in range(8):
        second = after([*prompt, a])
        for b in range(8):
            exact[a, b] = first[a] * second[b] * after([*prompt, a, b])
    return target, prompt, temperature, exact


def surprise(small, drafts):
    """Chi-square of the third token (drawn after one cycle of draft and verification) and of pairs with the second,
    in standard deviations from its mean; a sound sampler stays below about 4."""
    target, prompt, temperature, exact = small

    class Fixed:
        block_size = 3

        def begin(self, rows, features, positions):
            pass

        def draft(self, anchor, position, window):
            return torch.tensor([drafts]).expand(len(anchor), -1).contiguous()

        def commit(self, features, positions):
            pass

    found = decode.speculative(
        target,
        Fixed(),
        [prompt] * SAMPLES,
        max_new_tokens=3,
        temperature=temperature,
        seed=1,
        batch_size=500,
    )
    counts = Counter((one.tokens[1], one.tokens[2]) for one in found)
    expected = exact.sum(0) * SAMPLES
    chi = sum(
        (counts[a, b] - float(expected[a, b])) ** 2 / float(expected[a, b])
        for a in range(8)
        for b in range(8)
        if expected[a, b] > 1
    )
    cells = int((expected > 1).sum())
    return (chi - cells) / (2 * cells) ** 0.5


def likely(small):
    """Drafts that are often right: the most probable second token, and third token."""
    exact = small[3].sum(0)
    second = int(exact.sum(1).argmax())
    return [second, int(exact[second].argmax())]


def test_sampled_text_has_the_targets_distribution(small):
    assert surprise(small, likely(small)) < 4


def test_the_chi_square_sees_drafts_that_are_not_compared_with_the_sample(small, monkeypatch):
    """Mutation: drafts are accepted when they equal the argmax, as at temperature 0, whatever was sampled."""

    def careless(drafts, choices):
        count = torch.ones(len(drafts), dtype=torch.long)
        choices[:, 0] = drafts[:, 0]
        return count

    monkeypatch.setattr(session, "accepted_count", careless)
    assert surprise(small, likely(small)) > 8


def test_the_chi_square_sees_a_bonus_token_that_is_drawn_again(small, monkeypatch):
    """Mutation: after a rejection the token is drawn anew instead of being the sample that rejected the draft."""
    exact = small[3]
    generator = torch.Generator().manual_seed(9)
    again = torch.stack([exact[a].sum(1) / exact[a].sum() for a in range(8)])
    sound = session.accepted_count

    def redraw(drafts, choices):
        count = sound(drafts, choices)
        fresh = torch.multinomial(again[redraw.anchors], 1, generator=generator).squeeze(1)
        choices[:, 0] = torch.where(count == 0, fresh, choices[:, 0])
        return count

    verify = session.Session._verify

    def remember(self):
        redraw.anchors = self.anchor.clone()
        verify(self)

    monkeypatch.setattr(session, "accepted_count", redraw)
    monkeypatch.setattr(session.Session, "_verify", remember)
    assert surprise(small, likely(small)) > 8


# --- the cache -----------------------------------------------------------------------------------------------------
def test_slots_forget_by_being_written_over():
    """Rows of different lengths; what a rejected block left behind is neither seen nor kept."""
    cache = Slots(2, 8)
    keys = torch.arange(2 * 3, dtype=torch.float64).reshape(2, 1, 3, 1)
    cache.at(torch.tensor([[0, 1, 2], [4, 5, 6]]), window=8)
    seen, _ = cache.update(keys, keys, 0)
    assert seen[:, 0, :, 0].tolist() == [[0, 1, 2, 0, 0, 0, 0, 0], [0, 0, 0, 0, 3, 4, 5, 0]]
    cache.at(torch.tensor([[1, 2], [6, 7]]), window=7)
    seen, _ = cache.update(keys[:, :, :2] + 10, keys[:, :, :2] + 10, 0)
    assert seen[:, 0, :, 0].tolist() == [[0, 10, 11, 0, 0, 0, 0], [0, 0, 0, 0, 3, 4, 13]]


def test_the_mask_shows_slots_up_to_the_position_and_no_further_back_than_the_window():
    mask = causal_mask(torch.tensor([[2, 3], [0, 5]]), 6, torch.float64, sliding=3)
    visible = (mask == 0)[:, 0].int().tolist()
    assert visible == [
        [[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0]],
        [[1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1]],
    ]


class Replayed:
    """A CUDA graph's part in the session, played on a CPU: warm-up runs first, then the function at every replay."""

    def __init__(self, function, reset, pool, stream):
        for _ in range(3):
            reset()
            function()
        self.function = function

    def __call__(self):
        self.function()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_what_warm_up_before_a_capture_leaves_behind_is_never_seen(llama, monkeypatch, temperature):
    monkeypatch.setattr(session, "Captured", Replayed)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    drafter = make_drafter(llama, seed=4)
    options = session.Options(NEW, temperature, frozenset(), 7, 2, True, None, None)
    captured = session.Session(llama, lambda *sizes: DraftStep(llama, drafter, *sizes), 6, 13, options)
    assert captured.static and captured.window == captured.capacity
    found = [one for pair in ([0, 1], [2, 3], [4]) for one in captured.run(pair, PROMPTS)]
    plain = decode.speculative(
        llama, drafter, PROMPTS, max_new_tokens=NEW, temperature=temperature, seed=7, batch_size=2
    )
    assert tokens(found) == tokens(plain)
    assert [one.accepted for one in found] == [one.accepted for one in plain]
    with pytest.raises(decode.DecodeError, match="is no Drafter and cannot be captured"):
        session.Session(llama, lambda *_: Oracle(6, [], []), 6, 13, options)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_cuda_graphs_give_the_text_of_the_cpu(llama, reference, temperature):
    there = llama.to("cuda")
    drafter = make_drafter(llama).to("cuda")
    options = {"max_new_tokens": NEW, "temperature": temperature, "seed": 3}
    expected = reference if temperature == 0 else tokens(decode.plain(llama, PROMPTS, **options))
    for graphs in (False, True):
        for batch_size in (1, 3):
            given = {**options, "graphs": graphs, "batch_size": batch_size}
            assert tokens(decode.plain(there, PROMPTS, **given)) == expected
            assert tokens(decode.speculative(there, drafter, PROMPTS, **given)) == expected


def test_seconds_add_up_to_wall_time_and_plain_has_no_draft(llama):
    started = time.perf_counter()
    found = decode.speculative(llama, make_drafter(llama), PROMPTS, max_new_tokens=NEW, batch_size=2)
    wall = time.perf_counter() - started
    spent = sum(sum(one.seconds.values()) for one in found)
    assert 0.5 * wall < spent <= wall
    assert all(set(one.seconds) == set(decode.PARTS) and min(one.seconds.values()) >= 0 for one in found)
    plain = decode.plain(llama, PROMPTS[:1], max_new_tokens=NEW)[0]
    assert plain.seconds["draft"] == 0 and plain.accepted == [] and plain.tau is None


# --- the comparison ------------------------------------------------------------------------------------------------
def test_lossless_counts_ties_by_the_float64_gap_and_nothing_else():
    target = make_target("llama", dtype=torch.float32)
    prompt = PROMPTS[1]
    own = own_greedy(target, prompt, 6)

    def decoded(ids):
        return [decode.Decoded(list(ids))]

    same = decode.lossless(target, [prompt], decoded(own), decoded(own))
    assert (same.same, same.verdict) == (1, True)
    other = [*own[:3], (own[3] + 1) % 40, *own[4:]]
    wrong = decode.lossless(target, [prompt], decoded(other), decoded(own))
    assert (wrong.wrong, wrong.ties, wrong.verdict) == (1, 0, False)
    tie = decode.lossless(target, [prompt], decoded(other), decoded(own), tie=1e9)
    assert (tie.wrong, tie.ties, tie.verdict) == (0, 1, True) and tie.worst_gap > 0
    short = decode.lossless(target, [prompt], decoded(own[:4]), decoded(own))
    assert short.wrong == 1
    coarse = decode.lossless(make_target("llama", dtype=torch.bfloat16), [prompt], decoded(other), decoded(own))
    assert (coarse.undecided, coarse.verdict) == (1, None)
    exact = decode.lossless(make_target("llama"), [prompt], decoded(other), decoded(own), tie=1e9)
    assert exact.verdict is False, "float64 has no ties"
