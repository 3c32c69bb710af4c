"""Tiny random targets of several families, drafters for them, and independent references for decoding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from dflash_lib.blocks import context_positions, draw_anchors, make_blocks, visible_dense
from dflash_lib.config import RunConfig
from dflash_lib.drafter import Drafter, DrafterConfig
from dflash_lib.loss import drafter_loss
from dflash_lib.target import Target

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, Any] = {
    "llama": lambda v: LlamaConfig(**SIZES, vocab_size=v, num_key_value_heads=2),
    "qwen2": lambda v: Qwen2Config(**SIZES, vocab_size=v, num_key_value_heads=2),
    "qwen3": lambda v: Qwen3Config(**SIZES, vocab_size=v, num_key_value_heads=2, head_dim=16),
    "gemma": lambda v: GemmaConfig(**SIZES, vocab_size=v, num_key_value_heads=2, head_dim=8),
    # sliding layers beside full ones, scores and logits capped
    "gemma2": lambda v: Gemma2Config(
        **SIZES, vocab_size=v, num_key_value_heads=2, head_dim=8, sliding_window=6, attn_implementation="eager"
    ),
    "gemma3": lambda v: Gemma3TextConfig(**SIZES, vocab_size=v, num_key_value_heads=2, head_dim=8, sliding_window=6),
    "mistral": lambda v: MistralConfig(**SIZES, vocab_size=v, num_key_value_heads=2, sliding_window=6),
    "gpt_neox": lambda v: GPTNeoXConfig(**SIZES, vocab_size=v),
}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Operations on tiny tensors take microseconds: a second thread only costs, and much on a machine that is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class NoTokenizer:
    """What Target asks of a tokenizer; the texts of these tests are token ids."""

    mask_token_id = None
    eos_token_id = None
    bos_token_id = pad_token_id = unk_token_id = None
    chat_template = None

    def __init__(self, words: int) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {f"t{index}": index for index in range(self.words)}

    def get_added_vocab(self) -> dict[str, int]:
        return {}


def make_target(family: str = "llama", *, vocab: int = 40, dtype: torch.dtype = torch.float64, seed: int = 0) -> Target:
    """A random target whose greedy text is not constant: its weights are far larger than a trained model's."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](vocab)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.5 / parameter.shape[1] ** 0.5)
        model.get_input_embeddings().weight.mul_(4.0)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return Target(model, NoTokenizer(vocab - 1), name=family, target_layers=[0, 2])


def make_drafter(target: Target, *, block_size: int = 6, seed: int = 0, **changes: Any) -> Drafter:
    settings: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": target.vocab_size,
        "target_layer_ids": target.layer_ids,
        "num_target_layers": target.num_layers,
        "target_hidden_size": target.hidden_size,
        "mask_token_id": target.mask_token_id,
        "block_size": block_size,
        "rope": {"rope_theta": 10_000.0, "rope_scaling": None},
        "max_position_embeddings": 256,
        "dtype": target.dtype,
    }
    return Drafter(DrafterConfig(**{**settings, **changes}), seed=seed)


def make_drafter_of(loaded: Target) -> Drafter:
    """An untrained drafter of one layer, as a run makes it of a real target."""
    config = RunConfig.from_dict({"drafter_layers": 1, "block_size": 4, "precision": "float32"})
    return Drafter(DrafterConfig.from_target(loaded, config))


@torch.no_grad()
def own_greedy(target: Target, prompt: Sequence[int], count: int, stop_ids: Sequence[int] = ()) -> list[int]:
    """The target's greedy text the slow way: a whole forward a token, no cache, nothing of dflash_lib's decoding."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count and (len(ids) == len(prompt) or ids[-1] not in stop_ids):
        logits = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


class Oracle:
    """Drafts the target's own future, so that every draft is accepted; ``right`` of B-1 drafts are right if given."""

    def __init__(
        self, block_size: int, prompts: Sequence[Sequence[int]], futures: Sequence[Sequence[int]], right: int = 99
    ):
        self.block_size, self.right = block_size, right
        self.texts = [[*prompt, *future] for prompt, future in zip(prompts, futures, strict=True)]
        self.rows: list[int] = []

    def begin(self, rows: Sequence[int], features: Tensor, positions: Tensor) -> None:
        self.rows = list(rows)

    def draft(self, anchor: Tensor, position: Tensor, window: int) -> Tensor:
        drafts = torch.zeros(len(anchor), self.block_size - 1, dtype=torch.long)
        for row, index in enumerate(self.rows):
            place = int(position[row])
            future = self.texts[index][place + 1 : place + self.block_size]
            for slot, token in enumerate(future):
                drafts[row, slot] = token if slot < self.right else (token + 1) % 7
        return drafts

    def commit(self, features: Tensor, positions: Tensor) -> None:
        pass


def train(target: Target, drafter: Drafter, texts: list[list[int]], prompt: int, steps: int = 60) -> list[float]:
    """A few AdamW steps on texts of one length; returns the losses."""
    ids = torch.tensor(texts)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, prompt:] = True
    features = target.features(ids).features
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    losses = []
    for step in range(steps):
        anchors, keep = draw_anchors(mask, 12, seed=0, epoch=step, row_ids=range(len(texts)))
        blocks = make_blocks(
            ids,
            mask,
            anchors,
            keep,
            block_size=drafter.config.block_size,
            gamma=4.0,
            mask_token_id=drafter.config.mask_token_id,
        )
        hidden = drafter(
            features,
            target.embed(blocks.inputs),
            context_positions(None, ids.shape[1], len(texts)),
            blocks.positions,
            visible_dense(blocks.anchors, blocks.keep, ids.shape[1], drafter.config.block_size),
        )
        result = drafter_loss(
            hidden, target.head, blocks.labels, blocks.weights, block_size=drafter.config.block_size
        ).mean()
        optimizer.zero_grad()
        result.backward()
        optimizer.step()
        losses.append(float(result.detach()))
    return losses
