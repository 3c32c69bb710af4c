"""A tiny random target and rows, for tests of the trainer: real modules of transformers, no file, no network."""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_lib.config import RunConfig
from dflash_lib.data import Dataset, Row
from dflash_lib.target import Target

VOCABULARY = 97


class Tokenizer:
    """The little that a target asks of a tokenizer."""

    chat_template = None
    eos_token_id = 1
    pad_token_id = 1
    mask_token_id = None
    all_special_ids = (0, 1)
    name_or_path = "tiny"

    def get_vocab(self):
        return {f"<{index}>": index for index in range(VOCABULARY)}

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def tiny_target(dtype=torch.float32, seed=0):
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(dtype)
    return Target(model, Tokenizer(), name="tiny", target_features=3, mask_token=VOCABULARY - 1)


def rows(count=24, shortest=40, longest=120, seed=0):
    """Texts with something to learn: each token follows from the one before it, mostly."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        length = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        ids = [int(torch.randint(2, 90, (1,), generator=generator))]
        while len(ids) < length:
            ids.append((3 * ids[-1] + 7) % 89 + 2)
        found.append(Row(index, np.array(ids, np.int32), np.arange(length) >= 8, f"tiny:{index + 1}"))
    return Dataset(found)


def tiny_config(run_dir, **changes):
    return RunConfig.from_dict(
        {
            "run_dir": str(run_dir),
            "devices": ["cpu", "cpu"],
            "steps": 6,
            "rows": 2,
            "anchors": 6,
            "block_size": 4,
            "drafter_layers": 1,
            "lr": 3e-3,
            "backend": "aot_eager",
            "drift_every": 2,
            "precision": "float32",
            **changes,
        }
    )
