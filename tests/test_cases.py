"""Files as people really have them (tests/cases), and other files of each kind: used, or left out with a reason.

The expected outcome of each file is the table of the cases' own README; `more` gives other files of the same kind,
so that a reader made to fit the files alone would fail.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_texts import CHATML, make_model, make_tokenizer

from dflash_lib import checkpoint, data
from dflash_lib.data import DataError
from dflash_lib.target import Target

CASES = Path(__file__).parent / "cases"


@pytest.fixture(scope="module")
def target() -> Target:
    tokenizer = make_tokenizer(CHATML)
    return Target(make_model(len(tokenizer)), tokenizer, name="tiny", target_layers=[0])


def load(path: Path, target: Target, **options: Any) -> tuple[list[int], dict[int, str], data.Dataset]:
    """(lines used, {line left out: reason}, dataset)."""
    found = data.load(path, target, progress=False, **{"max_length": 8192, **options})
    used = sorted({int(row.source.rpartition(":")[2]) for row in found.rows})
    left = {entry.line: entry.reason for entry in found.left_out}
    assert len(used) + len(left) == found.lines, "a line is neither used nor left out"
    assert not set(used) & set(left)
    assert all(str(path) == entry.file for entry in found.left_out)
    return used, left, found


def answers(found: data.Dataset, target: Target, line: int) -> str:
    """What of a line is learned from, as text."""
    rows = [row for row in found.rows if row.source.endswith(f":{line}")]
    return "".join(target.tokenizer.decode(row.ids[row.mask]) for row in rows)


def whole(found: data.Dataset, target: Target, line: int) -> str:
    return "".join(target.tokenizer.decode(row.ids) for row in found.rows if row.source.endswith(f":{line}"))


def write(path: Path, *lines: Any, end: bytes = b"\n") -> Path:
    """Lines as JSON, or as they are where they are bytes."""
    path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + end for line in lines))
    return path


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]}


# --- f01: byte order mark, CR LF, no newline at the end --------------------------------------------------------------
def test_bom_and_crlf(target: Target) -> None:
    used, left, found = load(CASES / "f01_bom_crlf.jsonl", target)
    assert (used, left) == ([1, 2, 4, 5], {})
    assert answers(found, target, 2) == "Please keep to the path.\r\nThe bees thank you.<|im_end|>"
    assert all("\r" not in whole(found, target, line) for line in (1, 4, 5))


def test_only_lf_and_crlf_end_a_line(target: Target, tmp_path: Path) -> None:
    separators = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg"
    raw = json.dumps(chat("Which separators?", separators.replace("\x0b", "").replace("\x0c", "").replace("\x1c", "")))
    path = write(tmp_path / "x.jsonl", raw.encode().decode("unicode_escape").encode(), chat("Q?", separators))
    used, left, found = load(path, target)
    assert (used, left) == ([1, 2], {})
    assert answers(found, target, 2) == separators + "<|im_end|>"
    crlf = write(tmp_path / "y.jsonl", chat("Q?", "A."), b"", b"  ", b"{", end=b"\r\n")
    assert load(crlf, target)[0:2] == ([1], {4: "is not valid JSON (Expecting property name enclosed in double quotes "
                                             "at column 2; the line looks cut)"})  # fmt: skip


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no train conversation can be used"),
        (b"\n\n", "no train conversation can be used"),
        (b"\xff\xfe{\x00", "is UTF-16; save it as UTF-8"),
        (b"[\n {}\n]", r"can be used: 3 of 3 lines left out; the first: .*:1: "),
    ],
    ids=["empty", "blank lines", "UTF-16", "one JSON array"],
)
def test_files_without_a_usable_line(target: Target, tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        load(tmp_path / "x.jsonl", target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_file_that_is_not_there(target: Target, tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"no such file|is a folder"):
        load(tmp_path / name, target)


# --- f04: answers without text ---------------------------------------------------------------------------------------
def test_empty_answers(target: Target) -> None:
    used, left, found = load(CASES / "f04_empty_answers.jsonl", target)
    assert used == [1, 5, 6]
    assert "empty" in left[2] and "white space" in left[3] and "no content" in left[4]
    assert answers(found, target, 5) == "Second answer.<|im_end|>"


def test_other_answers_without_text(target: Target, tmp_path: Path) -> None:
    nothing = [None, [{"type": "text", "text": ""}], "\u00a0\u2003", "\n"]
    lines = [{"messages": [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": c}]} for c in nothing]
    used, left, found = load(write(tmp_path / "x.jsonl", *lines, chat("Q?", "A.", "More?", " ")), target)
    assert used == [5] and sorted(left) == [1, 2, 3, 4]
    assert answers(found, target, 5) == "A.<|im_end|>"


# --- f06: content as a list of parts ---------------------------------------------------------------------------------
def test_content_parts(target: Target) -> None:
    used, left, found = load(CASES / "f06_content_parts.jsonl", target)
    assert used == [1, 2, 5] and sorted(left) == [3, 4]
    assert "image" in left[3] and "empty list" in left[4]
    assert answers(found, target, 1) == "saves nine.<|im_end|>"
    assert "Part one. Part two: what is 6 times 7?" in whole(found, target, 2)


@pytest.mark.parametrize(
    "part", [{"type": "input_audio"}, {"type": "text"}, {"type": "text", "text": 3}, "bare text", {}, None, []]
)
def test_other_parts_are_left_out(target: Target, tmp_path: Path, part: Any) -> None:
    bad = {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "A."}]}
    used, left, _ = load(write(tmp_path / "x.jsonl", bad, chat("Q?", "A.")), target)
    assert used == [2] and "message 1 holds a part that is no text" in left[1]


# --- f07: odd roles --------------------------------------------------------------------------------------------------
def test_odd_roles(target: Target) -> None:
    used, left, found = load(CASES / "f07_odd_roles.jsonl", target)
    assert {1, 5, 6, 7} <= set(left) and {4, 9} <= set(used)
    assert "'Assistant'" in left[6] and "'critic'" in left[7]
    assert answers(found, target, 4) == "First answer.<|im_end|>"
    assert answers(found, target, 3) == "Ferns like shade.<|im_end|>They also like damp soil.<|im_end|>"


@pytest.mark.parametrize("role", ["tool", "ASSISTANT", "", None, 3, "developer", "assistant "])
def test_other_roles_are_left_out_by_name(target: Target, tmp_path: Path, role: Any) -> None:
    bad = {
        "messages": [{"role": "user", "content": "Q?"}, {"role": role, "content": "A."}, *chat("Q", "A")["messages"]]
    }
    used, left, _ = load(write(tmp_path / "x.jsonl", chat("Q?", "A."), bad), target)
    assert used == [1] and repr(role) in left[2]


# --- f09: the length limit -------------------------------------------------------------------------------------------
def test_answers_beyond_the_limit(target: Target) -> None:
    used, left, found = load(CASES / "f09_answer_beyond_limit.jsonl", target, max_length=256)
    assert used == [3] and sorted(left) == [1, 2]
    assert all("length limit of 256" in reason and "max_length" in reason for reason in left.values())
    assert load(CASES / "f09_answer_beyond_limit.jsonl", target)[0] == [1, 2, 3]
    assert all(len(row) <= 256 for row in found.rows)


def test_an_answer_across_the_limit_is_cut_and_noted(target: Target, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", chat("Q?", "The quick brown fox. " * 40))
    used, _, found = load(path, target, max_length=64)
    assert used == [1] and len(found.rows[0]) == 64 and found.rows[0].response_mask[-1]
    assert "1 rows were cut at the length limit of 64 tokens" in found.report()
    begin = found.rows[0].response_mask.index(True)
    with pytest.raises(DataError, match="no valid anchor"):  # one answer token is left: nothing to predict from it
        load(path, target, max_length=begin + 1)
    with pytest.raises(DataError, match=f"begins at token {begin + 1}"):
        load(path, target, max_length=begin)


# --- f11: ShareGPT ---------------------------------------------------------------------------------------------------
def test_sharegpt_mixed(target: Target) -> None:
    used, left, found = load(CASES / "f11_sharegpt_mixed.jsonl", target)
    assert {1, 2, 3, 5} <= set(used) and len(used) + len(left) == 8
    assert "tools" in left[4] and "both 'messages' and 'conversations'" in left[7]
    assert answers(found, target, 6) == "Yes, both.<|im_end|>"
    assert "<|im_start|>user\nName a star." in whole(found, target, 1)


def test_other_mixtures_say_which(target: Target, tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.jsonl",
        {"conversations": [{"from": "human", "value": "Q?"}, {"from": "gpt", "value": "A.", "content": "B."}]},
        {"conversations": [{"from": "human", "role": "user", "value": "Q?"}, {"from": "gpt", "value": "A."}]},
        {"conversations": [{"from": "human", "value": "Q?"}, {"from": "bard", "value": "A."}]},
        {"prompt": "Q?", "response": "A."},
        {"conversations": [{"value": "Q?"}, {"from": "gpt", "value": "A."}]},
        {"messages": [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "", "tool_calls": [{}]}]},
        chat("Q?", "A."),
    )
    used, left, _ = load(path, target)
    assert used == [7]
    wanted = ("'content' and 'value'", "'role' and 'from'", "'bard'", "prompt, response", "no 'role'", "calls a tool")
    assert all(words in left[line] for line, words in enumerate(wanted, start=1))


# --- f12: repeats and overlap ----------------------------------------------------------------------------------------
def test_duplicates_and_overlap_are_reported(target: Target) -> None:
    heldout = CASES / "f12_duplicate_ids_heldout.jsonl"
    used, left, found = load(CASES / "f12_duplicate_ids_train.jsonl", target, heldout=heldout)
    assert (used, left) == ([1, 2, 3, 4, 5, 6], {})
    repeats = [note for note in found.notes if "repeats" in note]
    overlap = [note for note in found.notes if "held-out" in note]
    assert len(repeats) == 1 and ":4 repeats " in repeats[0] and ":3 exactly" in repeats[0]
    assert len(overlap) == 1 and f"{heldout}:1 " in overlap[0]
    loaded = data.load(heldout, target, split="heldout", progress=False)
    assert load(CASES / "f12_duplicate_ids_train.jsonl", target, heldout=loaded)[2].notes == found.notes
    assert all(note in found.report() for note in found.notes)


# --- f13: hard unicode -----------------------------------------------------------------------------------------------
def test_hard_unicode(target: Target) -> None:
    used, left, found = load(CASES / "f13_hard_unicode.jsonl", target)
    assert used == [1, 2, 3, 4, 7]
    assert "surrogate" in left[5] and "U+0000" in left[6]
    assert "\U0001f469" in answers(found, target, 1) and "\u202b" in answers(found, target, 4)
    assert "cafe\u0301 and caf\u00e9" in answers(found, target, 3), "texts are not normalised"


@pytest.mark.parametrize("text", ["\\udc00 low first", "\\ud83d\\ud83d\\ude00", "ends in \\ud83d"])
def test_other_halves_of_pairs(target: Target, tmp_path: Path, text: str) -> None:
    raw = json.dumps(chat("Q?", "X")).replace("X", text).encode()
    used, left, _ = load(write(tmp_path / "x.jsonl", raw, chat("Q?", "\U0001f600 whole")), target)
    assert used == [2] and "half a surrogate pair" in left[1]
    "\n".join(left.values()).encode()  # what is reported can be written anywhere


# --- f14: broken lines -----------------------------------------------------------------------------------------------
def test_broken_lines(target: Target) -> None:
    used, left, _ = load(CASES / "f14_broken_lines.jsonl", target)
    assert used == [1, 3, 10] and sorted(left) == [2, 4, 5, 6, 7, 8, 9]
    assert len(set(left.values())) == 7, "each has its own reason"
    wanted = {2: "cut", 4: "array", 5: "NaN", 6: "text", 7: "not a list", 8: "not text", 9: "twice"}
    assert all(words in left[line] for line, words in wanted.items())


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not UTF-8"),
        (b'{"messages": [' + b"[" * 100_000, "cannot be read as JSON|not valid JSON"),
        (b'{"id": ' + b"1" * 5000 + b', "messages": []}', "cannot be read as JSON"),
        (b'{"messages": [], "score": Infinity}', "Infinity"),
        (b"null", "null"),
        (b"true", "a truth value"),
        (b"12", "a number"),
        (b"{}", "keys: none"),
        (b'{"messages": {"role": "user"}}', "an object, not a list"),
        (b'{"messages": ["text"]}', "message 1 is text, not an object"),
        (b'{"messages": [], "messages": []}', "'messages' twice"),
        (b'{"messages": []} {"messages": []}', "Extra data"),
    ],
)
def test_other_broken_lines(target: Target, tmp_path: Path, raw: bytes, words: str) -> None:
    used, left, _ = load(write(tmp_path / "x.jsonl", raw, chat("Q?", "A.")), target)
    assert used == [2]
    assert any(part in left[1] for part in words.split("|")), left[1]
    assert "\n" not in left[1] and len(left[1]) < 250


# --- c: broken safetensors files as a drafter ------------------------------------------------------------------------
@pytest.mark.parametrize("path", sorted(CASES.glob("c*.safetensors")), ids=lambda path: path.stem)
def test_broken_tensor_files_are_refused_by_name(path: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.load(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
