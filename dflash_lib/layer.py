"""One drafter layer as a pure function of tensors: what a thread compiles a clone of, once for all layers.

Queries come from the block slots; keys and values from the context and the block, with the same projections. The
context skips the input norm, the queries, the output projection and the MLP. No nn.Module is called here, so
nothing that patches ``nn.Module.__call__`` while another thread traces can be met. Shapes: see blocks.py; D is the
width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from dflash_lib.rope import Rope, rotate

Attention = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


class LayerWeights(NamedTuple):
    """The tensors of one layer, as :func:`layer_forward` takes them."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_norm: Tensor
    k_norm: Tensor
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    biases: tuple[Tensor, ...] | None  # of q, k, v, o


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


def sdpa_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention with a dense mask: ``[R, heads, Q, D]``, keys and values of kv heads, mask ``[R, 1, Q, T]``.

    A query that sees nothing gets zero, and so do its gradients: it attends to everything and is then dropped,
    because a softmax over nothing is NaN in some of SDPA's kernels.
    """
    seen = mask.any(dim=-1, keepdim=True)
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask | ~seen, enable_gqa=True)
    return torch.where(seen, out, 0.0)


def flex_attention_call(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """The same with a BlockMask. To be compiled on CUDA; on a CPU it runs forward only, slowly, for tests."""
    return flex_attention(query, key, value, block_mask=mask, enable_gqa=True)  # type: ignore[return-value]


def attention_for(mask: Tensor | BlockMask) -> Attention:
    """The attention that takes this kind of mask."""
    return flex_attention_call if isinstance(mask, BlockMask) else sdpa_attention


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, computed in at least float32."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(states.dtype)


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, its results made again in the backward pass instead of kept.

    For elementwise work and norms around the matrix products, whose inputs are kept anyway: half the memory of a
    layer's activations for a few reads. There is nothing random in them, so no generator is saved or set back.
    """
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def in_dtype(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 master in the dtype of the arithmetic; the copy does not live until the backward pass."""
    return weight if weight.dtype == dtype else recomputed(weight.to, dtype)


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map in the dtype of the states, whatever the parameters are stored in."""
    dtype = states.dtype
    return functional.linear(states, in_dtype(weight, dtype), None if bias is None else bias.to(dtype))


def _head_norm(states: Tensor, weight: Tensor, rope: Rope, shape: Shape) -> Tensor:
    """``[R, T, heads * D]`` -> normed and rotated ``[R, heads, T, D]``."""
    return rotate(rms_norm(states.unflatten(-1, (-1, shape.head_dim)), weight, shape.eps), rope).transpose(1, 2)


def queries(states: Tensor, weights: LayerWeights, rope: Rope, shape: Shape) -> Tensor:
    """Queries ``[R, heads, T, D]`` of normed block states ``[R, T, H]``."""
    query = linear(states, weights.q, weights.biases[0] if weights.biases else None)
    return recomputed(_head_norm, query, weights.q_norm, rope, shape)


def keys_values(states: Tensor, weights: LayerWeights, rope: Rope, shape: Shape) -> tuple[Tensor, Tensor]:
    """Keys (normed, rotated) and values ``[R, kv heads, T, D]`` of context or normed block states ``[R, T, H]``."""
    k_bias, v_bias = weights.biases[1:3] if weights.biases else (None, None)
    key = recomputed(_head_norm, linear(states, weights.k, k_bias), weights.k_norm, rope, shape)
    return key, linear(states, weights.v, v_bias).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def finish(states: Tensor, attended: Tensor, weights: LayerWeights, shape: Shape) -> Tensor:
    """What follows attention: output projection, residual, SwiGLU, residual."""
    bias = weights.biases[3] if weights.biases else None
    states = states + linear(attended.transpose(1, 2).flatten(2), weights.o, bias)
    normed = recomputed(rms_norm, states, weights.post_norm, shape.eps)
    inner = recomputed(_swiglu, linear(normed, weights.gate), linear(normed, weights.up))
    return states + linear(inner, weights.down)


def layer_forward(
    states: Tensor,
    context: Tensor,
    weights: LayerWeights,
    block_rope: Rope,
    context_rope: Rope,
    mask: Tensor | BlockMask,
    shape: Shape,
    attention: Attention,
) -> Tensor:
    """One layer: ``states [R, Q, H]`` and ``context [R, S, H]`` -> ``[R, Q, H]``. What a lane compiles on CUDA."""
    normed = recomputed(rms_norm, states, weights.input_norm, shape.eps)
    query = queries(normed, weights, block_rope, shape)
    context_key, context_value = keys_values(context, weights, context_rope, shape)
    block_key, block_value = keys_values(normed, weights, block_rope, shape)
    key = torch.cat((context_key, block_key), dim=2)
    value = torch.cat((context_value, block_value), dim=2)
    return finish(states, attention(query, key, value, mask), weights, shape)
