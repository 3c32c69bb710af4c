"""Draws a comparison of two runs: for each frame and reason a pair of bars, before and after, and what became of it."""

from __future__ import annotations

import io

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .timeline_compare import Comparison, change
from .timeline_lanes import FAINT, INK
from .timeline_picture import DPI, GRID, STYLE
from .timeline_style import clean, seconds

MOST = 18  # rows; beyond, the rest is named in a line
BEFORE, AFTER = ("#BBBBBB", ""), ("#0072B2", "////")
STATUS_INK = {"new": "#A84600", "changed": INK, "same": FAINT, "gone": "#00664B"}


def picture(comparison: Comparison, form: str) -> bytes:
    """The comparison as the bytes of a "png" or "svg"."""
    with rc_context(STYLE):
        figure = _figure(comparison)
        buffer = io.BytesIO()
        if form == "png":
            FigureCanvasAgg(figure)
            figure.savefig(buffer, format="png", dpi=DPI)
        else:
            FigureCanvasSVG(figure)
            figure.savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()


def _figure(comparison: Comparison) -> Figure:
    rows = comparison.rows[:MOST]
    body = 0.52 * max(1, len(rows))
    height = 1.45 + body + 0.75
    figure = Figure(figsize=(11, height), facecolor="white")
    totals = {name: (before, after) for name, before, after in comparison.totals()}
    wasted, again = totals["seconds wasted"], totals["recompiles"]
    figure.text(0.02, 1 - 0.32 / height, "Recompiles before and after", size=14, weight="bold")
    names = f"a: {clean(comparison.a.name, 60)}     b: {clean(comparison.b.name, 60)}"
    figure.text(0.02, 1 - 0.58 / height, names, size=9, color=FAINT)
    line = f"recompiles {again[0]:.0f} → {again[1]:.0f}, wasted {seconds(wasted[0])} → {seconds(wasted[1])}"
    figure.text(0.02, 1 - 0.84 / height, line, size=10.5)
    axes = figure.add_axes((0.30, 0.62 / height, 0.42, body / height))
    axes.set_ylim(max(1, len(rows)) - 0.4, -0.6)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.set_yticks([])
    axes.set_xlabel("seconds wasted (compiling again, and waiting for it)", size=8.5)
    if not rows:
        axes.text(0.5, 0.5, "neither run recompiled anything", transform=axes.transAxes, ha="center", color=FAINT)
    places = range(len(rows))
    for offset, which, (colour, hatch) in ((-0.17, 0, BEFORE), (0.17, 1, AFTER)):
        values = [row.wasted[which] for row in rows]
        where = [place + offset for place in places]
        axes.barh(where, values, height=0.32, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
    axes.set_xlim(0, max([1e-3, *(max(row.wasted) for row in rows)]) * 1.05)
    for place, row in zip(places, rows, strict=True):
        ink = STATUS_INK[row.status]
        transform = axes.get_yaxis_transform()
        axes.text(-0.02, place - 0.13, clean(row.frame, 38), transform=transform, ha="right", va="center", size=9)
        reason = row.changes[0] if row.changes else row.kind
        reason = reason if reason.startswith(row.kind) else f"{row.kind}: {reason}"
        axes.text(
            -0.02, place + 0.17, clean(reason, 52), transform=transform, ha="right", va="center", size=7.5, color=FAINT
        )  # fmt: skip
        weight = "bold" if row.status in ("new", "changed") else "normal"
        axes.text(
            1.02, place, clean(change(row), 48), transform=transform, va="center", size=8.5, color=ink, weight=weight
        )  # fmt: skip
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=label)
        for (colour, hatch), label in ((BEFORE, "a: before"), (AFTER, "b: after"))
    ]
    corner = (0.297, 1 - 0.98 / height)
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=corner, ncols=2, frameon=False, fontsize=8.5)
    if len(comparison.rows) > MOST:
        more = f"and {len(comparison.rows) - MOST} more, see the table"
        figure.text(0.02, 0.12 / height, more, size=8, color=FAINT)
    return figure
