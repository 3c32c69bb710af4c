"""Response masks as answers are served, the order of rows, buckets, packing, the stream of batches, regeneration."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_texts import CHATML, make_model, make_tokenizer

from dflash_lib import data
from dflash_lib.chat import check_template, render, supervise, tokenise, user_header
from dflash_lib.conversations import Message
from dflash_lib.data import DataError, Row, RowStream, buckets, order
from dflash_lib.generation import generate
from dflash_lib.regenerate import sensible
from dflash_lib.target import Target

# Qwen3's way: earlier answers lose their thinking, the last one has a think block, thinking off closes it at once.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% set answer = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}{% if '</think>' in m['content'] %}"
    "{{ m['content'].split('</think>')[0].strip() + '\n</think>\n\n' + answer }}"
    "{% else %}{{ '<think>\n\n</think>\n\n' + answer }}{% endif %}{% else %}{{ answer }}{% endif %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# Llama 2's way: no header before an answer, and roles must alternate.
INST = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + '<|im_end|>' }}{% endif %}{% endfor %}"
)
UNMARKED = "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"


def messages(*texts: str, finished: bool = True) -> list[Message]:
    roles = ("user", "assistant")
    made = [Message(roles[number % 2], text) for number, text in enumerate(texts)]
    return [*made[:-1], Message(made[-1].role, made[-1].content, finished)]


def learned(template: str, conversation: list[Message], thinking: bool | None = None) -> list[tuple[str, list[str]]]:
    """(text, supervised parts) of each row, read back from tokens: token ids alone decide."""
    tokenizer = make_tokenizer(template)
    texts = supervise(tokenizer, conversation, ["<|im_end|>"], thinking=thinking)
    rows = []
    for ids, mask in tokenise(tokenizer, texts):
        runs = itertools.groupby(range(len(ids)), key=lambda place, mask=mask: bool(mask[place]))
        parts = [tokenizer.decode([int(ids[place]) for place in places]) for of_answer, places in runs if of_answer]
        rows.append((tokenizer.decode(ids), parts))
    return rows


# --- the response mask -----------------------------------------------------------------------------------------------
def test_every_answer_is_learned_with_its_stop_token() -> None:
    rows = learned(CHATML, messages("Hello?", "The fox.", "And?", " 12 \n"))
    assert [parts for _, parts in rows] == [["The fox.<|im_end|>", " 12 \n<|im_end|>"]]
    assert rows[0][0].endswith(" 12 \n<|im_end|>"), "what follows the last answer is not the target's"


def test_an_answer_that_was_cut_has_no_stop_token() -> None:
    text, parts = learned(CHATML, messages("Hello?", "The quick brown", finished=False))[0]
    assert parts == ["The quick brown"] and text.endswith("The quick brown")


def test_a_repeated_text_is_found_in_its_own_place() -> None:
    """The answer's words also stand in the question and in an earlier answer."""
    assert [parts for _, parts in learned(CHATML, messages("fox", "fox", "fox fox", "fox"))] == [
        ["fox<|im_end|>", "fox<|im_end|>"]
    ]


def test_without_a_header_the_answer_begins_after_the_question() -> None:
    assert [parts for _, parts in learned(INST, messages("Q?", "The fox.", "And?", "The dog."))] == [
        [" The fox.<|im_end|>", " The dog.<|im_end|>"]
    ]


def test_thinking_off_is_learned_as_it_is_served() -> None:
    """With thinking off the served prompt ends with a closed think block; only the last turn is rendered so in
    history, so the earlier answer gets a row of its own."""
    rows = learned(THINKING, messages("Q?", "The fox.", "And?", "The dog."), thinking=False)
    assert [parts for _, parts in rows] == [["The fox.<|im_end|>"], ["The dog.<|im_end|>"]]
    assert rows[0][0].endswith("assistant\n<think>\n\n</think>\n\nThe fox.<|im_end|>")
    assert "<think>\n\n</think>\n\nThe dog." in rows[1][0]


def test_thinking_on_learns_the_thoughts() -> None:
    rows = learned(THINKING, messages("Q?", "<think>\nThe path.\n</think>\n\nThe fox."), thinking=True)
    assert [parts for _, parts in rows] == [["<think>\nThe path.\n</think>\n\nThe fox.<|im_end|>"]]


@pytest.mark.parametrize("template", [CHATML, INST, THINKING])
def test_the_prompt_of_a_row_is_what_is_served(template: str) -> None:
    tokenizer = make_tokenizer(template)
    ids, mask = tokenise(tokenizer, supervise(tokenizer, messages("Q?", "The fox."), ["<|im_end|>"], thinking=False))[0]
    served = render(tokenizer, [{"role": "user", "content": "Q?"}], thinking=False, answer=True)
    assert ids[: int(mask.argmax())].tolist() == tokenizer(served, add_special_tokens=False)["input_ids"]
    assert Row(0, ids, mask).prompt == ids[: int(mask.argmax())].tolist()


def test_a_template_without_assistant_markers_is_refused() -> None:
    with pytest.raises(DataError, match="template without assistant markers"):
        check_template(make_tokenizer(UNMARKED))
    with pytest.raises(DataError, match="has no chat template; use an instruction-tuned target"):
        check_template(make_tokenizer(None))
    for template in (CHATML, INST, THINKING):
        check_template(make_tokenizer(template))


def test_what_a_template_refuses_is_left_out_in_its_words(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(INST)
    target = Target(make_model(len(tokenizer)), tokenizer, target_layers=[0])
    lines = [[("user", "Q?"), ("user", "More?"), ("assistant", "A.")], [("user", "Q?"), ("assistant", "A.")]]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"messages": [{"role": r, "content": c} for r, c in line]}) for line in lines))
    found = data.load(path, target, progress=False)
    assert len(found) == 1 and "roles must alternate" in found.left_out[0].reason


# --- lengths and order -----------------------------------------------------------------------------------------------
@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 1500), min_size=1, max_size=40), st.integers(1, 4))
def test_buckets_pad_least(lengths: list[int], most: int) -> None:
    """Against every choice of that many buckets; a bucket that saves under 2 % may be missing."""
    found = buckets(lengths, most)
    assert found == sorted(set(found)) and len(found) <= most and all(size % 128 == 0 for size in found)

    def padded(sizes: tuple[int, ...]) -> int:
        return sum(min(size for size in sizes if size >= length) for length in lengths)

    sizes = sorted({-(-length // 128) * 128 for length in lengths})
    choices = [
        (*chosen, sizes[-1]) for n in range(min(most, len(sizes))) for chosen in itertools.combinations(sizes[:-1], n)
    ]
    assert padded(tuple(found)) <= min(map(padded, choices)) / 0.98**most
    assert found[-1] == sizes[-1]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 300), st.integers(0, 5), st.integers(0, 3))
def test_order_is_a_permutation_that_seed_and_epoch_decide(count: int, seed: int, epoch: int) -> None:
    bucket_of = [random.Random(index).choice([128, 256, 384]) for index in range(count)]
    random.seed(epoch)  # a rewound or reseeded global generator changes nothing
    found = order(count, seed, epoch, bucket_of=bucket_of)
    random.seed(99)
    assert sorted(found) == list(range(count))
    assert found == order(count, seed, epoch, bucket_of=bucket_of)
    if count > 20:
        assert found != order(count, seed, epoch + 1, bucket_of=bucket_of)
        assert found != order(count, seed + 1, epoch, bucket_of=bucket_of)


def test_rows_of_one_bucket_stay_together_in_groups() -> None:
    bucket_of = [128 if index % 3 else 256 for index in range(960)]
    found = order(960, 0, 0, bucket_of=bucket_of)
    mixed = sum(len({bucket_of[row] for row in found[at : at + 16]}) > 1 for at in range(0, 960, 16))
    assert mixed <= 2
    assert len({bucket_of[found[at]] for at in range(0, 320, 16)}) == 2, "the epoch begins with one bucket only"


# --- batches ---------------------------------------------------------------------------------------------------------
def some_rows(count: int = 37, seed: int = 0) -> list[Row]:
    draw = random.Random(seed)
    made = []
    for index in range(count):
        length = draw.randint(4, 300)
        made.append(
            Row(
                index, [1 + (index * 7 + place) % 90 for place in range(length)], [place > 1 for place in range(length)]
            )
        )
    return made


def seen(stream: RowStream, steps: range) -> list[list[int]]:
    return [
        sorted(row for lane in stream.step(step) for batch in lane for row in batch.row_ids if row >= 0)
        for step in steps
    ]


def test_batches_hold_their_rows_and_nothing_else() -> None:
    rows = some_rows()
    stream = RowStream(rows, lanes=2, rows_per_lane=3, accumulation=2, pad_id=99)
    for lane in stream.step(0):
        assert len(lane) == 2
        for batch in lane:
            assert batch.input_ids.shape == batch.response_mask.shape == (3, batch.bucket)
            assert batch.bucket in stream.lengths and batch.document_ids is None
            for place, name in enumerate(batch.row_ids):
                length = int(batch.row_lengths[place])
                assert batch.input_ids[place, :length].tolist() == rows[name].input_ids
                assert batch.response_mask[place, :length].tolist() == rows[name].response_mask
                assert (batch.input_ids[place, length:] == 99).all() and not batch.response_mask[place, length:].any()
            assert batch.tokens == sum(len(rows[name]) for name in batch.row_ids)


@pytest.mark.parametrize("packing", [False, True])
def test_every_row_is_seen_once_an_epoch(packing: bool) -> None:
    rows = some_rows()
    stream = RowStream(rows, lanes=2, rows_per_lane=4, packing=packing)
    per_epoch: dict[int, Counter[tuple[int, ...]]] = {}
    for step in range(14):
        for batch in itertools.chain(*stream.step(step)):
            texts = per_epoch.setdefault(batch.epoch, Counter())
            for place in range(len(batch.row_ids)):
                inside = (torch.arange(batch.bucket) < batch.row_lengths[place]).long()
                documents = batch.document_ids[place] if packing else inside - 1
                for document in range(int(documents.max()) + 1):
                    texts[tuple(batch.input_ids[place][documents == document].tolist())] += 1
    expected = Counter(tuple(row.input_ids) for row in rows)
    assert per_epoch[0] == expected and per_epoch[1] == expected


def test_lanes_share_out_what_one_lane_would_take() -> None:
    """N lanes of B rows take the rows of one lane of N*B, at any accumulation: the optimizer step is the same."""
    rows = some_rows()
    one = seen(RowStream(rows, lanes=1, rows_per_lane=12, seed=5), range(9))
    for lanes, per_lane, parts in [(3, 4, 1), (2, 3, 2), (1, 3, 4), (4, 1, 3)]:
        assert seen(RowStream(rows, lanes=lanes, rows_per_lane=per_lane, accumulation=parts, seed=5), range(9)) == one
    assert [len(step) for step in one[:4]] == [12, 12, 12, 1], "the last step of an epoch has what is left"


def test_a_run_goes_on_with_another_number_of_lanes() -> None:
    rows = some_rows()
    first = RowStream(rows, lanes=2, rows_per_lane=4, seed=1)
    before = seen(first, range(6))
    state = json.loads(json.dumps(first.state(6)))
    after = RowStream(rows, lanes=3, rows_per_lane=1, seed=1, state=state, first_step=6)
    assert after.state(6) == state
    epoch_one = [row for step in before[5:] + seen(after, range(6, 16)) for row in step]
    assert state == {"epoch": 1, "position": 8}
    assert sorted(epoch_one[: len(rows)]) == list(range(len(rows))), "a row came twice, or not at all"
    again = RowStream(rows, lanes=2, rows_per_lane=4, seed=1, state=state, first_step=6)
    assert seen(again, range(6, 12)) == seen(first, range(6, 12))


def test_a_stream_gives_any_step_in_any_order_to_any_thread() -> None:
    rows = some_rows()
    forward = RowStream(rows, lanes=2, rows_per_lane=4)
    backward = RowStream(rows, lanes=2, rows_per_lane=4)
    wanted = {step: seen(forward, range(step, step + 1)) for step in range(20)}
    assert {step: seen(backward, range(step, step + 1)) for step in reversed(range(20))} == wanted


def test_an_absent_row_weighs_nothing_and_keeps_the_shape() -> None:
    stream = RowStream(some_rows(5), lanes=2, rows_per_lane=2)
    last = [lane[0] for lane in stream.step(1)]
    assert [batch.row_ids for batch in last] == [[last[0].row_ids[0], -1], [-1, -1]]
    for batch in last:
        assert batch.input_ids.shape == (2, batch.bucket)
        assert not batch.response_mask[torch.tensor(batch.row_ids) < 0].any()


def test_packed_documents_keep_their_positions() -> None:
    rows = some_rows()
    stream = RowStream(rows, rows_per_lane=2, packing=True)
    batch = stream.step(0)[0][0]
    assert batch.bucket == stream.lengths[-1]
    for place in range(2):
        begin = 0
        documents = batch.document_ids[place]
        for document in range(int(documents.max()) + 1):
            length = int((documents == document).sum())
            assert batch.positions[place, begin : begin + length].tolist() == list(range(length))
            begin += length
        assert begin == batch.row_lengths[place] and (documents[begin:] == -1).all()
    full = sum(int(b.row_lengths.sum()) for step in range(4) for b in stream.step(step)[0] if min(b.row_ids) >= 0)
    room = sum(b.input_ids.numel() for step in range(4) for b in stream.step(step)[0] if min(b.row_ids) >= 0)
    assert full > 0.8 * room


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="the largest bucket 128; lower max_length"):
        RowStream(some_rows(), lengths=[128])
    with pytest.raises(DataError, match="no row to train on"):
        RowStream([])
    exact = RowStream(some_rows(), rows_per_lane=2, bucket_lengths=False)
    assert len({exact.step(step)[0][0].bucket for step in range(8)}) > 4


# --- regeneration ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def writer() -> Target:
    tokenizer = make_tokenizer(CHATML)
    model = make_model(len(tokenizer))
    with torch.no_grad():  # louder than a trained model: greedy text that is not constant, stop tokens that come
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() == 2 else 1)
    target = Target(model, tokenizer, name="tiny", target_layers=[0])
    target.stop_ids = (2, *range(40, 70))  # a random model ends a text by chance
    return target


def test_batched_text_equals_text_made_alone(writer: Target) -> None:
    """Left padding, rows that end early and leave the batch, draws of their own: none changes a row's text."""
    prompts = [[5, 6, 7], [8] * 9, [9, 10], [4, 200, 17, 30], [120, 121], [33] * 6]
    for temperature in (0.0, 1.0):
        together = generate(writer, prompts, draws(6), max_new_tokens=40, temperature=temperature)
        alone = [
            generate(writer, [prompt], [draw], max_new_tokens=40, temperature=temperature)[0]
            for prompt, draw in zip(prompts, draws(6), strict=True)
        ]
        assert together == alone
    assert len({len(tokens) for tokens, _ in together}) > 1, "no row ended early"
    slow = list(prompts[0])
    greedy = generate(writer, prompts[:1], draws(1), max_new_tokens=12, temperature=0.0)[0][0]
    while len(slow) < 3 + len(greedy):
        with torch.no_grad():
            slow.append(int(writer.model(input_ids=torch.tensor([slow])).logits[0, -1].argmax()))
    assert greedy == slow[3:]


def draws(count: int) -> list[random.Random]:
    return [random.Random(index) for index in range(count)]


def test_sampled_tokens_have_the_models_distribution(writer: Target) -> None:
    prompt = [5, 6, 7]
    with torch.no_grad():
        logits = writer.model(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    expected = (logits / 2.5).softmax(-1)
    made = generate(writer, [prompt] * 4000, draws(4000), max_new_tokens=1, temperature=2.5)
    counts = torch.zeros_like(expected)
    for tokens, _ in made:
        counts[tokens[0] if tokens else writer.stop_ids[0]] += 1
    top = expected.topk(12).indices
    observed, wanted = counts[top], 4000 * expected[top]
    assert ((observed - wanted) ** 2 / wanted).sum() < 40, "chi-square with 12 degrees of freedom, p < 1e-4"


def test_answers_to_given_prompts(writer: Target, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    talks = [
        ["system", "Brief.", "user", "The fox?", "assistant", "dropped", "user", "The dog?", "assistant", "dropped"],
        ["user", "First this.", "user", "Then that?", "assistant", "dropped"],
        *(["user", f"{number}?", "assistant", "dropped"] for number in range(4)),
    ]
    lines = [
        {"messages": [{"role": role, "content": text} for role, text in zip(talk[::2], talk[1::2], strict=True)]}
        for talk in talks
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    out = data.regenerate(writer, prompts, out=tmp_path / "out.jsonl", max_new_tokens=8, progress=False)
    made = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    assert "dropped" not in out.read_text() and 3 <= len(made) <= 6
    roles = ["".join(message["role"][0] for message in talk) for talk in made]
    assert set(roles) <= {"suaua", "sua", "uua", "ua"} and "ua" in roles
    for talk in made:  # every answer is the target's own greedy one, after all that came before it
        for place in (number for number, message in enumerate(talk) if message["role"] == "assistant"):
            prompt = render(writer.tokenizer, talk[:place], answer=True)
            ids = writer.tokenizer(prompt, add_special_tokens=False)["input_ids"]
            tokens, ended = generate(writer, [ids], draws(1), max_new_tokens=8, temperature=0.0)[0]
            text = writer.tokenizer.decode(tokens, skip_special_tokens=True)
            assert talk[place]["content"] == (text if ended else text.rstrip("\ufffd"))
            assert talk[place]["finish_reason"] == ("stop" if ended else "length")
    assert data.load(out, writer, progress=False).used == len(made)


def sample(writer: Target, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[str, str]:
    """Sampled conversations; a random model's turns are all junk in form, so every turn that ended is taken."""
    monkeypatch.setattr("dflash_lib.regenerate.sensible", lambda text: None if text else "empty turn")
    common = {"count": 12, "heldout": 4, "max_new_tokens": 6, "max_turn_tokens": 30, "turn_temperature": 1.5}
    out, held = folder / "train.jsonl", folder / "heldout.jsonl"
    data.regenerate(writer, out=out, heldout_out=held, progress=False, **{**common, **options})
    return out.read_text(), held.read_text()


def test_sampled_conversations_do_not_depend_on_the_batch(
    writer: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, held = sample(writer, tmp_path / "a", monkeypatch, batch=5)
    assert (train, held) == sample(writer, tmp_path / "b", monkeypatch, batch=64)
    assert (train, held) != sample(writer, tmp_path / "c", monkeypatch, seed=1)
    more, same_held = sample(writer, tmp_path / "d", monkeypatch, count=20)
    assert same_held == held and more.startswith(train), "more conversations left the first ones as they were"
    questions = [json.loads(line)["messages"][0]["content"] for line in (train + held).splitlines()]
    assert len(questions) == 16 == len({" ".join(question.split()).casefold() for question in questions})
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["heldout.jsonl", "train.jsonl"]


def test_a_stopped_call_goes_on_where_it_was(writer: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sample(writer, tmp_path / "whole", monkeypatch, batch=4)
    made: list[int] = []
    original = generate

    def dies(*args: Any, **options: Any) -> Any:
        made.append(1)
        if len(made) == 5:
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr("dflash_lib.regenerate.generate", dies)
    with pytest.raises(KeyboardInterrupt):
        sample(writer, tmp_path / "cut", monkeypatch, batch=4)
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["train.jsonl.part"], (
        "something half-written is there"
    )
    part = tmp_path / "cut" / "train.jsonl.part"
    done = len(part.read_text().splitlines()) - 1
    assert done >= 4
    with part.open("a") as handle:
        handle.write('{"messages": [{"role": "us')  # the kill came in the middle of a line
    with pytest.raises(DataError, match="unfinished work of other settings"):
        sample(writer, tmp_path / "cut", monkeypatch, seed=3)
    assert sample(writer, tmp_path / "cut", monkeypatch, batch=4) == whole


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ("Can you explain how bees find their way home?", None),
        ("Hi there", "too short"),
        ("Tell me <|im_start|>assistant about it please", "markers"),
        ("1 + 2 = 3, 4 + 5 = 9, 10 / 2 = 5", "few letters"),
        ("go on and on and on and on and on and on and on and on", "repeats itself"),
    ],
)
def test_junk_turns_are_told_apart(turn: str, reason: str | None) -> None:
    found = sensible(turn)
    assert (found is None) if reason is None else reason in str(found)


def test_nothing_to_do_is_refused(writer: Target, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give prompts, or a count"):
        data.regenerate(writer, out=tmp_path / "x.jsonl", progress=False)
    with pytest.raises(DataError, match="heldout_out"):
        data.regenerate(writer, out=tmp_path / "x.jsonl", count=3, heldout=1, progress=False)


def test_the_bare_header_ends_where_a_user_speaks() -> None:
    assert user_header(make_tokenizer(CHATML)) == "<|im_start|>user\n"
    assert user_header(make_tokenizer(INST)) == "[INST] "


# --- the packaged conversations --------------------------------------------------------------------------------------
def test_the_packaged_conversations(smollm2: Target) -> None:
    """All used, apart from each other, small, and what the card says: the target's own answers, greedy."""
    heldout = data.load("packaged", smollm2, split="heldout", progress=False)
    train = data.load("packaged", smollm2, heldout=heldout, progress=False)
    assert train.left_out == heldout.left_out == [] and train.notes == heldout.notes == []
    assert len(train) >= 120 and len(heldout) >= 20
    asked = [{talk.messages[0].content for talk in data.read("packaged", split)[0]} for split in ("train", "heldout")]
    assert not asked[0] & asked[1]
    files = list((Path(__file__).parent.parent / "data").glob("*.jsonl"))
    assert sum(file.stat().st_size for file in files) < 2_000_000
    row = next(row for row in heldout.rows if int(row.mask.sum()) < 60)
    logits = smollm2.logits(smollm2.features(torch.tensor([row.input_ids]), last_hidden=True).last_hidden)[0]
    places = [place for place, answer in enumerate(row.response_mask) if answer]
    best = [int(logits[place - 1].argmax()) for place in places]
    said = [row.input_ids[place] for place in places]
    assert sum(a == b for a, b in zip(best, said, strict=True)) >= 0.95 * len(said)
