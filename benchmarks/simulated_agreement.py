"""How well the cheap estimate of acceptance agrees with real decoding, over the checkpoints of a run.

    python benchmarks/simulated_agreement.py RUN ... [--prompts FILE] [--count 8] [--tokens 48] [--device cpu]

Of a run all checkpoints. Prompts are decoded greedily with the drafter; the drafter then walks (a) the very texts that
came out, where simulated and real must agree up to cycles cut by the length limit and float32 ties, and (b), with the
packaged held-out prompts, the answers that are written there. A line of JSON a checkpoint; of several, a table too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_lib import checkpoint, data, decode, evaluate
from dflash_lib.acceptance import Prepared, Settings, prepare


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--prompts", default="heldout")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    folders = [step for given in options.checkpoints for step in checkpoint.all_steps(given) or [given]]
    found: list[dict[str, Any]] = []
    target = None
    for folder in folders:
        settings = {"checkpoint": str(folder), "prompts": [options.prompts], "count": options.count}
        ready = prepare(Settings.from_dict({**settings, "device": options.device}), target)
        target = ready.target
        found.append(compare(ready, options.tokens, heldout=options.prompts == "heldout"))
        print(json.dumps(found[-1]), flush=True)
    if len(found) > 1:
        print(table(found))
    return found


def compare(ready: Prepared, tokens: int, *, heldout: bool) -> dict[str, Any]:
    """Real acceptance of one checkpoint, and simulated on the texts it wrote and on those that are there."""
    given = ready.sets[0].prompts
    real = decode.speculative(
        ready.target,
        ready.drafter,
        given,
        max_new_tokens=tokens,
        stop_ids=ready.target.stop_ids,
        batch_size=len(given),
    )
    texts = [
        ([*prompt, *one.tokens], [False] * len(prompt) + [True] * len(one.tokens))
        for prompt, one in zip(given, real, strict=True)
    ]
    own = evaluate.simulated(ready.target, ready.drafter, texts)
    result = {
        "step": ready.step,
        "prompts": len(given),
        **_taus("real", [one.accepted for one in real]),
        **_taus("on_own_texts", own.accepted),
    }
    if heldout:
        rows = data.load("packaged", ready.target, split="heldout", max_length=512).rows[: len(given)]
        there = evaluate.simulated(ready.target, ready.drafter, rows)
        result |= _taus("on_heldout_texts", there.accepted)
    return result


def _taus(name: str, accepted: list[list[int]]) -> dict[str, Any]:
    cycles = [count for row in accepted for count in row]
    return {f"{name}_tau": round(1 + sum(cycles) / max(len(cycles), 1), 4), f"{name}_cycles": len(cycles)}


def table(found: Sequence[dict[str, Any]]) -> str:
    """tau (cycles) of each checkpoint in the form that the documentation quotes."""
    kinds = [key.removesuffix("_tau") for key in found[0] if key.endswith("_tau")]
    lines = ["| step | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for one in found:
        cells = [f"{one[f'{kind}_tau']:.3f} ({one[f'{kind}_cycles']})" for kind in kinds]
        lines.append(f"| {one['step']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
