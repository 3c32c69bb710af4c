"""What notebooks 03 and 07 ask for: their parameters, the run they mean, and the timeline's page inside a notebook."""

from __future__ import annotations

import html
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from . import timeline, torch_trace
from .config import Bool, Int, OptionalInt, OptionalText, Parameters
from .run_folder import RUN_DIR_VARIABLE, runs_root
from .timeline_html import page

EMBEDDED_MOST = 3_000_000  # bytes; a larger page is named instead, so that the notebook stays a file one can open


class View(Parameters):
    """Parameters of notebook 03."""

    run: str = Field("runs", description="run folder, events.jsonl, TORCH_TRACE folder, or a folder of runs (newest)")
    compare_with: OptionalText = Field(None, description="an earlier run to compare with")
    axis: Literal["time", "step"] = "time"
    fail_after_step: OptionalInt = Field(None, ge=0, description="fail when anything recompiled after this step")
    embed: Bool = Field(True, description="show the page with zoom and filters in the notebook")
    out: OptionalText = Field(None, description="folder for the pictures; None: the run's")


class Try(Parameters):
    """Parameters of notebook 07."""

    threads: Int = Field(2, ge=1, le=64)
    steps: Int = Field(12, ge=2)
    lengths: list[Int] = Field(default_factory=lambda: [24, 40, 56, 72, 88], min_length=1)
    bucket: Int = Field(96, ge=1, description="the one length that the second recording pads to")
    backend: str = "aot_eager"
    out: OptionalText = Field(None, description="folder for recordings and pictures; None: runs/any-model")


@dataclass(frozen=True)
class Page:
    """The timeline's page in a notebook's output: isolated from it, and with everything it needs inside."""

    text: str
    height: int = 760

    def _repr_html_(self) -> str:
        if len(self.text) > EMBEDDED_MOST:
            return "The page is too large to be embedded: open timeline.html in a browser."
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(self.text)}" title="recompile timeline" '
            f'style="width:100%;height:{self.height}px;border:0"></iframe>'
        )


def embed(source: timeline.Source, height: int = 760) -> Page:
    """The page of a timeline, to be shown as a cell's value."""
    return Page(page(timeline.load(source)), height)


def find(run: str | Path) -> Path:
    """The folder or file of a run, from any of the forms of :class:`View`; of several runs, the latest.

    Raises:
        TimelineError: there is no run.
    """
    place = Path(run).expanduser()
    if not place.exists() and not place.is_absolute():
        place = runs_root(str(run))
    if not place.is_dir() or (place / "events.jsonl").exists() or torch_trace.files(place):
        return place  # what is no run is refused by timeline.load, in a line
    logs = sorted(place.glob("*/events.jsonl"), key=lambda path: path.stat().st_mtime)
    if not logs:
        raise timeline.TimelineError(f"{place}: holds no run yet; train one with notebook 01, or name a run folder")
    return logs[-1].parent


def out_folder(asked: str | None, otherwise: str | Path) -> Path:
    """The folder for pictures: as asked, else the one a launcher gave this notebook, else ``otherwise``; made."""
    folder = Path(asked or os.environ.get(RUN_DIR_VARIABLE) or otherwise).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
