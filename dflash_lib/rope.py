"""Rotary positions with the target's own settings, under transformers 4.57 and 5 alike.

transformers 4 keeps ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor`` beside each other; 5 keeps one
``rope_parameters``. Here the first form is used, because it is what a drafter's config.json must hold: a file with
only ``rope_parameters`` is read with wrong frequencies by 4.57, silently.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_lib.config import ConfigError


class Rope(NamedTuple):
    """Cosines and sines of positions, ``[R, T, width]`` in at least float32; width is the rotated part of a head."""

    cos: Tensor
    sin: Tensor


def settings_of(config: Any) -> dict[str, Any]:
    """RoPE settings of a transformers model config: ``rope_theta``, and where it has them ``rope_scaling`` (a dict)
    and ``partial_rotary_factor``. Of a config with settings by layer type, those of full attention.

    Raises:
        ConfigError: the model has no rotary positions.
    """
    parameters = getattr(config, "rope_parameters", None)
    if parameters:
        if isinstance(next(iter(parameters.values())), dict):
            parameters = parameters.get("full_attention") or next(iter(parameters.values()))
        parameters = dict(parameters)
        theta = parameters.pop("rope_theta", None)
        partial = parameters.pop("partial_rotary_factor", None)
        scaling = parameters if parameters.get("rope_type", "default") != "default" else None
    else:
        theta = getattr(config, "rope_theta", None) or getattr(config, "rotary_emb_base", None)
        partial = getattr(config, "partial_rotary_factor", None) or getattr(config, "rotary_pct", None)
        scaling = dict(getattr(config, "rope_scaling", None) or {}) or None
    if theta is None:
        raise ConfigError(f"target: {type(config).__name__} has no rotary positions; a DFlash drafter needs them")
    settings: dict[str, Any] = {"rope_theta": float(theta), "rope_scaling": scaling}
    if partial is not None and partial != 1.0:
        settings["partial_rotary_factor"] = float(partial)
    return settings


def rotary_frequencies(
    settings: dict[str, Any] | None, *, head_dim: int, hidden_size: int, num_heads: int, max_position_embeddings: int
) -> tuple[Tensor, float]:
    """Inverse frequencies ``[width / 2]`` (float32) and the factor on cosines and sines.

    Scaled kinds (linear, llama3, yarn, ...) come from transformers' own table. Kinds whose frequencies change with
    the length of the text (dynamic, longrope) keep those of a text within the original length.

    Raises:
        ConfigError: a kind that transformers does not know.
    """
    settings = settings or {"rope_theta": 10_000.0}
    scaling = settings.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    partial = settings.get("partial_rotary_factor", 1.0)
    if kind == "default":
        width = int(head_dim * partial)
        return 1.0 / settings["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width), 1.0

    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(f"rope_scaling: kind {kind!r} is not one of {', '.join(sorted(ROPE_INIT_FUNCTIONS))}")
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "rope_theta": settings["rope_theta"],
        "rope_scaling": {**scaling, "rope_type": kind},
    }
    if partial != 1.0:
        fields["partial_rotary_factor"] = partial
    config = Qwen3Config(**fields)
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), float(factor)


def rope_at(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Rope:
    """Cosines and sines at ``positions [R, T]``. Angles are float32, as in transformers; results at least that."""
    angles = positions[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    wide = torch.promote_types(dtype, torch.float32)
    return Rope((angles.cos() * factor).to(wide), (angles.sin() * factor).to(wide))


def rotate(states: Tensor, rope: Rope) -> Tensor:
    """Rotates ``[R, T, heads, D]``: pairs (j, j + width/2) of the first ``width`` places; the rest passes."""
    cos, sin = rope.cos[:, :, None], rope.sin[:, :, None]
    width = cos.shape[-1]
    turned = states[..., :width].to(cos.dtype)
    left, right = turned.chunk(2, dim=-1)
    turned = (turned * cos + torch.cat((-right, left), dim=-1) * sin).to(states.dtype)
    return turned if width == states.shape[-1] else torch.cat((turned, states[..., width:]), dim=-1)
