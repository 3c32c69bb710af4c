"""The target's own chat template: conversations to text, and to token ids with a response mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_lib.conversations import DataError

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
