"""The two models as steps over fixed buffers: what decoding calls each cycle, eagerly or as captured CUDA graphs.

A step takes and leaves its tensors in the same memory each time, and nothing in it depends on a value on the host:
that is what a CUDA graph needs, and the eager path on a CPU runs the very same code. Graphs are captured by hand with
``capture_error_mode="thread_local"``, so that other threads may go on using their GPUs (docs of torch: a capture is
otherwise broken by any unsafe call in any thread).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_lib.drafter import Drafter
from dflash_lib.slots import Slots, causal_mask


class TargetStep:
    """The target over a cache of slots: ``ids [R, T]`` at ``positions [R, T]`` -> last hidden rows and features."""

    def __init__(self, target: Any, rows: int, capacity: int) -> None:
        self.target = target
        self.cache = Slots(rows, capacity)
        config = target.config
        kinds = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        slides = bool(window) and getattr(config, "use_sliding_window", True) is not False
        self._sliding = int(window or 0) if slides and (not kinds or "sliding_attention" in kinds) else None
        self._by_kind = "sliding_attention" in kinds

    @torch.no_grad()
    def forward(self, ids: Tensor, positions: Tensor, window: int, *, features: bool) -> tuple[Tensor, Tensor | None]:
        """``(hidden [R, T, H] after the final norm, features [R, T, K*H] or None)``; writes the slots it passes."""
        self.cache.at(positions, window)
        given = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": self._mask(positions, window),
            "use_cache": True,
            self.target.cache_name: self.cache,
        }
        if not features:
            return self.target.decoder(**given).last_hidden_state, None
        with self.target.collecting() as outputs:
            hidden = self.target.decoder(**given).last_hidden_state
        return hidden, self.target.join(outputs)

    def _mask(self, positions: Tensor, window: int) -> Any:
        dtype = self.target.dtype
        if self._by_kind:
            return {
                "full_attention": causal_mask(positions, window, dtype),
                "sliding_attention": causal_mask(positions, window, dtype, self._sliding),
            }
        return causal_mask(positions, window, dtype, self._sliding)


class DraftStep:
    """The drafter over its context cache, with the target's embedding and head; a :class:`session.Drafts`."""

    capturable = True

    def __init__(self, target: Any, drafter: Drafter, rows: int, capacity: int) -> None:
        self.target, self.drafter = target, drafter
        self.block_size = drafter.config.block_size
        self.cache = drafter.new_cache(rows, capacity)
        device = target.device
        self._slots = torch.arange(self.block_size, device=device)
        self._masks = torch.full((rows, self.block_size - 1), drafter.config.mask_token_id, device=device)

    def begin(self, rows: Sequence[int], features: Tensor, positions: Tensor) -> None:
        self.commit(features, positions)

    @torch.no_grad()
    def draft(self, anchor: Tensor, position: Tensor, window: int) -> Tensor:
        self.cache.length = window
        block = torch.cat((anchor[:, None], self._masks), dim=1)
        hidden = self.drafter.draft(self.cache, self.target.embed(block), position[:, None] + self._slots)
        return self.target.logits(hidden[:, 1:].to(self.target.head.weight.dtype)).argmax(dim=-1)

    @torch.no_grad()
    def commit(self, features: Tensor, positions: Tensor) -> None:
        self.drafter.append_context(self.cache, features, positions)


class Captured:
    """A function of no arguments over fixed buffers, replayed as a CUDA graph.

    It is run a few times first (kernels are chosen, buffers appear), each time after ``reset``, then captured. It must
    leave its results in buffers made outside, and whatever it changed is the caller's to set again.
    """

    def __init__(
        self, function: Callable[[], None], reset: Callable[[], Any], pool: Any, stream: torch.cuda.Stream
    ) -> None:
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(3):
                reset()
                function()
        current.wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            function()

    def __call__(self) -> None:
        self._graph.replay()


class Clock:
    """Seconds between marks: host time on a CPU, events on the current stream on CUDA (read once, after a sync)."""

    def __init__(self, device: torch.device, marks: int) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(marks)] if device.type == "cuda" else None
        self._times = [0.0] * marks

    def mark(self, index: int) -> None:
        if self._events is None:
            self._times[index] = time.perf_counter()
        else:
            self._events[index].record()

    def between(self, first: int, last: int) -> float:
        if self._events is None:
            return self._times[last] - self._times[first]
        return self._events[first].elapsed_time(self._events[last]) / 1000.0
