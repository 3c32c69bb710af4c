"""Acceptance length and speed of a drafter: real speculative decoding against plain decoding of the same prompts.

``tau`` is the number of tokens that a target pass commits: accepted drafts + 1, between 1 and the block size.
``tau_mean`` is the mean over prompts of each prompt's mean, as papers give it; ``tau_pooled`` is over all cycles, so
long answers weigh more. Speeds leave out the prompt's prefill, which is the same for both.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_lib import checkpoint as checkpoints
from dflash_lib import decode
from dflash_lib.atomic import write_json
from dflash_lib.decode import Decoded, Lossless
from dflash_lib.drafter import Drafter
from dflash_lib.errors import UserError
from dflash_lib.simulate import Simulated, simulated

__all__ = [
    "EvaluationError",
    "Simulated",
    "bootstrap",
    "draw",
    "evaluate",
    "evaluate_checkpoint",
    "say",
    "simulated",
    "speed",
    "summary",
    "table",
]

RESAMPLES = 2000


class EvaluationError(UserError):
    """An evaluation that cannot be done as asked: one line."""


def evaluate(
    target: Any,
    drafter: Any,
    sets: Mapping[str, Sequence[Sequence[int]]],
    *,
    out: str | Path | None = None,
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    stop_ids: Sequence[int] | None = None,
    seed: int = 0,
    batch_size: int = 1,
    graphs: bool | None = None,
    checkpoint: str | None = None,
    step: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Decodes every set with and without the drafter; returns (and writes) what acceptance.json holds.

    Args:
        target, drafter: on one device.
        sets: name -> prompts as token ids.
        out: folder for ``acceptance.json`` and ``acceptance.png``; None writes nothing.
        temperature: 0 for greedy; above 0 both ways of decoding draw the same numbers.
        max_new_tokens: most new tokens a prompt.
        stop_ids: None takes the target's.
        batch_size: prompts decoded together; speed-ups are quoted for 1.
        graphs: see :func:`decode.speculative`.
        checkpoint, step: written as they are.
        progress: called with (what is going on, prompts done, prompts in all).

    Raises:
        EvaluationError: no set, or a set without prompts.
        CheckpointError: the drafter was trained for another target.
    """
    if not sets:
        raise EvaluationError("sets: is empty; name at least one set of prompts")
    for name, given in sets.items():
        if not given:
            raise EvaluationError(f"sets: {name!r} has no prompt")
    if isinstance(drafter, Drafter):
        checkpoints.check_fits(drafter, target, checkpoint or "this drafter")
        drafter = _as_served(drafter)
    block_size: int = drafter.config.block_size if isinstance(drafter, Drafter) else drafter.block_size
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "stop_ids": target.stop_ids if stop_ids is None else stop_ids,
        "seed": seed,
        "batch_size": batch_size,
        "graphs": graphs,
    }
    found = []
    for name, given in sets.items():
        given = [list(prompt) for prompt in given]

        def show(what: str, label: str = name) -> Callable[[int, int], None] | None:
            return None if progress is None else lambda done, of: progress(f"{label}, {what}", done, of)

        ours = decode.speculative(target, drafter, given, progress=show("speculative"), **options)
        reference = decode.plain(target, given, progress=show("plain"), **options)
        compared = decode.lossless(target, given, ours, reference, temperature=temperature)
        found.append(summary(name, ours, reference, compared, block_size, seed=seed))
    acceptance = {
        "v": 1,
        "checkpoint": checkpoint,
        "step": step,
        "target": target.name,
        "temperature": temperature,
        "block_size": block_size,
        "sets": found,
    }
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "acceptance.json", acceptance)
        draw(acceptance, folder / "acceptance.png")
    return acceptance


def evaluate_checkpoint(
    checkpoint: str | Path,
    *,
    prompts: Sequence[str | Path] | None = None,
    target: Any = None,
    out: str | Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Loads target and checkpoint and calls :func:`evaluate`; what the shell's ``evaluate`` does.

    Args:
        checkpoint: a checkpoint folder, an export, a run folder (its newest checkpoint), or a folder of runs.
        prompts: files of JSON lines, ``"heldout"``, ``"humaneval"``; None is ``["heldout"]``.
        target: a name for :func:`dflash_lib.target.load`, a loaded target, or None for the one the checkpoint names.
        out: None: the checkpoint's run folder, or one under ``runs/`` when it lies in none.
        settings: the other fields of :class:`dflash_lib.acceptance.Settings`.

    Raises:
        UserError: one line that says what to do (of the checkpoint, the target, the data or a setting).
    """
    from dflash_lib.acceptance import Settings, prepare

    name = target if isinstance(target, str) else None
    given = {"checkpoint": checkpoint, "prompts": [str(p) for p in prompts or ["heldout"]], "target": name, "out": out}
    prepared = prepare(Settings.from_dict({**given, **settings}), None if isinstance(target, str) else target)
    return prepared.evaluate(progress)


# --- numbers -----------------------------------------------------------------------------------------------------
def summary(
    name: str,
    ours: Sequence[Decoded],
    reference: Sequence[Decoded],
    compared: Lossless | None,
    block_size: int,
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """One entry of acceptance.json's ``sets``. A prompt whose first token ends it has no cycle and no tau."""
    means = [one.tau for one in ours if one.tau is not None]
    accepted = [count for one in ours for count in one.accepted]
    histogram = [accepted.count(count) for count in range(block_size)]
    fast, slow = speed(ours), speed(reference)
    return {
        "name": name,
        "prompts": len(ours),
        "cycles": len(accepted),
        "tau_mean": _mean(means) if means else 1.0,
        "tau_pooled": 1 + _mean(accepted) if accepted else 1.0,
        "ci95": list(bootstrap(means, seed=seed)) if means else [1.0, 1.0],
        "histogram": histogram,
        "per_position": [sum(histogram[slot:]) / max(len(accepted), 1) for slot in range(1, block_size)],
        "spec_tokens_per_s": fast,
        "plain_tokens_per_s": slow,
        "speedup": fast / slow if slow > 0 else 0.0,
        "lossless": None if compared is None else compared.verdict,
    }


def speed(decoded: Sequence[Decoded]) -> float:
    """New tokens a second over all prompts, without prefill and the first token that comes of it."""
    seconds = sum(one.decode_seconds for one in decoded)
    return sum(len(one.tokens) - 1 for one in decoded) / seconds if seconds > 0 else 0.0


def bootstrap(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % percentile interval of the mean, resampling whole prompts (cycles of one prompt are not independent)."""
    generator = random.Random(seed)
    count = len(values)
    means = sorted(_mean(generator.choices(values, k=count)) for _ in range(resamples))
    return means[int(0.025 * resamples)], means[min(int(0.975 * resamples), resamples - 1)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _as_served(drafter: Drafter) -> Drafter:
    """On a GPU, weights in the dtype the arithmetic has: float32 masters would be rounded again every cycle."""
    if drafter.fc.weight.device.type != "cuda" or drafter.fc.weight.dtype == drafter.config.dtype:
        return drafter
    return copy.deepcopy(drafter).to(drafter.config.dtype)


# --- words and pictures ------------------------------------------------------------------------------------------
def table(acceptance: Mapping[str, Any]) -> str:
    """The numbers as text, one line a set."""
    head = ("set", "prompts", "tau", "95 % interval", "pooled", "tokens/s", "plain", "speed-up", "lossless")
    verdict = {True: "yes", False: "NO", None: "not decidable"}
    rows = [head]
    for one in acceptance["sets"]:
        rows.append(
            (
                one["name"],
                str(one["prompts"]),
                f"{one['tau_mean']:.2f}",
                f"{one['ci95'][0]:.2f} to {one['ci95'][1]:.2f}",
                f"{one['tau_pooled']:.2f}",
                f"{one['spec_tokens_per_s']:.1f}",
                f"{one['plain_tokens_per_s']:.1f}",
                f"{one['speedup']:.2f} x",
                verdict[one["lossless"]],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    step = "" if acceptance["step"] is None else f", step {acceptance['step']}"
    title = (
        f"target {acceptance['target']}{step}, block size {acceptance['block_size']}, "
        f"temperature {acceptance['temperature']:g}"
    )
    return "\n".join([title, *lines])


def say(what: str, done: int, of: int) -> None:
    """A progress line when a set is done one way; for a notebook or a terminal."""
    if done == of:
        print(f"{what}: {of} prompts", flush=True)


def draw(acceptance: Mapping[str, Any], path: str | Path) -> Path:
    """Three pictures of each set side by side; see :mod:`dflash_lib.acceptance_plot`."""
    from dflash_lib.acceptance_plot import draw as drawing

    return drawing(acceptance, Path(path))
