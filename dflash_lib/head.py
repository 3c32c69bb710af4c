"""Head: the target's frozen output layer, which the drafter shares.

A leaf that loss, decoding and target all import. The weight is the target's own tensor (tied or not), never a
copy of it and never saved with a drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, eq=False)
class Head:
    """What turns a hidden row into logits, as the target's family does it.

    Attributes:
        weight: ``[V, H]``, no gradient.
        bias: ``[V]`` or None.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2); None leaves them as they are.
        scale: factor on the logits, before the cap (Cohere's ``logit_scale``, Granite's ``1 / logits_scaling``).
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [.., H]`` (after the final norm) -> logits ``[.., V]``, in the dtype of ``hidden``."""
        logits = functional.linear(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Head:
        """The same head with its tensors elsewhere; shares them where nothing changes."""
        bias = None if self.bias is None else self.bias.to(device=device, dtype=dtype)
        return replace(self, weight=self.weight.to(device=device, dtype=dtype), bias=bias)
