"""How well the cheap estimate of acceptance agrees with real decoding, for one checkpoint.

    python benchmarks/simulated_agreement.py RUN_OR_CHECKPOINT [--prompts FILE] [--count 8] [--tokens 48] [--device cpu]

Decodes prompts greedily with the drafter, then walks (a) the very texts that came out and (b) the packaged held-out
texts, and prints tau of each. (a) must agree up to cycles cut by the length limit and float32 ties.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from dflash_lib import decode, evaluate
from dflash_lib.acceptance import Settings, prepare


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--prompts", default="heldout")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    settings = {
        "checkpoint": options.checkpoint,
        "prompts": [options.prompts],
        "count": options.count,
        "device": options.device,
    }
    ready = prepare(Settings.from_dict(settings))
    given = ready.sets[0].prompts
    real = decode.speculative(
        ready.target, ready.drafter, given, max_new_tokens=options.tokens, stop_ids=ready.target.stop_ids, batch_size=4
    )
    texts = []
    for prompt, one in zip(given, real, strict=True):
        texts.append(([*prompt, *one.tokens], [False] * len(prompt) + [True] * len(one.tokens)))
    cycles = [count for one in real for count in one.accepted]
    greedy = evaluate.simulated(ready.target, ready.drafter, texts)
    result: dict[str, Any] = {
        "prompts": len(given),
        "real_tau_pooled": 1 + sum(cycles) / len(cycles),
        "simulated_on_those_texts": greedy.tau_pooled,
        "simulated_on_heldout_texts": None,
    }
    if options.prompts == "heldout":
        result["simulated_on_heldout_texts"] = ready.simulated().tau_pooled
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
