"""Pictures of acceptance.json: how many drafts are accepted, at which position they fail, and what it is worth."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, told apart with any colour vision.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
MARKERS = "os^Dv<>P"


def draw(acceptance: Mapping[str, Any], path: Path) -> Path:
    """Writes a PNG or SVG (by the suffix), whole or not at all; safe in any thread (Figure and Agg, no pyplot)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from dflash_lib.atomic import write_bytes

    sets = acceptance["sets"]
    figure = Figure(figsize=(13.5, 4.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    lengths, positions, speeds = figure.subplots(1, 3, width_ratios=(1.25, 1.25, 1.0))
    step = "" if acceptance["step"] is None else f", step {acceptance['step']}"
    figure.suptitle(
        f"Acceptance on {acceptance['target']}{step} (block size {acceptance['block_size']}, "
        f"temperature {acceptance['temperature']:g})",
        fontsize=12,
    )
    width = 0.8 / max(len(sets), 1)
    for index, one in enumerate(sets):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        cycles = max(one["cycles"], 1)
        label = f"{one['name']}: tau {one['tau_mean']:.2f} [{one['ci95'][0]:.2f}, {one['ci95'][1]:.2f}]"
        places = [1 + count + (index - (len(sets) - 1) / 2) * width for count in range(len(one["histogram"]))]
        shares = [100 * count / cycles for count in one["histogram"]]
        lengths.bar(places, shares, width, color=colour, edgecolor="black", linewidth=0.4, label=label)
        positions.plot(
            range(1, len(one["per_position"]) + 1),
            [100 * share for share in one["per_position"]],
            color=colour,
            marker=marker,
            label=f"{one['name']} ({one['cycles']} cycles)",
        )
    lengths.set(xlabel="tokens committed by one cycle (accepted drafts + 1)", ylabel="cycles (%)")
    lengths.set_title("Acceptance length", fontsize=11)
    lengths.set_xticks(range(1, acceptance["block_size"] + 1))
    positions.set(xlabel="slot of the draft in its block", ylabel="cycles that accept it (%)", ylim=(0, 102))
    positions.set_title("Acceptance by position", fontsize=11)
    positions.set_xticks(range(1, max(acceptance["block_size"], 2)))
    _speeds(speeds, sets)
    for axes in (lengths, positions):
        axes.legend(fontsize=8, frameon=False)
        axes.tick_params(axis="x", labelsize=8)
    for axes in (lengths, positions, speeds):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lstrip(".") or "png")
    return write_bytes(path, picture.getvalue())


def _speeds(axes: Any, sets: list[Mapping[str, Any]]) -> None:
    """Plain beside speculative, with the ratio above."""
    for offset, key, colour, hatch in ((-0.2, "plain", "#BBBBBB", "//"), (0.2, "spec", "#444444", "")):
        values = [one[f"{key}_tokens_per_s"] for one in sets]
        places = [index + offset for index in range(len(sets))]
        label = "plain" if key == "plain" else "speculative"
        axes.bar(places, values, 0.38, color=colour, hatch=hatch, edgecolor="black", linewidth=0.4, label=label)
    for index, one in enumerate(sets):
        top = max(one["plain_tokens_per_s"], one["spec_tokens_per_s"])
        axes.annotate(f"{one['speedup']:.2f} x", (index, top), ha="center", xytext=(0, 3), textcoords="offset points")
    axes.set_title("Speed (without prefill)", fontsize=11)
    axes.set(ylabel="new tokens per second", xticks=range(len(sets)), xlim=(-0.7, len(sets) - 0.3))
    axes.set_xticklabels([one["name"] for one in sets])
    axes.margins(y=0.25)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
