"""A target with random weights and rows of random tokens, of any size: real modules, no file, no network.

For measuring what does not depend on what a model has learned: speed, memory, recompiles, threads.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dflash_lib.data import Dataset, Row
from dflash_lib.target import Target


@dataclass(frozen=True)
class Sizes:
    """Sizes of a target, and of the rows a drafter for it is measured with."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    rows: int
    length: int
    anchors: int
    drafter_layers: int = 5
    block_size: int = 16


SIZES = {
    "smollm2": Sizes(576, 30, 9, 3, 64, 1536, 49_152, rows=8, length=1024, anchors=128),
    "qwen3-4b": Sizes(2560, 36, 32, 8, 128, 9728, 151_936, rows=1, length=3072, anchors=512),
    "tiny": Sizes(32, 8, 4, 2, 8, 48, 97, rows=2, length=128, anchors=6, drafter_layers=1, block_size=4),
}


class Tokenizer:
    """The little that a target asks of a tokenizer."""

    chat_template = None
    eos_token_id = pad_token_id = 1
    mask_token_id = None
    all_special_ids = (0, 1)
    name_or_path = "synthetic"

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def get_vocab(self) -> dict[str, int]:
        return {f"<{index}>": index for index in range(self._vocabulary)}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def target(name: str, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Target:
    """A Qwen3 of the sizes ``name``, its weights drawn on ``device`` from ``seed``."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = SIZES[name]
    config = Qwen3Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=max(4096, sizes.length),
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), torch.device(device):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            model = Qwen3ForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
    features = 3 if name == "tiny" else 5
    return Target(
        model.to(device),
        Tokenizer(sizes.vocabulary),
        name=name,
        target_features=features,
        mask_token=sizes.vocabulary - 1,
    )


def rows(name: str, count: int, *, shortest: int | None = None, multiple: int = 1, seed: int = 0) -> Dataset:
    """``count`` rows; their lengths are drawn between ``shortest`` (None: all as long as can be) and the size's own."""
    sizes = SIZES[name]
    generator = np.random.default_rng(seed)
    found = []
    for index in range(count):
        low = sizes.length if shortest is None else shortest
        length = int(generator.integers(low // multiple, sizes.length // multiple + 1)) * multiple
        ids = generator.integers(2, sizes.vocabulary - 1, length, dtype=np.int32)
        mask = np.arange(length) >= min(16, length // 4)
        found.append(Row(index, ids, mask, f"synthetic:{index + 1}"))
    return Dataset(rows=found, left_out=[])
