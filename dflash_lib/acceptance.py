"""The acceptance of a checkpoint from a few names: what notebook 04 and the shell's ``evaluate`` do."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from dflash_lib import checkpoint as checkpoints
from dflash_lib import evaluate as evaluation
from dflash_lib import prompts as prompt_sets
from dflash_lib import target as targets
from dflash_lib.config import Bool, Float, Int, OptionalBool, OptionalInt, OptionalText, Parameters, Texts
from dflash_lib.drafter import Drafter
from dflash_lib.run_folder import RUN_DIR_VARIABLE, runs_root
from dflash_lib.simulate import Simulated, simulated


class Settings(Parameters):
    """Every choice of an evaluation."""

    checkpoint: OptionalText = Field(
        "runs", description="checkpoint, export, run folder, or folder of runs (the newest)"
    )
    target: OptionalText = Field(None, description="name of the target; None: the one the checkpoint names")
    prompts: Texts = Field(default_factory=lambda: ["heldout"], description="'heldout', 'humaneval', JSON lines files")
    count: Int = Field(24, ge=1, description="most prompts of each set")
    max_new_tokens: Int = Field(128, ge=1)
    temperature: Float = Field(0.0, ge=0)
    seed: Int = Field(0, ge=0, description="of sampling and of the intervals")
    batch_size: Int = Field(1, ge=1, description="prompts decoded together; speed-ups are quoted for 1")
    thinking: OptionalBool = Field(None, description="the chat template's enable_thinking, as it will be served")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    simulate: Bool = Field(True, description="also the estimate from held-out texts, without decoding")
    simulate_rows: OptionalInt = Field(16, ge=1, description="most held-out texts of the estimate; None: all")
    out: OptionalText = Field(None, description="folder for acceptance.json and its picture; None: the run's")


@dataclass(frozen=True)
class Prepared:
    """A target, a drafter that fits it, prompts, and ``out``: the folder that acceptance.json goes to."""

    settings: Settings
    target: targets.Target
    drafter: Drafter
    sets: list[prompt_sets.PromptSet]
    folder: Path
    step: int | None
    out: Path

    def evaluate(self, progress: Callable[[str, int, int], None] | None = None) -> dict[str, Any]:
        """Real decoding of every set; see :func:`dflash_lib.evaluate.evaluate`."""
        settings = self.settings
        return evaluation.evaluate(
            self.target,
            self.drafter,
            {one.name: one.prompts for one in self.sets},
            out=self.out,
            temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
            seed=settings.seed,
            batch_size=settings.batch_size,
            checkpoint=str(self.folder),
            step=self.step,
            progress=progress,
        )

    def simulated(self) -> Simulated:
        """The estimate from the packaged held-out conversations; see :func:`dflash_lib.simulate.simulated`."""
        from dflash_lib import data

        rows = data.load("packaged", self.target, split="heldout", max_length=512, thinking=self.settings.thinking).rows
        return simulated(self.target, self.drafter, rows[: self.settings.simulate_rows])


def prepare(settings: Settings, target: targets.Target | None = None) -> Prepared:
    """Finds the checkpoint, loads it and its target (unless given), and reads the prompts.

    Raises:
        UserError: one line that says what to do.
    """
    folder = find(settings.checkpoint or "runs")
    facts = checkpoints.describe(folder)
    device = torch.device(
        settings.device if settings.device != "auto" else "cuda:0" if torch.cuda.is_available() else "cpu"
    )
    drafter = checkpoints.load(folder, device=device)
    if target is None:
        name = settings.target or facts["target"]
        if name is None:
            raise evaluation.EvaluationError(f"{folder}: does not say which target it is for; name it with target")
        target = targets.load(name, target_layers=drafter.config.target_layer_ids)
    target = target.to(device)
    checkpoints.check_fits(drafter, target, folder)
    sources = [settings.prompts] if isinstance(settings.prompts, str) else settings.prompts
    sets = [prompt_sets.load(one, target, count=settings.count, thinking=settings.thinking) for one in sources]
    return Prepared(settings, target, drafter, sets, folder, facts["step"], _out(settings, folder))


def _out(settings: Settings, folder: Path) -> Path:
    """As asked; else the folder a launcher gave this run; else the checkpoint's run; else one under runs/."""
    asked = settings.out or os.environ.get(RUN_DIR_VARIABLE)
    if asked:
        return Path(asked).expanduser().absolute()
    return (
        folder.parent.parent if folder.parent.name == "checkpoints" else runs_root("runs") / f"acceptance-{folder.name}"
    )


def find(checkpoint: str | Path) -> Path:
    """A checkpoint folder from any of the forms of :class:`Settings`; of several runs, the one saved last.

    Raises:
        CheckpointError: nothing there holds a whole checkpoint.
    """
    place = Path(checkpoint)
    if not place.exists() and not place.is_absolute():
        place = runs_root(checkpoint)
    runs = [newest for run in place.iterdir() if (newest := checkpoints.latest(run))] if place.is_dir() else []
    if runs and checkpoints.latest(place) is None:
        return max(runs, key=lambda folder: folder.stat().st_mtime)
    return checkpoints.resolve(place)
