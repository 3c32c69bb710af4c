"""Rows that decode together: prefill, cycles of draft and verification, and what each row gave.

The rule of speculative decoding is two functions, :func:`accepted_count` and :func:`choose`; everything else here
keeps buffers, time and finished rows. Public functions are in :mod:`dflash_lib.decode`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_lib.errors import UserError
from dflash_lib.steps import Captured, Clock, TargetStep

PARTS = ("prefill", "draft", "verify", "bookkeeping")


@dataclass
class Decoded:
    """What one prompt gave.

    Attributes:
        tokens: new tokens; the stop token is the last one if one came.
        accepted: accepted drafts n of each cycle, 0..B-1; empty for plain decoding. Drafts after a stop token do not
            count; a cycle that passes the length limit counts in full, though its surplus is not in ``tokens``.
        seconds: wall time in each of :data:`PARTS`. Prompts of one batch share its time equally while they last, so
            sums over prompts are wall time.
        block_size: B; 1 for plain decoding.
        finished: ``"stop"`` or ``"length"``.
    """

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    block_size: int = 1
    finished: str = "length"

    @property
    def tau(self) -> float | None:
        """Mean acceptance length: tokens committed per cycle, between 1 and B; None without a cycle."""
        return 1 + sum(self.accepted) / len(self.accepted) if self.accepted else None

    @property
    def per_position(self) -> list[float]:
        """Share of cycles that accepted the draft of slot 1, 2, ..., B-1 (and so all before it)."""
        cycles = max(len(self.accepted), 1)
        return [sum(n >= slot for n in self.accepted) / cycles for slot in range(1, self.block_size)]

    @property
    def decode_seconds(self) -> float:
        """Seconds after the prompt was read."""
        return sum(self.seconds.values()) - self.seconds["prefill"]

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, the first one and the prefill that made it left out."""
        return (len(self.tokens) - 1) / max(self.decode_seconds, 1e-9)


class DecodeError(UserError):
    """Prompts or settings that cannot be decoded: one line."""


class Drafts(Protocol):
    """What :func:`speculative` needs of a drafter; :class:`dflash_lib.steps.DraftStep` is one made of a Drafter."""

    block_size: int

    def begin(self, rows: Sequence[int], features: Tensor, positions: Tensor) -> None:
        """A new batch: prompt ``rows`` (indices), target features ``[R, P, K*H]`` at ``positions [R, P]``."""

    def draft(self, anchor: Tensor, position: Tensor, window: int) -> Tensor:
        """Drafts ``[R, B-1]`` after token ``anchor [R]`` at ``position [R]``."""

    def commit(self, features: Tensor, positions: Tensor) -> None:
        """Target features ``[R, B, K*H]`` of the verified block; slots past what was accepted are overwritten later."""


@dataclass(frozen=True)
class Options:
    max_new_tokens: int
    temperature: float
    stop_ids: frozenset[int]
    seed: int
    batch_size: int
    graphs: bool | None
    static: bool | None
    progress: Callable[[int, int], None] | None


def accepted_count(drafts: Tensor, choices: Tensor) -> Tensor:
    """n per row: leading drafts ``[R, B-1]`` equal to the target's choices ``[R, B]`` after the tokens before them."""
    return (drafts == choices[:, :-1]).int().cumprod(dim=1).sum(dim=1)


def choose(logits: Tensor, temperature: float, uniforms: Tensor) -> Tensor:
    """The target's tokens ``[R, T]`` from logits ``[R, T, V]``: argmax, or its distribution at ``uniforms``."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    cumulative = torch.softmax(logits.double() / temperature, dim=-1).cumsum(dim=-1)
    points = uniforms[..., None].double() * cumulative[..., -1:]
    return torch.searchsorted(cumulative, points, right=True).squeeze(-1).clamp_max(logits.shape[-1] - 1)


class Session:
    """Rows that decode together: the buffers, the steps over them, and the batch they hold now."""

    def __init__(self, target: Any, build: Any, block_size: int, longest: int, options: Options) -> None:
        self.target, self.options, self.block_size = target, options, block_size
        self.device = torch.device(target.device)
        rows, self.extent = options.batch_size, options.max_new_tokens + block_size
        self.capacity = _round_up(longest + self.extent + block_size)  # a finished row stays inside too
        self.target_step = TargetStep(target, rows, self.capacity)
        self.drafts_from: Drafts | None = build(rows, self.capacity) if build is not None else None

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=self.device)

        self.anchor, self.position, self.origin = integers(rows), integers(rows), integers(rows)
        self.active = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self.drafts = integers(rows, block_size - 1)
        self.result = integers(rows, block_size + 1)  # the target's choices, then n
        self.uniforms = torch.zeros(rows, self.extent + 1, dtype=torch.float64, device=self.device)
        self.slots = torch.arange(block_size, device=self.device)
        self.features: Tensor | None = None  # of the verified block; made by the first verification
        self.window = self.capacity
        self.clock = Clock(self.device, 4)
        graphs = self.device.type == "cuda" if options.graphs is None else options.graphs
        self.static = graphs if options.static is None else options.static or graphs
        self.steps: tuple[Callable[[], None], ...] = (
            (self._verify,) if self.drafts_from is None else (self._draft, self._verify, self._commit)
        )
        if graphs:
            self._capture()

    def _capture(self) -> None:
        if self.drafts_from is not None and not getattr(self.drafts_from, "capturable", False):
            raise DecodeError("graphs: this drafter is no Drafter and cannot be captured; pass graphs=False")
        self.active.fill_(True)
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.steps = tuple(Captured(step, self.position.zero_, pool, stream) for step in self.steps)

    # --- one cycle, on the device ---
    def _draft(self) -> None:
        assert self.drafts_from is not None
        self.drafts.copy_(self.drafts_from.draft(self.anchor, self.position, self.window))

    def _verify(self) -> None:
        positions = self.position[:, None] + self.slots
        block = torch.cat((self.anchor[:, None], self.drafts), dim=1)
        hidden, features = self.target_step.forward(
            block, positions, self.window, features=self.drafts_from is not None
        )
        choices = self._choose(hidden, positions)
        count = accepted_count(self.drafts, choices)
        self.result[:, :-1].copy_(choices)
        self.result[:, -1].copy_(count)
        if features is not None:
            if self.features is None:
                self.features = torch.empty_like(features)
                self.verified = torch.empty_like(positions)
            self.features.copy_(features)
            self.verified.copy_(positions)
        following = choices.gather(1, count[:, None]).squeeze(1)
        self.anchor.copy_(torch.where(self.active, following, self.anchor))
        self.position.add_(torch.where(self.active, count + 1, 0))

    def _commit(self) -> None:
        assert self.drafts_from is not None and self.features is not None
        self.drafts_from.commit(self.features, self.verified)

    def _choose(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """The token after each position; its place in the output decides which uniform number it is drawn with."""
        places = (positions - self.origin[:, None] + 1).clamp_(0, self.extent)
        return choose(self.target.logits(hidden), self.options.temperature, self.uniforms.gather(1, places))

    # --- a batch, from the host ---
    def run(self, indices: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[Decoded]:
        """Decodes the prompts of these indices, at most ``batch_size`` of them."""
        options = self.options
        outputs = [Decoded([], block_size=self.block_size) for _ in indices]
        limits = [self._limit(prompts[index]) for index in indices]
        started = time.perf_counter()
        for output, token in zip(outputs, self._prefill(indices, prompts), strict=False):
            output.tokens.append(token)
        lengths = [len(prompts[index]) for index in indices]
        going = self._finish(outputs, limits, range(len(indices)))
        self._share(outputs, range(len(indices)), {"prefill": time.perf_counter() - started})
        while going:
            started = time.perf_counter()
            if not self.static:
                ahead = max(lengths[row] + len(outputs[row].tokens) for row in going)
                self.window = min(self.capacity, _round_up(ahead + self.block_size))
            for index, step in enumerate(self.steps):
                self.clock.mark(index)
                step()
            self.clock.mark(len(self.steps))
            result = self.result.tolist()  # the one wait for the device
            for row in going:
                *choices, count = result[row]
                kept = choices[: count + 1]
                stop = next((i for i, token in enumerate(kept) if token in options.stop_ids), None)
                outputs[row].tokens += kept if stop is None else kept[: stop + 1]
                if self.drafts_from is not None:
                    outputs[row].accepted.append(count if stop is None else min(count, stop))
            still = self._finish(outputs, limits, going)
            if len(still) < len(going):
                self._set_active(still)
            between = self.clock.between
            plain = self.drafts_from is None
            draft, verify = (0.0, between(0, 1)) if plain else (between(0, 1) + between(2, 3), between(1, 2))
            total = time.perf_counter() - started
            self._share(
                outputs, going, {"draft": draft, "verify": verify, "bookkeeping": max(total - draft - verify, 0.0)}
            )
            going = still
        return outputs

    def _prefill(self, indices: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
        """Reads the prompts, padded on the right (attention is causal), and chooses each one's first token."""
        rows = self.options.batch_size
        chosen = [prompts[index] for index in indices]
        chosen += [chosen[-1]] * (rows - len(chosen))
        longest = max(map(len, chosen))
        ids = torch.zeros(rows, longest, dtype=torch.long)
        for row, prompt in enumerate(chosen):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        lengths = torch.tensor([len(prompt) for prompt in chosen], device=self.device)
        self.origin.copy_(lengths)
        if self.options.temperature > 0:
            self.uniforms.copy_(torch.stack([self._draws(index) for index in [*indices, *[0] * rows][:rows]]))
        positions = torch.arange(longest, device=self.device).expand(rows, -1)
        hidden, features = self.target_step.forward(
            ids.to(self.device), positions, longest, features=self.drafts_from is not None
        )
        last = hidden.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, hidden.shape[2]))
        first = self._choose(last, (lengths - 1)[:, None]).squeeze(1)
        if self.drafts_from is not None and features is not None:
            self.drafts_from.begin(indices, features, positions)
        self.anchor.copy_(first)
        self.position.copy_(lengths)
        self._set_active(range(len(indices)))
        return first.tolist()

    def _draws(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.options.seed * 1_000_003 + index) % 2**63)
        return torch.rand(self.extent + 1, dtype=torch.float64, generator=generator)

    def _set_active(self, rows: Iterable[int]) -> None:
        mask = torch.zeros(self.options.batch_size, dtype=torch.bool)
        mask[list(rows)] = True
        self.active.copy_(mask)

    def _limit(self, prompt: Sequence[int]) -> int:
        room = int(getattr(self.target.config, "max_position_embeddings", 0) or 2**31) - len(prompt)
        return min(self.options.max_new_tokens, room)

    def _finish(self, outputs: list[Decoded], limits: list[int], rows: Iterable[int]) -> list[int]:
        """Cuts and marks what is done; returns the rows that go on."""
        going = []
        for row in rows:
            output, limit = outputs[row], limits[row]
            if output.tokens[-1] in self.options.stop_ids and len(output.tokens) <= limit:
                output.finished = "stop"
            elif len(output.tokens) >= limit:
                del output.tokens[limit:]
            else:
                going.append(row)
        return going

    @staticmethod
    def _share(outputs: list[Decoded], rows: Sequence[int], seconds: dict[str, float]) -> None:
        for row in rows:
            for part, value in seconds.items():
                outputs[row].seconds[part] += value / len(rows)


def _round_up(length: int, multiple: int = 64) -> int:
    return -(-length // multiple) * multiple
