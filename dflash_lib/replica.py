"""Replica: what one thread owns, its drafter, float32 masters, optimizer state and compiled entry points.

Parameters lie in one flat buffer, gradients in another, so that a step is a handful of kernels however many layers
the drafter has: one sum over threads, one norm, one AdamW. Host time is what N threads share (the GIL), so it counts.

Memory: 16 bytes per parameter (master 4, gradient 4, AdamW's moments 8), in every thread, whatever the arithmetic's
dtype: the drafter casts its float32 masters as it uses them. docs/threads.md adds activations, target and data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import events
from .blocks import Blocks
from .config import RunConfig
from .drafter import Drafter
from .errors import UserError
from .head import Head
from .lanes import own_entry_point
from .layer import layer_forward, sdpa_attention
from .loss import LossResult, drafter_loss, loss_chunk

ALIGNMENT = 64  # float32 numbers: every parameter starts on a 256-byte border, as compiled kernels and GEMMs like it


@dataclass(frozen=True)
class Figures:
    """What one optimizer step measured, of this thread's rows; ``_all``: of every thread, node and accumulation."""

    loss: float
    loss_all: float
    weight: float
    weight_all: float
    grad_norm: float
    accuracy: list[float]  # [B-1], share of right tokens in each slot, over all threads


class Pending:
    """Figures on their way from the device: reading them later does not hold the device up."""

    def __init__(self, values: Tensor) -> None:
        self._event = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # a thread that waits leaves its core to the others
            self._event.record(torch.cuda.current_stream(values.device))
        else:
            self._values = values.clone()

    def read(self) -> Figures:
        """Waits until the device has come this far."""
        if self._event is not None:
            self._event.synchronize()
        own_loss, own_weight, norm, loss, weight, *counts = self._values.tolist()
        slots = len(counts) // 2
        return Figures(
            loss=own_loss / own_weight if own_weight > 0 else 0.0,
            loss_all=loss / weight if weight > 0 else 0.0,
            weight=own_weight,
            weight_all=weight,
            grad_norm=norm,
            accuracy=[
                right / seen if seen else 0.0 for right, seen in zip(counts[:slots], counts[slots:], strict=True)
            ],
        )


def learning_rate(config: RunConfig, step: int) -> float:
    """The rate of step ``step`` (from 0): linear warm-up, then cosine to zero or constant. A function, no state."""
    warm = round(config.warmup * config.steps)
    if step < warm:
        return config.lr * (step + 1) / warm
    if config.schedule == "constant":
        return config.lr
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, config.steps - warm)))


def entry_points(
    config: RunConfig, device: torch.device, name: str, watch: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    """What one thread compiles, each with a code object and a name of its own: layer and loss, or attention alone.

    On CUDA a layer is one graph with flex_attention in it. On a CPU it is scaled_dot_product_attention alone that is
    compiled: a whole layer takes Inductor's C++ compiler five times as long and runs no faster (docs/threads.md).

    Args:
        name: of the thread, and of no other thread or run of this process: compile state is kept under it.
        watch: of the run's CompileMonitor.
    """
    if not config.compile:
        return {}
    functions: dict[str, Callable[..., Any]] = {"layer": layer_forward, "chunk": loss_chunk}
    if device.type == "cpu":
        functions = {"attention": sdpa_attention}
    dynamic = False if config.bucket_lengths else None
    return {
        role: watch(torch.compile(own_entry_point(function, name), backend=config.backend, dynamic=dynamic))
        for role, function in functions.items()
    }


class Replica:
    """A drafter in training on one device, in one thread.

    Args:
        drafter: the draft model, its parameters float32 (float64 for proofs); it is moved to ``device`` and its
            parameters become views of this replica's flat buffer.
        config: the run's choices.
        device: where everything lives.
        layer, chunk, attention: this thread's own compiled forms of what the drafter and the loss are given under these
            names (see :func:`entry_points`); None: eager.
    """

    def __init__(
        self,
        drafter: Drafter,
        config: RunConfig,
        device: torch.device,
        layer: Callable[..., Any] | None = None,
        chunk: Callable[..., Any] | None = None,
        attention: Callable[..., Any] | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.step = 0
        self.layer, self.chunk, self.attention = layer, chunk, attention
        self.drafter = drafter.to(device)
        self._layout = _layout(self.drafter)
        length = self._layout.length
        dtype = next(self.drafter.parameters()).dtype
        self.masters = torch.zeros(length, dtype=dtype, device=device)
        # One buffer is summed over all threads: gradients, then loss, weight, and right and counted tokens by slot.
        self.sums = torch.zeros(length + 2 + 2 * (config.block_size - 1), dtype=dtype, device=device)
        self.gradients = self.sums[:length]
        self._tail = self.sums[length:]
        self._own = torch.zeros(2, dtype=dtype, device=device)
        for name, parameter in self.drafter.named_parameters():
            place = self._layout.view(self.masters, name)
            place.copy_(parameter.detach())
            parameter.data = place
            parameter.grad = self._layout.view(self.gradients, name)  # autograd adds to it in place
        self.optimizer = self._make_optimizer()

    def _make_optimizer(self) -> torch.optim.AdamW:
        """AdamW over two slices of the flat buffer: matrices decay, norms do not."""
        border, length = self._layout.matrices, self._layout.length
        groups = []
        for here, decay in ((slice(0, border), self.config.weight_decay), (slice(border, length), 0.0)):
            parameter = nn.Parameter(self.masters[here])
            parameter.grad = self.gradients[here]
            groups.append({"params": [parameter], "weight_decay": decay})
        beta1, beta2 = self.config.betas
        return torch.optim.AdamW(
            groups,
            lr=self.config.lr,
            betas=(beta1, beta2),
            fused=self.config.fused_optimizer,
            foreach=False,
        )

    # --- one step -------------------------------------------------------------------------------------------------
    def accumulate(
        self,
        features: Tensor,
        block_embeddings: Tensor,
        context_positions: Tensor,
        blocks: Blocks,
        mask: Any,
        head: Head,
        target_hidden: Tensor | None = None,
    ) -> LossResult:
        """Forward, loss and backward of one batch; adds its unnormalised sums to this replica's.

        Shapes are those of :class:`~dflash_lib.drafter.Drafter` and :func:`~dflash_lib.loss.drafter_loss`.
        """
        with events.planned(f"length {features.shape[1]}" if self.config.bucket_lengths else None):
            hidden = self.drafter(
                features,
                block_embeddings,
                context_positions,
                blocks.positions,
                mask,
                layer=self.layer,
                attention=self.attention,
            )
            result = drafter_loss(
                hidden,
                head,
                blocks.labels,
                blocks.weights,
                block_size=blocks.block_size,
                objective=self.config.objective,
                alpha=self.config.dpace_alpha,
                target_hidden=target_hidden,
                label_source=self.config.label_source,
                chunk=self.chunk,
            )
            result.loss_sum.backward()
        with torch.no_grad():
            measured = torch.stack([result.loss_sum.detach(), result.weight_sum]).to(self._own.dtype)
            self._own += measured
            self._tail += torch.cat([measured, result.correct.to(measured), result.counted.to(measured)])
        return result

    @torch.no_grad()
    def update(self) -> Pending:
        """Normalises the summed gradients by the summed weight, clips, takes one AdamW step; nothing waits.

        A total weight of zero gives gradient zero, never NaN.
        """
        loss, weight = self._tail[0], self._tail[1]
        inverse = torch.where(weight > 0, 1.0 / weight.clamp_min(torch.finfo(weight.dtype).tiny), 0.0)
        norm = torch.linalg.vector_norm(self.gradients) * inverse
        self.gradients.mul_(inverse * (self.config.clip / (norm + 1e-6)).clamp_max(1.0))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step)
        self.optimizer.step()
        self.step += 1
        pending = Pending(torch.cat([self._own, norm.unsqueeze(0), loss.unsqueeze(0), self._tail[1:]]))
        self.sums.zero_()
        self._own.zero_()
        return pending

    @property
    def lr(self) -> float:
        """The rate that the last step used."""
        return float(self.optimizer.param_groups[0]["lr"])

    # --- state ----------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def fingerprint(self) -> int:
        """A number that differs when any bit of any master differs: integers only, so order never matters."""
        words = self.masters.view(torch.int32)
        width = 4096
        body = words[: words.numel() // width * width].view(-1, width).sum(0, dtype=torch.int64)
        rest = torch.nn.functional.pad(words[words.numel() // width * width :].long(), (0, width))[:width]
        places = torch.arange(1, 2 * width, 2, device=self.device)
        return int(((body + rest) * places).sum())

    def state(self) -> dict[str, Any]:
        """Masters and AdamW's moments by parameter name: no trace of threads, devices or layout."""
        moments: dict[str, Any] = {"step": self.step, "masters": self._by_name(self.masters)}
        for moment in ("exp_avg", "exp_avg_sq"):
            parts = [self.optimizer.state[group["params"][0]].get(moment) for group in self.optimizer.param_groups]
            if parts[0] is not None:
                moments[moment] = self._by_name(torch.cat(parts))
        return moments

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`, on any device and any number of threads.

        Raises:
            UserError: a parameter is missing or has another shape; the line names it.
        """
        self._fill(self.masters, state["masters"])
        self.step = int(state["step"])
        border = self._layout.matrices
        moments = {}
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment in state:
                moments[moment] = torch.zeros_like(self.masters)
                self._fill(moments[moment], state[moment])
        for group, here in zip(self.optimizer.param_groups, (slice(0, border), slice(border, None)), strict=True):
            counter = torch.tensor(float(self.step), device=self.device if self.config.fused_optimizer else "cpu")
            self.optimizer.state[group["params"][0]] = {
                "step": counter,
                **{moment: flat[here].clone() for moment, flat in moments.items()},
            }

    def _by_name(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: self._layout.view(flat, name) for name in self._layout.places}

    def _fill(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        for name, (_, shape) in self._layout.places.items():
            if name not in tensors or tensors[name].shape != shape:
                found = tuple(tensors[name].shape) if name in tensors else "nothing"
                raise UserError(f"{name}: the checkpoint holds {found}, the drafter needs {tuple(shape)}")
            self._layout.view(flat, name).copy_(tensors[name])


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in a flat buffer: matrices first, then vectors (norms and biases)."""

    places: dict[str, tuple[int, torch.Size]]
    matrices: int
    length: int

    def view(self, flat: Tensor, name: str) -> Tensor:
        start, shape = self.places[name]
        return flat[start : start + shape.numel()].view(shape)


def _layout(module: nn.Module) -> Layout:
    places: dict[str, tuple[int, torch.Size]] = {}
    end = matrices = 0
    named = list(module.named_parameters())
    for name, parameter in sorted(named, key=lambda pair: pair[1].dim() < 2):
        places[name] = (end, parameter.shape)
        end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        if parameter.dim() >= 2:
            matrices = end
    return Layout(places, matrices, end)
