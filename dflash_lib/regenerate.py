"""Conversations that the target writes itself: a drafter learns what its target says, not what others said.

The target answers given prompts, or first samples user turns from its own bare chat template. Every draw has a
generator of its own, keyed by (seed, conversation, turn): neither batch size, device nor threads change what is drawn.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dflash_lib.atomic import write_bytes
from dflash_lib.chat import render, user_header
from dflash_lib.conversations import Conversation, DataError, Message, read
from dflash_lib.generation import generate
from dflash_lib.target import Target

_CPU_BATCH, _CUDA_BATCH = 24, 512


def regenerate(
    target: Target,
    prompts: str | Path | Sequence[Conversation] | None = None,
    *,
    out: str | Path,
    count: int | None = None,
    heldout: int = 0,
    heldout_out: str | Path | None = None,
    max_new_tokens: int = 128,
    max_turn_tokens: int = 64,
    temperature: float = 0.0,
    turn_temperature: float = 0.8,
    seed: int = 0,
    thinking: bool | None = None,
    batch: int | None = None,
    progress: bool = True,
) -> Path:
    """Writes JSON lines of conversations whose answers are the target's own.

    A stopped call goes on where it was (its work lies beside ``out`` until it is done); the files appear whole.

    Args:
        target: on the device it shall run on.
        prompts: conversations (or a file of them) whose user turns are answered one after another; their own
            answers are dropped. None: the target samples single user turns too, from its bare template.
        out: the file to write.
        count: conversations wanted in ``out``; None: all of ``prompts``.
        heldout: conversations wanted in ``heldout_out``, none of whose user turns is in ``out``. They come first,
            so a larger ``count`` later leaves them as they are.
        max_new_tokens: of an answer. One cut there says so with ``"finish_reason": "length"``.
        max_turn_tokens: of a sampled user turn; a longer one is dropped.
        temperature: of the answers; 0 is greedy, the way drafters are measured.
        turn_temperature: of the sampled user turns.
        batch: conversations generated at once; None: 24 on a CPU, 512 on CUDA.

    Raises:
        DataError: nothing to answer, or work of other settings lies beside ``out``.
    """
    out = Path(out)
    for file in (out, heldout_out):
        if file is not None and Path(file).is_dir():
            raise DataError(f"{file}: is a folder; name the file to write")
    given = _prompts(prompts, count, heldout)
    wanted = (len(given) if given is not None else 0) if count is None else count + heldout
    if wanted < 1:
        raise DataError("regenerate: nothing to do; give prompts, or a count of conversations to sample")
    if heldout and heldout_out is None:
        raise DataError("regenerate: held-out conversations need a file of their own; give heldout_out")
    settings = {
        "target": target.name, "prompts": None if given is None else zlib.crc32(repr([c.text for c in given]).encode()),
        "max_new_tokens": max_new_tokens, "max_turn_tokens": max_turn_tokens, "temperature": temperature,
        "turn_temperature": turn_temperature, "seed": seed, "thinking": thinking,
    }  # fmt: skip
    writer = _Writer(target, seed, thinking, max_new_tokens, temperature, max_turn_tokens, turn_temperature)
    size = batch or (_CUDA_BATCH if target.device.type == "cuda" else _CPU_BATCH)
    work = _Work(out.with_name(out.name + ".part"), settings)
    with tqdm(total=wanted, initial=len(work.kept), desc="conversations", disable=not progress) as bar:
        while len(work.kept) < wanted and (given is None or work.done < len(given)):
            first = work.done
            made = (
                writer.sample(range(first, first + size))
                if given is None
                else writer.answer(first, given[first : first + size])
            )
            work.add(made)
            bar.n = min(len(work.kept), wanted)
            bar.set_postfix_str(f"{writer.tokens / max(writer.seconds, 1e-9):.0f} tokens/s")
            bar.refresh()
            if given is None and work.done >= 64 * wanted + 1024:
                raise DataError(
                    f"regenerate: only {len(work.kept)} of {work.done} sampled turns were sensible ({work.reasons()}); "
                    "give prompts instead"
                )
        if progress:
            bar.write(f"kept {len(work.kept)} of {work.done}; left out: {work.reasons() or 'none'}")
    kept = work.kept[:wanted]
    if not kept:
        raise DataError(f"regenerate: no conversation was left ({work.reasons()})")
    if heldout:
        _write_lines(Path(heldout_out or ""), kept[:heldout])
    _write_lines(out, kept[heldout:])
    work.path.unlink()
    return out


def sensible(turn: str) -> str | None:
    """Why a sampled user turn is junk, or None. Judges form only: length, letters, repetition, left-over markers."""
    words = turn.split()
    if len(words) < 3 or len(turn) < 12:
        return "turn too short"
    if re.search(r"<\|?[a-z_]+\|?>|\ufffd|[\x00-\x08\x0b\x0c\x0e-\x1f]", turn):
        return "turn with markers or control characters"
    if sum(character.isalpha() for character in turn) < 0.55 * len(turn):
        return "turn with few letters"
    if len(set(words)) < 0.4 * len(words):
        return "turn that repeats itself"
    return None


@dataclass
class _Written:
    """What became of one conversation: its line, or why there is none."""

    messages: list[dict[str, str]] | None
    reason: str = ""


@dataclass
class _Writer:
    """Turns prompts into conversations, a batch at a time."""

    target: Target
    seed: int
    thinking: bool | None
    max_new_tokens: int
    temperature: float
    max_turn_tokens: int
    turn_temperature: float
    tokens: int = 0
    seconds: float = 0.0

    def sample(self, indices: range) -> list[_Written]:
        """Single-turn conversations whose user turns the target samples as well."""
        header = self._ids(user_header(self.target.tokenizer, thinking=self.thinking))
        draws = [random.Random(f"{self.seed}/{index}/turn") for index in indices]
        turns = self._generate([header] * len(draws), draws, self.max_turn_tokens, self.turn_temperature)
        written: list[_Written] = []
        for tokens, ended in turns:
            text = self._text(tokens).strip()
            reason = sensible(text) if ended else "turn too long"
            written.append(_Written(None, reason) if reason else _Written([{"role": "user", "content": text}]))
        self._answer_last(written, indices)
        return written

    def answer(self, first: int, prompts: Sequence[Conversation]) -> list[_Written]:
        """The prompts' user turns, each answered before the next is asked. An answer cut at the limit ends it."""
        written = [_Written([]) for _ in prompts]
        asked = [_asked(prompt) for prompt in prompts]
        for position in range(max(map(len, asked))):
            live: list[int] = []
            for row, messages in enumerate(asked):
                done = written[row].messages
                if done is None or position >= len(messages) or (done and done[-1].get("finish_reason") == "length"):
                    continue
                message, to_answer = messages[position]
                done.append({"role": message.role, "content": message.content})
                if to_answer:
                    live.append(row)
            self._answer_last(written, range(first, first + len(prompts)), live)
        return [
            entry if not entry.messages or entry.messages[-1]["role"] == "assistant" else _Written(entry.messages[:-1])
            for entry in written
        ]

    def _answer_last(self, written: list[_Written], indices: range, live: list[int] | None = None) -> None:
        """Appends an answer to each conversation that has messages (those of ``live``, where it is given)."""
        rows = [row for row in (range(len(written)) if live is None else live) if written[row].messages]
        if not rows:
            return
        prompts = [
            self._ids(render(self.target.tokenizer, written[row].messages or [], thinking=self.thinking, answer=True))
            for row in rows
        ]
        limit = getattr(self.target.config, "max_position_embeddings", None) or 1 << 30
        draws = [random.Random(f"{self.seed}/{indices[row]}/{len(written[row].messages or [])}") for row in rows]
        fits = [number for number, prompt in enumerate(prompts) if len(prompt) + self.max_new_tokens <= limit]
        answers = self._generate(
            [prompts[n] for n in fits], [draws[n] for n in fits], self.max_new_tokens, self.temperature
        )
        for number in set(range(len(rows))) - set(fits):
            written[rows[number]] = _Written(None, "prompt longer than the target's positions")
        for number, (tokens, ended) in zip(fits, answers, strict=True):
            text = self._text(tokens)
            text = text if ended else text.rstrip("\ufffd")
            if not text.strip():
                written[rows[number]] = _Written(None, "empty answer")
                continue
            messages = written[rows[number]].messages or []
            messages.append({"role": "assistant", "content": text, "finish_reason": "stop" if ended else "length"})

    def _generate(
        self, prompts: list[list[int]], draws: list[random.Random], limit: int, temperature: float
    ) -> list[tuple[list[int], bool]]:
        begun = time.perf_counter()
        results = generate(self.target, prompts, draws, max_new_tokens=limit, temperature=temperature)
        self.seconds += time.perf_counter() - begun
        self.tokens += sum(len(tokens) for tokens, _ in results)
        return results

    def _ids(self, text: str) -> list[int]:
        return list(self.target.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, tokens: list[int]) -> str:
        return str(self.target.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@dataclass
class _Work:
    """What is done so far, kept beside the file that is being made: settings, then a line per conversation."""

    path: Path
    settings: dict[str, Any]
    done: int = 0
    kept: list[dict[str, Any]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    _asked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = 0
        for number, (raw, entry) in enumerate(self._read()):
            if number == 0 and entry != self.settings:
                raise DataError(
                    f"{self.path}: holds unfinished work of other settings; delete it, or use those settings"
                )
            whole += len(raw)
            if number:
                self._take(entry)
        with self.path.open("ab") as handle:
            handle.truncate(whole)  # a line that a kill cut short is made again
        if not whole:
            self._append([self.settings])

    def _read(self) -> Iterator[tuple[bytes, Any]]:
        if self.path.is_file():
            for raw in self.path.read_bytes().splitlines(keepends=True):
                if not raw.endswith(b"\n"):
                    return
                yield raw, json.loads(raw)

    def add(self, batch: list[_Written]) -> None:
        entries = [{"messages": entry.messages, "reason": entry.reason} for entry in batch]
        self._append(entries)
        for entry in entries:
            self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        self.done += 1
        messages = entry["messages"]
        asked = "\n".join(" ".join(m["content"].split()).casefold() for m in messages or () if m["role"] == "user")
        if not messages:
            self.left_out[entry["reason"] or "no user turn"] += 1
        elif asked in self._asked:
            self.left_out["asked before"] += 1
        else:
            self._asked.add(asked)
            self.kept.append({"messages": messages})

    def _append(self, entries: list[dict[str, Any]]) -> None:
        with self.path.open("ab") as handle:
            handle.write(_json_lines(entries))
            handle.flush()
            os.fsync(handle.fileno())

    def reasons(self) -> str:
        return ", ".join(f"{reason} {count}" for reason, count in self.left_out.most_common())


def _asked(prompt: Conversation) -> list[tuple[Message, bool]]:
    """The messages that are not answers, and whether each is to be answered: a user's, unless the user goes on."""
    following = [message.role for message in prompt.messages[1:]] + ["assistant"]
    return [
        (message, message.role == "user" and after != "user")
        for message, after in zip(prompt.messages, following, strict=True)
        if message.role != "assistant"
    ]


def _prompts(
    prompts: str | Path | Sequence[Conversation] | None, count: int | None, heldout: int
) -> list[Conversation] | None:
    if prompts is None:
        return None
    conversations = read(prompts)[0] if isinstance(prompts, str | Path) else list(prompts)
    if not conversations:
        raise DataError("regenerate: there is no prompt to answer")
    return conversations if count is None else conversations[: count + heldout]


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, _json_lines(lines))


def _json_lines(values: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values)
