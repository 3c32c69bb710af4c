"""The target's own chat template: conversations to text, and to token ids with a response mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_lib.conversations import DataError, Message

_MARK = "DFLASHTURN"


def render(
    tokenizer: Any, messages: Sequence[dict[str, str]], *, thinking: bool | None = None, answer: bool = False
) -> str:
    """The template's text for ``messages``; with ``answer`` it ends where the assistant's answer begins.

    Args:
        thinking: the template's ``enable_thinking``, as the target will be served; None: the template's default.

    Raises:
        DataError: there is no template, or it refuses these messages (with its own words).
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; use an instruction-tuned target"
        )
    options = {} if thinking is None else {"enable_thinking": thinking}
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    try:
        return str(tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=answer, **options))
    except Exception as error:  # jinja's errors, and whatever a template raises
        raise DataError(f"the chat template refuses it ({' '.join(str(error).split()):.120})") from None


def user_header(tokenizer: Any, *, thinking: bool | None = None) -> str:
    """The bare template up to where a user's first turn begins."""
    return render(tokenizer, [{"role": "user", "content": _MARK}], thinking=thinking).split(_MARK)[0]


@dataclass(frozen=True)
class Rendered:
    """A text as the target will see it, and which characters of it the target itself would write.

    Attributes:
        text: the template's text.
        spans: (begin, end) of each supervised answer, its stop token included where the answer was finished.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


def supervise(
    tokenizer: Any, messages: Sequence[Message], stop_texts: Sequence[str], *, thinking: bool | None = None
) -> list[Rendered]:
    """Texts that together supervise every answer exactly as it would be served.

    An answer is served after ``render(messages before it, answer=True)``. Where the whole conversation begins with
    that prompt, the answer is supervised there. Templates that rewrite earlier turns (Qwen3 drops their thinking)
    break this for some answers: each of those gets a text of its own, which ends with it.

    Raises:
        DataError: the template refuses the conversation, or no answer can be found in what it renders.
    """
    plain = [{"role": message.role, "content": message.content} for message in messages]
    whole = render(tokenizer, plain, thinking=thinking)
    together: list[tuple[int, int]] = []
    apart: list[Rendered] = []
    for index, message in enumerate(messages):
        if message.role != "assistant" or not message.content.strip():
            continue
        try:
            prompt = render(tokenizer, plain[:index], thinking=thinking, answer=True)
            text = whole if index == len(messages) - 1 else render(tokenizer, plain[: index + 1], thinking=thinking)
        except DataError:
            continue  # a template may refuse a beginning that no server would be asked for
        end = _answer_end(text, len(prompt), message, stop_texts)
        if not text.startswith(prompt) or end is None:
            continue
        if whole.startswith(text[:end]):
            together.append((len(prompt), end))
        else:
            apart.append(Rendered(text[:end], ((len(prompt), end),)))
    if together:
        last = together[-1][1]
        apart.append(Rendered(whole[:last], tuple(together)))
    if not apart:
        raise DataError("the chat template renders no answer the way it would be served")
    return apart


def _answer_end(text: str, begin: int, message: Message, stop_texts: Sequence[str]) -> int | None:
    """Where the target would stop: after the stop token that follows the answer's text, else after the text."""
    words = message.content.strip()
    found = text.find(words, begin)
    if found < 0 and "</think>" in words:  # templates re-wrap a thinking part; what follows it stays
        words = words.split("</think>")[-1].strip()
        found = text.find(words, begin)
    if found < 0:
        return None
    end = found + len(words)
    if not message.finished:
        return end
    rest = text[end:]
    for stop in stop_texts:
        if rest.lstrip().startswith(stop):
            return end + len(rest) - len(rest.lstrip()) + len(stop)
    return end


def check_template(tokenizer: Any, *, thinking: bool | None = None) -> None:
    """Refuses a template in which an answer looks like a question.

    Raises:
        DataError: no template, or one without assistant markers.
    """
    question = {"role": "user", "content": "First words."}
    answer = {"role": "assistant", "content": "Second words."}
    marked = render(tokenizer, [question, answer], thinking=thinking)
    try:
        unmarked = render(tokenizer, [question, {**answer, "role": "user"}], thinking=thinking)
    except DataError:
        return  # it insists on alternating roles, so it knows them apart
    if marked == unmarked or "Second words." not in marked:
        raise DataError(
            f"the chat template of {tokenizer.name_or_path!r} is a template without assistant markers: answers look "
            "like questions; give the tokenizer a template that marks them"
        )


def tokenise(tokenizer: Any, texts: Sequence[Rendered]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids int32 ``[S]``, response mask bool ``[S]``) of each text. A token counts as the target's own when all of
    it lies in a span; one that straddles the prompt's end is the prompt's."""
    made = tokenizer([entry.text for entry in texts], add_special_tokens=False, return_offsets_mapping=True)
    results = []
    for entry, ids, offsets in zip(texts, made["input_ids"], made["offset_mapping"], strict=True):
        places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        mask = np.zeros(len(ids), dtype=bool)
        for begin, end in entry.spans:
            mask |= (places[:, 0] >= begin) & (places[:, 1] <= end) & (places[:, 1] > begin)
        results.append((np.asarray(ids, dtype=np.int32), mask))
    return results
