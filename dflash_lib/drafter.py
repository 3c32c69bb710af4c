"""The drafter: a few Qwen3-style layers whose queries are block slots and whose keys are target features and the block.

The context ``C = RMSNorm(fc(features))`` is made once a row and shared by all layers; each layer only makes keys
and values of it (no input norm, no queries, no MLP for the context). Parameters are float32 masters; arithmetic
happens in the config's dtype. What a layer computes is in layer.py. Shapes: see blocks.py; D is a head's width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from dflash_lib.config import ConfigError, RunConfig
from dflash_lib.layer import (
    Attention,
    LayerWeights,
    Shape,
    attention_for,
    finish,
    keys_values,
    layer_forward,
    linear,
    queries,
    rms_norm,
    sdpa_attention,
)
from dflash_lib.rope import Rope, rope_at, rotary_frequencies, settings_of


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and settings of a drafter. ``rope`` holds ``rope_theta`` and, where the target has them, ``rope_scaling``
    and ``partial_rotary_factor``; ``target_layer_ids`` are 0-based: id l is the output of decoder layer l.

    Raises:
        ConfigError: sizes that do not fit together, or ids that do not exist in the target.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    target_hidden_size: int
    mask_token_id: int
    block_size: int = 16
    rms_norm_eps: float = 1e-6
    rope: dict[str, Any] | None = None
    max_position_embeddings: int = 32768
    sliding_window: int | None = None
    attention_bias: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_kv_heads: {self.num_kv_heads} does not divide the {self.num_heads} query heads")
        if not self.target_layer_ids:
            raise ConfigError("target_layer_ids: is empty; name at least one target layer")
        for layer in self.target_layer_ids:
            if not 0 <= layer < self.num_target_layers:
                raise ConfigError(
                    f"target_layer_ids: {layer} is outside the target's layers 0..{self.num_target_layers - 1}"
                )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"mask_token_id: {self.mask_token_id} is outside the embedding; use 0..{self.vocab_size - 1}"
            )

    @classmethod
    def from_target(cls, target: Any, config: RunConfig, device: torch.device | None = None) -> DrafterConfig:
        """A drafter of the target's sizes and RoPE settings, with the run's layers, block size and window.

        ``device``: where it will be trained, which decides the arithmetic of ``precision="auto"``; None: the target's.
        """
        model = target.config.get_text_config() if hasattr(target.config, "get_text_config") else target.config
        heads = model.num_attention_heads
        device = device or torch.device(target.device)
        precision = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(
            config.precision, torch.bfloat16 if device.type == "cuda" else torch.float32
        )
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=model.intermediate_size,
            num_layers=config.drafter_layers,
            num_heads=heads,
            num_kv_heads=getattr(model, "num_key_value_heads", None) or heads,
            head_dim=getattr(model, "head_dim", None) or model.hidden_size // heads,
            vocab_size=model.vocab_size,
            target_layer_ids=tuple(target.layer_ids),
            num_target_layers=model.num_hidden_layers,
            target_hidden_size=target.hidden_size,
            mask_token_id=target.mask_token_id,
            block_size=config.block_size,
            rms_norm_eps=float(getattr(model, "rms_norm_eps", getattr(model, "layer_norm_eps", 1e-6))),
            rope=settings_of(model),
            max_position_embeddings=model.max_position_embeddings,
            sliding_window=config.sliding_window,
            dtype=precision,
        )


class _Norm(nn.Module):
    def __init__(self, size: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, **factory))


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig, **factory: Any) -> None:
        super().__init__()
        wide, narrow = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, wide, config.attention_bias, **factory)
        self.k_proj = nn.Linear(config.hidden_size, narrow, config.attention_bias, **factory)
        self.v_proj = nn.Linear(config.hidden_size, narrow, config.attention_bias, **factory)
        self.o_proj = nn.Linear(wide, config.hidden_size, config.attention_bias, **factory)
        self.q_norm = _Norm(config.head_dim, **factory)
        self.k_norm = _Norm(config.head_dim, **factory)


class _Mlp(nn.Module):
    def __init__(self, config: DrafterConfig, **factory: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, False, **factory)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, False, **factory)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, False, **factory)


class _Layer(nn.Module):
    """Holds the parameters of a layer under their checkpoint names; :func:`layer_forward` computes."""

    def __init__(self, config: DrafterConfig, **factory: Any) -> None:
        super().__init__()
        self.input_layernorm = _Norm(config.hidden_size, **factory)
        self.self_attn = _Attention(config, **factory)
        self.post_attention_layernorm = _Norm(config.hidden_size, **factory)
        self.mlp = _Mlp(config, **factory)

    def weights(self) -> LayerWeights:
        attn, mlp = self.self_attn, self.mlp
        projections = (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj)
        biased = attn.q_proj.bias is not None
        return LayerWeights(
            input_norm=self.input_layernorm.weight,
            q=attn.q_proj.weight,
            k=attn.k_proj.weight,
            v=attn.v_proj.weight,
            o=attn.o_proj.weight,
            q_norm=attn.q_norm.weight,
            k_norm=attn.k_norm.weight,
            post_norm=self.post_attention_layernorm.weight,
            gate=mlp.gate_proj.weight,
            up=mlp.up_proj.weight,
            down=mlp.down_proj.weight,
            biases=tuple(projection.bias for projection in projections) if biased else None,
        )


# Norms of a layer that read the block's states; others read the context, or single heads.
_NORMS_OF_STATES = ("input_layernorm.weight", "post_attention_layernorm.weight")
LOUD = 0.5  # of a channel of the mask embedding, over the root mean square of all


def quiet_norm(mask_embedding: Tensor) -> Tensor:
    """First weights ``[H]`` of a norm over states that begin as the mask token's embedding; their mean square is 1.

    Equal where the embedding is quiet, and so much smaller where it is loud that no channel enters louder than others.
    A trained embedding has a few channels that are loud in every token. With all weights at one, a fresh drafter says
    the same few tokens in every slot, at a loss of 64 on SmolLM2 (ln V is 10.8), and its layers can hardly tell tokens
    apart. One small weight for all channels cures the first loss, but leaves logits too small to learn with.
    """
    size = mask_embedding.square().mean().sqrt()
    loudness = mask_embedding.abs() / size.clamp_min(torch.finfo(size.dtype).tiny)
    weights = (LOUD / loudness).clamp(max=1.0)
    return weights / weights.square().mean().sqrt()


class Drafter(nn.Module):
    """The draft model; its parameters are exactly a checkpoint's tensors (11 L + 3, no embedding, no head)."""

    def __init__(
        self,
        config: DrafterConfig,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        mask_embedding: Tensor | None = None,
    ) -> None:
        """Random first weights from a generator of its own: the same ``seed`` and kind of device, the same weights.

        Args:
            mask_embedding: ``[H]``, what the target embeds the mask token as. Every slot's states begin as (nearly)
                this one vector, so the norms start small in its loud channels: see :func:`quiet_norm`. None: at one.
        """
        super().__init__()
        self.config = config
        # Made without memory, then filled: torch's own initialisers would draw from the process-wide generator.
        factory: dict[str, Any] = {"device": "meta", "dtype": torch.promote_types(config.dtype, torch.float32)}
        fused = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(fused, config.hidden_size, bias=False, **factory)
        self.hidden_norm = _Norm(config.hidden_size, **factory)
        self.layers = nn.ModuleList([_Layer(config, **factory) for _ in range(config.num_layers)])
        self.norm = _Norm(config.hidden_size, **factory)
        self.to_empty(device=device or "cpu")
        self._first_weights(seed, mask_embedding)
        frequencies, self.rope_factor = rotary_frequencies(
            config.rope,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            max_position_embeddings=config.max_position_embeddings,
        )
        # Not a buffer: `drafter.to(torch.bfloat16)` must not round the frequencies.
        self.frequencies = frequencies
        self.shape = Shape(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)

    @torch.no_grad()
    def _first_weights(self, seed: int, mask_embedding: Tensor | None) -> None:
        generator = torch.Generator(self.fc.weight.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
                if mask_embedding is not None and (name == "norm.weight" or name.endswith(_NORMS_OF_STATES)):
                    parameter.copy_(quiet_norm(mask_embedding))
            else:
                parameter.normal_(0.0, 0.02, generator=generator)

    def _rope(self, positions: Tensor) -> Rope:
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        return rope_at(positions, self.frequencies, self.rope_factor, self.config.dtype)

    def context(self, features: Tensor) -> Tensor:
        """``features [R, S, K * H]`` of the target -> the context ``C [R, S, H]`` that all layers share."""
        fused = linear(features.to(self.config.dtype), self.fc.weight)
        return rms_norm(fused, self.hidden_norm.weight, self.config.rms_norm_eps)

    def forward(
        self,
        features: Tensor,
        block_embeddings: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        mask: Tensor | BlockMask,
        *,
        attention: Attention | None = None,
        layer: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Hidden states of all block slots, after the final norm, for the target's head.

        Args:
            features: ``[R, S, K * H]`` outputs of the K target layers.
            block_embeddings: ``[R, Q, H]`` the target's embedding of ``Blocks.inputs``.
            context_positions: ``[R, S]``. block_positions: ``[R, Q]``.
            mask: of ``blocks.visible_dense`` or ``blocks.block_mask``.
            attention: instead of the one for this kind of mask: a lane's own compiled form of it.
            layer: instead of :func:`layer_forward`: a lane's own compiled form of it.

        Returns:
            ``[R, Q, H]`` in the config's dtype.
        """
        run = layer or layer_forward
        attend = attention or attention_for(mask)
        context = self.context(features)
        context_rope, block_rope = self._rope(context_positions), self._rope(block_positions)
        states = block_embeddings.to(self.config.dtype)
        if torch.is_grad_enabled() and not states.requires_grad:
            # So that the first layer looks like the others: without it, it would be a second graph in every bucket.
            states = states.detach().requires_grad_()
        for weights in self._layer_weights():
            states = run(states, context, weights, block_rope, context_rope, mask, self.shape, attend)
        return rms_norm(states, self.norm.weight, self.config.rms_norm_eps)

    def _layer_weights(self) -> Iterator[LayerWeights]:
        for layer in self.layers:
            yield layer.weights()  # type: ignore[operator]

    # --- drafting: the context's keys and values are kept ---------------------------------------------------------
    def new_cache(self, rows: int, capacity: int) -> DrafterCache:
        """An empty cache for ``rows`` texts of up to ``capacity`` tokens."""
        config, device = self.config, self.fc.weight.device
        size = (config.num_layers, rows, config.num_kv_heads, capacity, config.head_dim)
        keys = torch.zeros(size, dtype=config.dtype, device=device)
        return DrafterCache(keys=keys, values=torch.zeros_like(keys))

    def append_context(self, cache: DrafterCache, features: Tensor, positions: Tensor) -> None:
        """Adds the features ``[R, T, K * H]`` of committed tokens at ``positions [R, T]``.

        Rows may differ in length: what is written at or after a row's anchor is never seen, and is overwritten
        when the row gets there.
        """
        context, rope = self.context(features), self._rope(positions)
        place = positions[:, None, :, None]
        for index, weights in enumerate(self._layer_weights()):
            key, value = keys_values(context, weights, rope, self.shape)
            at = place.expand_as(key)
            cache.keys[index].scatter_(2, at, key)
            cache.values[index].scatter_(2, at, value)
        cache.length = min(cache.capacity, cache.length + features.shape[1])

    def draft(self, cache: DrafterCache, block_embeddings: Tensor, positions: Tensor) -> Tensor:
        """One block a row: embeddings ``[R, B, H]`` at ``positions [R, B]`` (anchor first) -> hidden ``[R, B, H]``.

        The rule of blocks.py for one block: context before the anchor (``window`` tokens at most), and itself.
        """
        anchor = positions[:, :1]
        place = torch.arange(cache.length, device=positions.device)
        seen = place < anchor
        if self.config.sliding_window is not None:
            seen &= place >= anchor - self.config.sliding_window
        rows, slots = positions.shape
        own = seen.new_ones(rows, slots)
        mask = torch.cat((seen, own), dim=1)[:, None, None].expand(-1, 1, slots, -1)
        rope = self._rope(positions)
        states = block_embeddings.to(self.config.dtype)
        for index, weights in enumerate(self._layer_weights()):
            normed = rms_norm(states, weights.input_norm, self.shape.eps)
            query = queries(normed, weights, rope, self.shape)
            block_key, block_value = keys_values(normed, weights, rope, self.shape)
            key = torch.cat((cache.keys[index, :, :, : cache.length], block_key), dim=2)
            value = torch.cat((cache.values[index, :, :, : cache.length], block_value), dim=2)
            states = finish(states, sdpa_attention(query, key, value, mask), weights, self.shape)
        return rms_norm(states, self.norm.weight, self.config.rms_norm_eps)


@dataclass(eq=False)
class DrafterCache:
    """Keys and values of committed context, ``[layers, R, kv heads, capacity, D]``, written in place.

    ``length`` bounds the places in use: drafting looks at no more than these. Setting it to ``capacity`` makes every
    draft the same shape, which a captured CUDA graph needs; what a row sees is decided by its anchor alone.
    """

    keys: Tensor
    values: Tensor
    length: int = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def crop(self, length: int) -> None:
        """Forgets all places from ``length`` on."""
        self.length = min(self.length, length)
