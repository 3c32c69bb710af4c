"""Decoding on a GPU: is it lossless, and is it bound by launches? One GPU, two to three minutes.

    python benchmarks/gpu_decode.py [--checkpoint RUN_OR_CHECKPOINT] [--out benchmarks/results/gpu_decode.json]

- lossless: float32, TF32 off: greedy speculative decoding under CUDA graphs against plain decoding, token by token with
  the tie rule, once with the drafter and once with drafts taken from the text itself and spoiled here and there (so
  that every acceptance length occurs, whatever the drafter is worth).
- speed: bfloat16, one prompt at a time: milliseconds of a plain step and of a cycle's draft and verification, eager and
  as CUDA graphs, tokens a second, and the speed-up; ``worth`` is the speed-up per token of acceptance length (plain
  step / cycle).

A few prompts of each come first, then all prompts in batches, then all one at a time while ``--seconds`` last. Every
stage prints a line and is in the results file before the next begins.

On a CPU (``--device cpu --prompts 2 --tokens 8``) the same code runs eagerly over the same static buffers.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_lib import checkpoint as checkpoints
from dflash_lib import decode, evaluate, prompts, target
from dflash_lib.atomic import write_json
from dflash_lib.config import RunConfig
from dflash_lib.drafter import Drafter, DrafterConfig


class SpoiledText:
    """Drafts read from known texts on the device, wrong at places that depend on the position: fit for a CUDA graph."""

    capturable = True

    def __init__(self, texts: Sequence[Sequence[int]], block_size: int, rows: int, device: torch.device) -> None:
        self.block_size = block_size
        longest = max(map(len, texts)) + 4 * block_size
        self._texts = torch.zeros(len(texts), longest, dtype=torch.long)
        for row, text in enumerate(texts):
            self._texts[row, : len(text)] = torch.tensor(text)
        self._now = torch.zeros(rows, longest, dtype=torch.long, device=device)
        self._slots = torch.arange(1, block_size, device=device)
        self._seen = torch.zeros((), dtype=torch.long, device=device)

    def begin(self, rows: Sequence[int], features: Tensor, positions: Tensor) -> None:
        chosen = [*rows, *[rows[-1]] * len(self._now)][: len(self._now)]
        self._now.copy_(self._texts[chosen])

    def draft(self, anchor: Tensor, position: Tensor, window: int) -> Tensor:
        places = (position[:, None] + self._slots).clamp_max(self._now.shape[1] - 1)
        drafts = self._now.gather(1, places)
        return torch.where((places * places + position[:, None]) % 11 == 3, (drafts - 1).abs(), drafts)

    def commit(self, features: Tensor, positions: Tensor) -> None:
        self._seen.add_(1)  # an empty graph would be warned about


def check_lossless(loaded: Any, drafter: Drafter, given: list[list[int]], tokens: int, batch: int) -> list[dict]:
    """Both kinds of drafts against plain decoding, ``batch`` prompts at a time."""
    options: dict[str, Any] = {"max_new_tokens": tokens, "static": True, "batch_size": batch}
    reference = decode.plain(loaded, given, **options)
    texts = [[*prompt, *one.tokens] for prompt, one in zip(given, reference, strict=True)]
    spoiled = SpoiledText(texts, drafter.config.block_size, batch, loaded.device)
    results = []
    for name, one in (("drafter", drafter), ("spoiled text", spoiled)):
        ours = decode.speculative(loaded, one, given, **options)
        found = decode.lossless(loaded, given, ours, reference)
        accepted = [count for row in ours for count in row.accepted]
        results.append(
            {
                "drafts": name,
                "batch": batch,
                "prompts": found.prompts,
                "tokens": sum(len(row.tokens) for row in ours),
                "same": found.same,
                "ties": found.ties,
                "wrong": found.wrong,
                "worst_gap": found.worst_gap,
                "lossless": found.verdict,
                "tau_pooled": 1 + sum(accepted) / len(accepted),
                "lengths_seen": len(set(accepted)),
            }
        )
    return results


def measure_speed(loaded: Any, drafter: Drafter, given: list[list[int]], tokens: int, graphs: bool) -> dict[str, Any]:
    """Plain and speculative decoding of the same prompts, one at a time."""
    options: dict[str, Any] = {"max_new_tokens": tokens, "graphs": graphs, "static": True}
    decode.plain(loaded, given[:1], **options)  # kernels are loaded and chosen outside the timing
    plain = decode.plain(loaded, given, **options)
    ours = decode.speculative(loaded, drafter, given, **options)
    cycles = sum(len(row.accepted) for row in ours)
    steps = sum(len(row.tokens) - 1 for row in plain)
    part = {name: 1000 * sum(row.seconds[name] for row in ours) / cycles for name in ("draft", "verify", "bookkeeping")}
    plain_ms = 1000 * sum(row.decode_seconds for row in plain) / steps
    fast, slow = evaluate.speed(ours), evaluate.speed(plain)
    return {
        "cuda_graphs": graphs,
        "prompts": len(given),
        "plain_step_ms": plain_ms,
        "draft_ms": part["draft"],
        "verify_ms": part["verify"],
        "bookkeeping_ms": part["bookkeeping"],
        "tau_pooled": 1 + sum(sum(row.accepted) for row in ours) / cycles,
        "plain_tokens_per_s": slow,
        "spec_tokens_per_s": fast,
        "speedup": fast / slow,
        "worth": plain_ms / sum(part.values()),
    }


def some_prompts(loaded: Any, count: int) -> list[list[int]]:
    """Held-out prompts first, then those of the training split."""
    from dflash_lib import conversations

    found = prompts.load(prompts.HELDOUT, loaded, count=count).prompts
    if len(found) < count:
        found += prompts.load(conversations.packaged_file("train"), loaded, count=count - len(found)).prompts
    return found


def drafter_for(loaded: Any, checkpoint: str | None, device: torch.device, dtype: torch.dtype) -> Drafter:
    if checkpoint is not None:
        drafter = checkpoints.load(checkpoint, device=device, target=loaded)
        config = {**drafter.config.__dict__, "dtype": dtype}
        copy = Drafter(DrafterConfig(**config))
        copy.load_state_dict(drafter.state_dict())
        return copy.to(device=device, dtype=dtype)
    precision = "float32" if dtype == torch.float32 else "bfloat16"
    return Drafter(DrafterConfig.from_target(loaded, RunConfig.from_dict({"precision": precision}))).to(device, dtype)


def say_lossless(found: list[dict[str, Any]]) -> str:
    return "; ".join(
        f"{one['drafts']}: {one['same']}/{one['prompts']} same, {one['ties']} ties (worst gap {one['worst_gap']:.1e}), "
        f"{one['wrong']} wrong, tau {one['tau_pooled']:.2f}, {one['lengths_seen']} acceptance lengths"
        for one in found
    )


def say_speed(one: dict[str, Any]) -> str:
    return (
        f"plain {one['plain_step_ms']:.2f} ms, draft {one['draft_ms']:.2f} + verify {one['verify_ms']:.2f} + rest "
        f"{one['bookkeeping_ms']:.2f} ms, tau {one['tau_pooled']:.2f}, {one['spec_tokens_per_s']:.0f} against "
        f"{one['plain_tokens_per_s']:.0f} tokens/s, speed-up {one['speedup']:.2f}, {one['worth']:.2f} x tau"
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a trained drafter; without one it is untrained (tau about 1)")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--few", type=int, default=4, help="prompts of the first stages")
    parser.add_argument("--batch", type=int, default=20, help="prompts at a time, where all are decoded in batches")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=240, help="for everything; stacks are dumped then")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_decode.json"))
    options = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(options.seconds, exit=True, file=sys.__stderr__)
    try:
        return run(options)
    finally:  # a process that only called this goes on
        faulthandler.cancel_dump_traceback_later()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Stage after stage, a line and a result in the file after each; returns what the file holds."""
    started = time.perf_counter()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "target": options.target,
        "checkpoint": options.checkpoint and Path(options.checkpoint).name,
        "tokens": options.tokens,
        "lossless_float32": [],
        "speed_bfloat16": [],
    }

    def passed() -> float:
        return time.perf_counter() - started

    def note(stage: str, text: str) -> None:
        result["seconds"] = round(passed(), 1)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, result)
        print(f"{passed():6.1f} s  {stage}: {text}", flush=True)

    def lossless(stage: str, prompts_: list[list[int]], batch: int) -> float:
        began = passed()
        found = check_lossless(exact, exact_drafter, prompts_, options.tokens, batch)
        result["lossless_float32"] += found
        note(stage, say_lossless(found))
        return (passed() - began) / len(prompts_)

    def speed(stage: str, prompts_: list[list[int]], graphs: bool) -> float:
        began = passed()
        found = measure_speed(served, drafter, prompts_, options.tokens, graphs)
        result["speed_bfloat16"].append(found)
        note(f"{stage}, {'CUDA graphs' if graphs else 'eager'}", say_speed(found))
        return (passed() - began) / len(prompts_)

    note("begins", f"target {options.target} on {result['device']}")
    loaded = target.load(options.target, dtype="float32", progress=False)
    given = some_prompts(loaded, options.prompts)
    exact = loaded.to(device)
    exact_drafter = drafter_for(exact, options.checkpoint, device, torch.float32)
    note("loaded", f"{len(given)} prompts, longest {max(map(len, given))} tokens")
    few = given[: options.few]
    each = lossless("a few, one at a time", few, 1)
    served = target.load(options.target, dtype="bfloat16", progress=False).to(device)
    drafter = drafter_for(served, options.checkpoint, device, torch.bfloat16)
    costs = {graphs: speed("speed of a few", few, graphs) for graphs in ((True, False) if on_gpu else (False,))}
    if len(given) > len(few):
        lossless(f"all, {options.batch} at a time", given, options.batch)
        for graphs, cost in costs.items():
            if passed() + 2 * cost * 10 < options.seconds:
                speed("speed of ten", given[:10], graphs)
        if passed() + 1.3 * each * len(given) < options.seconds:
            lossless("all, one at a time", given, 1)
    held = all(one["lossless"] for one in result["lossless_float32"])
    print(json.dumps({"lossless": held, "seconds": round(passed(), 1)}), flush=True)
    return result


if __name__ == "__main__":
    main()
