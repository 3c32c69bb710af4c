"""Reading conversations: JSON lines with `messages` or ShareGPT's `conversations`, and a reason for each line left out.

No torch here. A line is ended by LF or CR LF only; nothing else in a text splits a line. Line numbers count from 1
and count blank lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_lib.errors import UserError

PACKAGED = "packaged"
ROLES = ("system", "user", "assistant")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}


class DataError(UserError):
    """Data that cannot be used. One line: the file, the line where there is one, what is wrong, what to do."""


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        role: ``system``, ``user`` or ``assistant``.
        content: its text; "" for an answer without one (it stays in the context and is not learned from).
        finished: False for an answer that was cut at a length limit (``"finish_reason": "length"``): what follows
            its text was not said by the model.
    """

    role: str
    content: str
    finished: bool = True


@dataclass(frozen=True)
class Conversation:
    """The messages of one line, and where they stand."""

    messages: tuple[Message, ...]
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def text(self) -> tuple[tuple[str, str], ...]:
        """What makes two conversations the same: roles and texts. Ids are not trusted."""
        return tuple((message.role, message.content) for message in self.messages)


@dataclass(frozen=True)
class LeftOut:
    """A line that is not used, and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class _Reason(Exception):
    """Why one line cannot be used."""


@dataclass
class _Pairs:
    """json's objects as they stand, so that a key given twice is seen."""

    twice: list[str] = field(default_factory=list)

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            keys = [key for key, _ in pairs]
            self.twice += sorted({key for key in keys if keys.count(key) > 1})
        return made


def packaged_file(split: str) -> Path:
    """The conversations that come with the workspace: ``split`` is ``train`` or ``heldout``."""
    return Path(__file__).resolve().parent.parent / "data" / f"{split}.jsonl"


def files(paths: str | Path | Sequence[str | Path], split: str) -> list[Path]:
    """Names as a configuration gives them -> files; ``"packaged"`` stands for the packaged split.

    Raises:
        DataError: a file is missing, or a folder.
    """
    names = [paths] if isinstance(paths, str | Path) else list(paths)
    if not names:
        raise DataError(f"no {split} file was named; name JSON lines files, or 'packaged'")
    found = []
    for name in names:
        path = packaged_file(split) if str(name) == PACKAGED else Path(name).expanduser()
        if path.is_dir():
            raise DataError(f"{path}: is a folder; name a file of JSON lines")
        if not path.is_file():
            raise DataError(f"{path}: there is no such file; name JSON lines files, or 'packaged'")
        found.append(path)
    return found


def read(
    paths: str | Path | Sequence[str | Path] = PACKAGED, split: str = "train"
) -> tuple[list[Conversation], list[LeftOut]]:
    """Every line of every file: a conversation, or left out with a reason.

    Raises:
        DataError: a file cannot be read at all.
    """
    kept: list[Conversation] = []
    left_out: list[LeftOut] = []
    for path in files(paths, split):
        for number, raw in _lines(path):
            try:
                kept.append(Conversation(_messages(_object(raw)), str(path), number))
            except _Reason as reason:
                left_out.append(LeftOut(str(path), number, str(reason)))
    return kept, left_out


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number, line) of every line that is not blank, as bytes: text modes would split at more than LF."""
    try:
        with path.open("rb") as handle:
            for number, raw in enumerate(handle, start=1):
                if number == 1:
                    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                        raise DataError(f"{path}: is UTF-16; save it as UTF-8")
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                raw = raw.removesuffix(b"\n").removesuffix(b"\r")
                if raw.strip():
                    yield number, raw
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None


def _object(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Reason(f"is not UTF-8 (byte {error.start + 1} of the line)") from None

    def no_number(name: str) -> Any:
        raise _Reason(f"holds {name}, which is not JSON")

    pairs = _Pairs()
    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=no_number)
    except json.JSONDecodeError as error:
        cut = "; the line looks cut" if error.pos >= len(text) or "Unterminated" in error.msg else ""
        raise _Reason(f"is not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno}{cut})") from None
    except (RecursionError, ValueError) as error:
        raise _Reason(f"cannot be read as JSON ({str(error) or type(error).__name__:.80})") from None
    if not isinstance(value, dict):
        raise _Reason(f"is {_kind(value)}, not an object with 'messages' or 'conversations'")
    if pairs.twice:
        raise _Reason(f"gives the key {pairs.twice[0]!r} twice in one object")
    return value


def _messages(line: dict[str, Any]) -> tuple[Message, ...]:
    columns = [name for name in ("messages", "conversations") if name in line]
    if len(columns) == 2:
        raise _Reason("has both 'messages' and 'conversations'; keep one")
    if not columns:
        raise _Reason(f"has neither 'messages' nor 'conversations' (keys: {', '.join(sorted(line)) or 'none':.80})")
    turns = line[columns[0]]
    if not isinstance(turns, list):
        raise _Reason(f"its {columns[0]!r} is {_kind(turns)}, not a list")
    if not turns:
        raise _Reason("has no message")
    if line.get("tools") not in (None, [], "", "[]"):
        raise _Reason("defines tools; conversations with tools are not supported")
    messages = tuple(_message(turn, number) for number, turn in enumerate(turns, start=1))
    answers = [message.content for message in messages if message.role == "assistant"]
    if not answers:
        raise _Reason("has no answer to learn from (no assistant message)")
    if not any(answer.strip() for answer in answers):
        kind = "white space" if any(answers) else "empty, or has no content"
        raise _Reason(f"has no answer to learn from (its assistant message is {kind})")
    return messages


def _message(turn: Any, number: int) -> Message:
    if not isinstance(turn, dict):
        raise _Reason(f"message {number} is {_kind(turn)}, not an object")
    role = _role(turn, number)
    if turn.get("tool_calls") or turn.get("function_call"):
        raise _Reason(f"message {number} calls a tool; conversations with tools are not supported")
    if "content" in turn and "value" in turn:
        raise _Reason(f"message {number} has both 'content' and 'value'; keep one")
    content = turn.get("content", turn.get("value"))
    text = _text(content, role, number)
    for name, bad in (("U+0000 (a zero byte)", "\x00"), ("half a surrogate pair", None)):
        position = text.find(bad) if bad else _lone_surrogate(text)
        if position >= 0:
            raise _Reason(f"message {number} holds {name} at character {position + 1}")
    if role != "assistant" and not text.strip():
        raise _Reason(f"message {number} ({role}) has no text")
    return Message(role, text, finished=turn.get("finish_reason") != "length")


def _role(turn: dict[str, Any], number: int) -> str:
    if "role" in turn and "from" in turn:
        raise _Reason(f"message {number} has both 'role' and 'from'; keep one")
    if "role" in turn:
        role, roles = turn["role"], {name: name for name in ROLES}
    elif "from" in turn:
        role, roles = turn["from"], _SHAREGPT_ROLES
    else:
        raise _Reason(f"message {number} has no 'role' (or ShareGPT's 'from')")
    if not isinstance(role, str) or role not in roles:
        raise _Reason(f"message {number} has the role {role!r:.40}, which is none of {', '.join(roles)}")
    return roles[role]


def _text(content: Any, role: str, number: int) -> str:
    """A message's text: a string, or a list of text parts that are joined."""
    if content is None and role == "assistant":
        return ""
    if content is None:
        raise _Reason(f"message {number} ({role}) has no content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _Reason(f"the content of message {number} is {_kind(content)}, not text")
    if not content:
        raise _Reason(f"the content of message {number} is an empty list")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise _Reason(f"message {number} holds a part that is no text ({kind or _kind(part)!r:.40})")
        parts.append(part["text"])
    return "".join(parts)


def _lone_surrogate(text: str) -> int:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return -1


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        dict: "an object",
        list: "an array",
        str: "text",
        bool: "a truth value",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), type(value).__name__)
