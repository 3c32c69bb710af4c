"""flex_attention alone: forward and backward under kernel options, at the sizes of benchmarks/step.py.

    python benchmarks/attention.py [--shapes qwen3-4b smollm2] [--only default warps4]

The trainer sets no kernel options: this says what one would gain. One line an option: milliseconds of forward, of
forward and backward, and the largest difference of the results from the default's. Needs CUDA; each option compiles for
about ten seconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from step import SHAPES, Shape

from dflash_lib import blocks


def backward(m1: int, n1: int, m2: int, n2: int, warps: int, stages: int) -> dict[str, Any]:
    sizes = {"bwd_BLOCK_M1": m1, "bwd_BLOCK_N1": n1, "bwd_BLOCK_M2": m2, "bwd_BLOCK_N2": n2}
    return {**sizes, "bwd_num_warps": warps, "bwd_num_stages": stages}


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "prescale": {"PRESCALE_QK": True},
    "fwd128x128w8s2": {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_warps": 8, "fwd_num_stages": 2},
    "fwd128x64w4s3": {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3},
    "bwd64x128w8s2": backward(64, 128, 128, 64, 8, 2),
    "bwd64x128w4s2": backward(64, 128, 128, 64, 4, 2),
    "bwd64x64w4s3": backward(64, 64, 64, 64, 4, 3),
    "bwd64x64w4s2": backward(64, 64, 64, 64, 4, 2),
    "bwd64x64w8s3": backward(64, 64, 64, 64, 8, 3),
    "bwd32x128w4s3": backward(32, 128, 128, 32, 4, 3),
    "bwd32x128w8s3": backward(32, 128, 128, 32, 8, 3),
    "bwd128x128w8s1": backward(128, 128, 128, 128, 8, 1),
    "bwd32x64w4s3": backward(32, 64, 64, 32, 4, 3),
}


def milliseconds(call: Any, times: int = 10) -> float:
    for _ in range(3):
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


def inputs(shape: Shape) -> tuple[Any, ...]:
    """Random queries, keys, values and a mask of random anchors."""
    generator = torch.Generator("cuda").manual_seed(0)
    slots = shape.anchors * shape.block_size
    response = torch.ones(shape.rows, shape.length, dtype=torch.bool)
    anchors, keep = blocks.draw_anchors(response, shape.anchors, seed=0, epoch=0, row_ids=range(shape.rows))
    mask = blocks.block_mask(anchors.cuda(), keep.cuda(), shape.length, shape.block_size)

    def random(heads: int, length: int) -> Tensor:
        size = (shape.rows, length, heads, shape.head_dim)
        made = torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)
        return made.transpose(1, 2).requires_grad_()

    keys = shape.length + slots
    return random(shape.heads, slots), random(shape.kv_heads, keys), random(shape.kv_heads, keys), mask


def timed(options: dict[str, Any], query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[list[Tensor], str]:
    """Results and gradients under these options, and what they took."""
    torch._dynamo.reset()

    def attend() -> Tensor:
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=True, kernel_options=options)

    compiled = torch.compile(attend, dynamic=False, fullgraph=True)

    def both() -> list[Tensor]:
        out = compiled()
        return [out, *torch.autograd.grad(out, (query, key, value), out)]

    results = both()
    total = milliseconds(both)
    with torch.no_grad():
        return results, f"{milliseconds(compiled):.3f} / {total:.3f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["qwen3-4b", "smollm2"], choices=SHAPES)
    parser.add_argument("--only", nargs="+", default=list(OPTIONS), choices=OPTIONS)
    args = parser.parse_args()
    for name in args.shapes:
        given = inputs(SHAPES[name])
        want: list[Tensor] = []
        for label in args.only:
            faulthandler.dump_traceback_later(60, exit=True)
            try:
                got, text = timed(OPTIONS[label], *given)
            except Exception as fault:  # an option that does not fit the card is a result
                text = f"{type(fault).__name__} {str(fault)[:80]!r}"
            else:
                want = want or got
                error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))
                text += f", differs {error:.0e}"
            print(f"  {name} {label}: {text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
