"""A drafter's configuration in small, and what watches the size of its tensors; no target, no transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_lib.drafter import DrafterConfig


def drafter_config(**changes: Any) -> DrafterConfig:
    """Sizes that take microseconds; a test names those it depends on. The mask token is the last one."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 50,
        "target_layer_ids": (0, 1),
        "num_target_layers": 3,
        "block_size": 8,
        "dtype": torch.float64,
        **changes,
    }
    own = {"target_hidden_size": sizes["hidden_size"], "mask_token_id": sizes["vocab_size"] - 1}
    return DrafterConfig(**{**own, **sizes})


class Largest(TorchDispatchMode):
    """Remembers the largest tensor any operation returned, in elements."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, Tensor):
                self.size = max(self.size, value.numel())
        return out
