"""A run in words and one picture: losses, acceptance, compiles, and what to expect. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from . import dashboard_picture, events, runs, timeline
from .dashboard_state import Board

EXPECT = """\
What to expect: a drafter of this size, trained for minutes, drafts little; the paper's drafters (5 layers, about
800,000 conversations, 6 epochs) reach an acceptance length of 6.5 and a speed-up of 4.9 with Qwen3-4B on GPUs. On a
CPU the target's verifying pass over a whole block costs several single passes, so a speed-up below 1 is normal here."""


def summary(run_dir: str | os.PathLike[str]) -> str:
    """What a run came to: each thread's first and last loss, acceptance, compiles by class, and where it all lies."""
    folder = Path(run_dir)
    log = events.read(folder / "events.jsonl")
    status = runs.read_status(folder) or {}
    parts = [_losses(log), _acceptance(folder), EXPECT, timeline.summary(timeline.load(folder))]
    parts += [f"run folder: {folder} ({status.get('state', 'unknown')} at step {status.get('step', 0)})"]
    return "\n\n".join(part.strip() for part in parts if part)


def _losses(log: list[dict[str, Any]]) -> str:
    lines = []
    steps = [event for event in log if event["kind"] == "step" and event.get("loss") is not None]
    for lane in sorted({event["thread"] for event in steps}, key=lambda name: (len(name), name)):  # 2 before 10
        own = [event for event in steps if event["thread"] == lane]
        first, last = own[0], own[-1]
        seconds, tokens = sum(e.get("seconds") or 0 for e in own), sum(e.get("tokens") or 0 for e in own)
        speed = f", {tokens / seconds:,.0f} tokens/s over the run" if seconds else ""
        lines.append(
            f"{lane} on {first['device']}: loss {first['loss']:.3f} at step {first['step']} -> {last['loss']:.3f} at "
            f"step {last['step']}{speed}"
        )
    return "\n".join(lines) or "no step was finished"


def _acceptance(folder: Path) -> str:
    found = runs.json_or_none(folder / "acceptance.json")
    if not isinstance(found, dict):
        return f"acceptance: not measured yet (python -m dflash_lib evaluate {folder})"
    step = f" of step {found['step']}" if found.get("step") is not None else ""
    lines = [f"acceptance{step}, from real speculative decoding (at most {found['block_size']} tokens a target pass):"]
    for group in found["sets"]:
        low, high = group["ci95"]
        line = (
            f"  {group['name']}: {group['tau_mean']:.2f} tokens a pass [{low:.2f}, {high:.2f}] over {group['prompts']} "
            f"prompt{'s' * (group['prompts'] != 1)}; {group['spec_tokens_per_s']:.1f} tokens/s against "
            f"{group['plain_tokens_per_s']:.1f} plain: {group['speedup']:.2f} x"
        )
        if group.get("lossless") is not None:
            line += "; output " + ("as the target's own" if group["lossless"] else "DIFFERS from the target's own")
        lines.append(line)
    return "\n".join(lines)


def draw_losses(run_dir: str | os.PathLike[str]) -> None:
    """Writes ``loss.png`` and ``dashboard.html`` from the log, unless a dashboard has left them for all of it."""
    folder = Path(run_dir)
    picture, log = folder / "loss.png", folder / "events.jsonl"
    if picture.exists() and log.exists() and picture.stat().st_mtime >= log.stat().st_mtime:
        return  # an older one is of the run before it was resumed
    config = runs.json_or_none(folder / "config.json")
    board = Board(config if isinstance(config, dict) else {})
    for event in events.read(folder / "events.jsonl"):
        board.apply(event)
    dashboard_picture.save(board, folder, folder.name)
