"""One training step on one device: forward, loss, backward and fused AdamW, with random features.

    python benchmarks/step.py                       # both shapes, each in a process of its own, cold compile caches
    python benchmarks/step.py --check --profile     # then compare with float64 references; also list kernels
    python benchmarks/step.py --variants default graph no-attention no-loss   # where the time goes: docs/step.md
    python benchmarks/step.py --shapes tiny --device cpu

10 warm-up and 20 timed steps. Every step draws its anchors, makes its blocks and its mask: what a trainer does,
except for the target's forward and gradient clipping. ``step_ms`` is the mean of the 20, launched one behind the
other; ``host_ms`` is how long the host was busy launching, by part. The last lines are one JSON object a measurement:
``shape, variant, step_ms, peak_gib, first_step_s, percent_of_790`` (model FLOPs against 790 TFLOP/s, what one H200
reaches in large bfloat16 products; the formula is :func:`step_flops`). ``first_step_s`` of a shape's first variant is
that of cold caches; the others find what it compiled. Each measurement is in the results file before the next begins.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dflash_lib import blocks, drafter, layer, loss
from dflash_lib.config import RunConfig
from dflash_lib.head import Head
from dflash_lib.replica import Replica

WARM_UP, TIMED = 10, 20


@dataclass(frozen=True)
class Shape:
    """Sizes of a target, of its drafter, and of one step's rows."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    layers: int
    rows: int
    length: int
    anchors: int
    block_size: int = 16
    features: int = 5


SHAPES = {
    "qwen3-4b": Shape(2560, 32, 8, 128, 9728, 151_936, 5, rows=1, length=3072, anchors=512),
    "smollm2": Shape(576, 9, 3, 64, 1536, 49_152, 5, rows=8, length=1024, anchors=128),
    "tiny": Shape(64, 4, 2, 16, 128, 256, 2, rows=2, length=128, anchors=8, block_size=8, features=2),
}


@dataclass(frozen=True)
class Variant:
    """A way to run the same step."""

    compile: str = "layer"  # "layer": a whole layer and the loss; "attention": attention and the loss; "none"
    chunk_blocks: int | None = None
    trainer: bool = False  # through replica.Replica: one flat buffer, clipping, figures, as the trainer does it
    graph: bool = False  # blocks, forward, loss, backward and AdamW captured once as one CUDA graph, then replayed
    recompute: bool = True  # False: keep what layer.recomputed would make again in the backward pass
    masters: bool = True  # False: parameters, gradients and moments in the dtype of the arithmetic
    without: str = ""  # "attention", "loss", "optimizer" or "blocks": what is left out; the difference is what it costs


VARIANTS = {
    "default": Variant(),
    "trainer": Variant(trainer=True),
    "graph": Variant(graph=True),
    "keep": Variant(recompute=False),
    "attention": Variant(compile="attention"),
    "eager": Variant(compile="none"),
    "bfloat16": Variant(masters=False),
    "no-attention": Variant(without="attention"),
    "no-loss": Variant(without="loss"),
    "no-optimizer": Variant(without="optimizer"),
    "no-blocks": Variant(without="blocks"),
    "chunk64": Variant(chunk_blocks=64),
    "chunk256": Variant(chunk_blocks=256),
}


def no_attention(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """As little as reads all three and gives each a gradient."""
    shared = (key.mean(dim=2, keepdim=True) + value.mean(dim=2, keepdim=True)).repeat_interleave(
        query.shape[1] // key.shape[1], dim=1
    )
    return query + shared


class Step:
    """Everything one step needs; call it to take a step."""

    def __init__(self, shape: Shape, variant: Variant, device: str, backend: str = "inductor") -> None:
        self.shape, self.device = shape, device
        self.on_gpu = device.startswith("cuda")
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        generator = torch.Generator(device).manual_seed(0)
        random = functools.partial(torch.randn, generator=generator, device=device, dtype=dtype)
        self.drafter = drafter.Drafter(config_of(shape, dtype), device=device)
        if not variant.masters:
            self.drafter.to(dtype)
        self.head = Head(random(shape.vocabulary, shape.hidden) * 0.02)
        self.features = random(shape.rows, shape.length, shape.features * shape.hidden)
        self.ids = torch.randint(
            0, shape.vocabulary, (shape.rows, shape.length), generator=torch.Generator().manual_seed(0)
        )
        self.response = torch.ones_like(self.ids, dtype=torch.bool)
        self.ids_there, self.response_there = self.ids.to(device), self.response.to(device)
        self.positions = blocks.context_positions(None, shape.length, shape.rows, device)
        self.variant = variant
        self.graph: torch.cuda.CUDAGraph | None = None
        self.count = 0
        self.fixed: tuple[Any, Any] | None = None  # blocks and mask, where they are not made again
        self.host: dict[str, float] = {}  # seconds spent launching, by part
        compiled = functools.partial(torch.compile, backend=backend, dynamic=False, fullgraph=True)
        attention = layer.flex_attention_call if self.on_gpu else layer.sdpa_attention
        if variant.without == "attention":
            attention = no_attention
        self.attention: layer.Attention = compiled(attention) if variant.compile == "attention" else attention
        self.layer: Callable[..., Tensor] | None = compiled(layer.layer_forward) if variant.compile == "layer" else None
        self.chunk: Callable[..., Any] | None = None if variant.compile == "none" else compiled(loss.loss_chunk)
        if variant.trainer:
            self.replica = Replica(
                self.drafter, RunConfig(block_size=shape.block_size), torch.device(device), self.layer, self.chunk
            )
        else:
            self.replica = None
            self.optimizer = torch.optim.AdamW(
                self.drafter.parameters(), lr=6e-4, fused=True, capturable=variant.graph and self.on_gpu
            )

    def __call__(self) -> Tensor:
        shape = self.shape
        self.count += 1
        self.began = time.perf_counter()
        anchors, keep = blocks.draw_anchors(
            self.response, shape.anchors, seed=0, epoch=self.count, row_ids=range(shape.rows)
        )
        if self.variant.graph and self.on_gpu and self.count > 3:
            return self._replay(anchors, keep)
        return self._run(anchors, keep)

    def _replay(self, anchors: Tensor, keep: Tensor) -> Tensor:
        """A step as one launch: only the anchors change, in place."""
        if self.graph is None:
            self.anchors, self.keep = anchors.to(self.device), keep.to(self.device)
            self.graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.value = self._run(self.anchors, self.keep)
        self.anchors.copy_(anchors, non_blocking=True)
        self.keep.copy_(keep, non_blocking=True)
        self.graph.replay()
        self._launched("replay")
        return self.value

    def _run(self, anchors: Tensor, keep: Tensor) -> Tensor:
        batch, mask = self.fixed or self._blocks(anchors, keep)
        if self.variant.without == "blocks":
            self.fixed = batch, mask
        embeddings = torch.nn.functional.embedding(batch.inputs, self.head.weight)
        self._launched("blocks")
        if self.replica is not None:
            result = self.replica.accumulate(self.features, embeddings, self.positions, batch, mask, self.head)
            self._launched("forward, loss, backward")
            self.replica.update()
            self._launched("optimizer")
            return result.mean().detach()
        hidden = self.drafter(
            self.features,
            embeddings,
            self.positions,
            batch.positions,
            mask,
            attention=self.attention,
            layer=self.layer,
        )
        self._launched("forward")
        value = self._loss(hidden, batch)
        self._launched("loss")
        value.backward()
        self._launched("backward")
        if self.variant.without != "optimizer":
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._launched("optimizer")
        return value.detach()

    def _blocks(self, anchors: Tensor, keep: Tensor) -> tuple[blocks.Blocks, Any]:
        shape = self.shape
        batch = blocks.make_blocks(
            self.ids_there,
            self.response_there,
            anchors,
            keep,
            block_size=shape.block_size,
            gamma=7.0,
            mask_token_id=shape.vocabulary - 1,
        )
        make_mask = blocks.block_mask if self.on_gpu else blocks.visible_dense
        return batch, make_mask(batch.anchors, batch.keep, shape.length, shape.block_size)

    def _loss(self, hidden: Tensor, batch: blocks.Blocks) -> Tensor:
        if self.variant.without == "loss":
            return hidden.float().square().mean()
        return loss.drafter_loss(
            hidden,
            self.head,
            batch.labels,
            batch.weights,
            block_size=self.shape.block_size,
            chunk_blocks=self.variant.chunk_blocks,
            chunk=self.chunk,
        ).mean()

    def _launched(self, part: str) -> None:
        now = time.perf_counter()
        self.host[part] = self.host.get(part, 0.0) + now - self.began
        self.began = now


def config_of(shape: Shape, dtype: torch.dtype) -> drafter.DrafterConfig:
    return drafter.DrafterConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        target_layer_ids=tuple(range(shape.features)),
        num_target_layers=shape.features + 1,
        target_hidden_size=shape.hidden,
        mask_token_id=shape.vocabulary - 1,
        block_size=shape.block_size,
        rope={"rope_theta": 1e6},
        dtype=dtype,
    )


def step_flops(shape: Shape) -> float:
    """Model FLOPs of a step: two for a multiply-add, backward twice the forward where both gradients are needed.

    Layers: forward, both gradients. Fusion: forward and the weight's gradient. Head: forward and the input's
    gradient, on B-1 of B slots. Attention: visible pairs only (random anchors see half the context on average).
    """
    slots = shape.rows * shape.anchors * shape.block_size
    keys = slots + shape.rows * shape.length
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    per_slot = 2 * shape.hidden * wide + 3 * shape.hidden * shape.intermediate
    linear = 2 * (slots * per_slot + keys * 2 * shape.hidden * narrow)
    attention = 4 * wide * slots * (shape.length / 2 + shape.block_size)
    fusion = 2 * 2 * shape.rows * shape.length * shape.features * shape.hidden**2
    head = 2 * 2 * slots * (shape.block_size - 1) / shape.block_size * shape.hidden * shape.vocabulary
    return 3 * shape.layers * (linear + attention) + fusion + head


def measure(name: str, variant: str, device: str, profile: bool, backend: str) -> dict[str, Any]:
    """Times one shape in this process."""
    on_gpu = device.startswith("cuda")
    synchronize = torch.cuda.synchronize if on_gpu else (lambda: None)
    started = time.perf_counter()
    if not VARIANTS[variant].recompute:
        layer.recomputed = lambda function, *arguments: function(*arguments)
    step = Step(SHAPES[name], VARIANTS[variant], device, backend)
    first = float(step())
    synchronize()
    first_step = time.perf_counter() - started
    print(f"  {name} {variant}: first step after {first_step:.1f} s", flush=True)
    for _ in range(WARM_UP - 1):
        step()
    synchronize()
    step.host.clear()
    began = time.perf_counter()
    for _ in range(TIMED):
        last = step()
    synchronize()
    seconds = (time.perf_counter() - began) / TIMED
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    if profile and on_gpu:
        print_kernels(step)
    return {
        "shape": name,
        "variant": variant,
        "step_ms": round(seconds * 1e3, 2),
        "host_ms": {part: round(spent / TIMED * 1e3, 1) for part, spent in step.host.items()},
        "peak_gib": None if peak is None else round(peak, 2),
        "first_step_s": round(first_step, 1),
        "percent_of_790": round(100 * step_flops(SHAPES[name]) / seconds / 790e12, 1),
        "losses": [round(first, 3), round(float(last), 3)],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }


def print_kernels(step: Step, steps: int = 3, most: int = 22) -> None:
    """The kernels that take most device time, in milliseconds a step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for event in trace.events():
        if str(event.device_type).endswith("CUDA") and not event.name.startswith("Optimizer."):
            spent.setdefault(event.name, []).append(event.device_time / 1e3 / steps)
    total = sum(map(sum, spent.values()))
    print(f"  kernels: {total:.1f} ms a step, {sum(map(len, spent.values())) // steps} launches")
    for name, parts in sorted(spent.items(), key=lambda item: -sum(item[1]))[:most]:
        print(f"  {sum(parts):7.2f} ms {len(parts) // steps:4d}x {name[:96]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["qwen3-4b", "smollm2"], choices=SHAPES)
    parser.add_argument("--variants", nargs="+", default=["default"], choices=VARIANTS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--check", action="store_true", help="compare with float64 references too")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step")
    parser.add_argument("--timeout", type=float, default=150, help="seconds one measurement may take")
    parser.add_argument("--seconds", type=float, default=560, help="for everything")
    parser.add_argument("--out", type=Path, help="results JSON")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # measure in this process
    args = parser.parse_args()
    if args.here:
        faulthandler.dump_traceback_later(args.timeout, exit=True)
        result = measure(args.shapes[0], args.variants[0], args.device, args.profile, args.backend)
        print("RESULT " + json.dumps(result), flush=True)
        return 0

    end = time.monotonic() + args.seconds
    common = ["--device", args.device, "--backend", args.backend]
    results: list[dict[str, Any]] = []
    failed = []
    with tempfile.TemporaryDirectory() as cold:

        def run(name: str, command: list[str]) -> None:
            """A process of its own: passes its lines on, keeps its result, ends it when its time is up."""
            seconds = min(args.timeout, end - time.monotonic())
            print(f"{name}: at most {seconds:.0f} s", flush=True)
            if seconds < 10:
                return failed.append(name)
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cold, "TRITON_CACHE_DIR": f"{cold}/triton"}
            command = [
                sys.executable,
                "-u",
                *command,
                "--timeout",
                str(seconds),
            ]  # it ends itself then, with its stacks
            with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
                for line in process.stdout or ():
                    if line.startswith("RESULT "):
                        results.append(json.loads(line.removeprefix("RESULT ")))
                        if args.out:
                            args.out.write_text(json.dumps(results, indent=2) + "\n")
                    else:
                        print(line, end="", flush=True)
            return failed.append(name) if process.returncode else None

        for variant in args.variants:
            for shape in args.shapes:
                one = ["--here", "--shapes", shape, "--variants", variant, *common, *["--profile"] * args.profile]
                run(f"{shape} {variant}", [__file__, *one])
        if args.check:
            run("check", [str(Path(__file__).with_name("step_check.py")), *common])
    for result in results:
        print(json.dumps(result))
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
