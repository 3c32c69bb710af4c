"""Key/value slots: one cache that both models decode with, in which every row has a length of its own.

Each layer's keys and values are one buffer ``[R, heads, C, head_dim]``. A token at position ``p`` of its row lives in
slot ``p``, whatever the other rows do. Cropping is therefore free: a slot past a row's length is invisible (the mask
says ``slot <= position``) and is written over when its position comes again. Nothing moves and no shape changes, so the
same code runs eagerly on a CPU and inside a CUDA graph, and does not depend on how a transformers release spells
``DynamicCache.crop`` (a length to keep in 4.57, a number of tokens to remove in 5.24).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class Slots(Cache):
    """Keys and values of ``rows`` sequences of at most ``capacity`` tokens; buffers appear with a layer's first write.

    Before a forward, :meth:`at` says which slots its tokens go to. ``window`` is how many leading slots attention looks
    at: ``capacity`` under a CUDA graph, less where the host knows that all rows are shorter.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.rows, self.capacity, self.window = rows, capacity, capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._positions: Tensor | None = None

    def at(self, positions: Tensor, window: int | None = None) -> None:
        """The next writes go to ``positions [R, T]`` and attention sees slots ``0..window-1``."""
        self._positions = positions
        self.window = self.capacity if window is None else window

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes ``[R, heads, T, D]`` to the slots of :meth:`at`; returns the visible window of the layer's buffers."""
        if self._positions is None:
            raise RuntimeError("Slots.at must say where the tokens go before a forward")
        if layer_idx not in self.keys:
            shape = (self.rows, key_states.shape[1], self.capacity, key_states.shape[3])
            self.keys[layer_idx] = key_states.new_zeros(shape)
            self.values[layer_idx] = value_states.new_zeros((*shape[:3], value_states.shape[3]))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        index = self._positions[:, None, :, None]
        keys.scatter_(2, index.expand_as(key_states), key_states)
        values.scatter_(2, index.expand_as(value_states), value_states)
        return keys[:, :, : self.window], values[:, :, : self.window]

    # What transformers asks a cache for; positions and masks are always given to the model, so nothing depends on it.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return self.window, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length  # its name in transformers 4.57

    @property
    def is_compileable(self) -> bool:
        return False


def causal_mask(positions: Tensor, window: int, dtype: torch.dtype, sliding: int | None = None) -> Tensor:
    """Additive mask ``[R, 1, T, window]``: position ``p`` sees slot ``j`` iff ``p - sliding < j <= p``."""
    slots = torch.arange(window, device=positions.device)
    visible = slots <= positions[..., None]
    if sliding is not None:
        visible &= slots > positions[..., None] - sliding
    mask = torch.zeros(visible.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
