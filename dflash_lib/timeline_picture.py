"""Draws a timeline as PNG or SVG: loss, lanes, cache use, seconds by part, worst offenders. Any number of events.

matplotlib's object interface with the Agg and SVG canvases only: safe in any thread, no pyplot.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from .timeline_lanes import FAINT, INK, MANY, MOST_TITLES, Position, boxes, draw_lanes, with_titles
from .timeline_model import Lane, Offender, Timeline
from .timeline_style import CLASS_LOOKS, PART_LOOKS, WAITING, clean, look, scale, seconds, subtitle

WIDTH = 13.0  # inches
DPI = 140
GRID = "#E6E6E6"
ALONE = 8  # threads that have a curve of their own; of more, the median and the range are drawn
STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.edgecolor": "#BBBBBB",
    "axes.labelcolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "text.color": INK,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "dflash",
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def picture(timeline: Timeline, form: str, *, axis: str = "time") -> bytes:
    """The timeline as the bytes of a "png" or "svg"; ``axis`` is "time" or "step"."""
    with rc_context(STYLE):
        axis = "step" if axis == "step" and timeline.has_steps else "time"
        figure, titles = _figure(timeline, axis, titled=MOST_TITLES if form == "svg" else 0)
        buffer = io.BytesIO()
        if form == "png":
            FigureCanvasAgg(figure)
            figure.savefig(buffer, format="png", dpi=DPI, pil_kwargs={"compress_level": 4})  # 6 takes twice as long
            return buffer.getvalue()
        FigureCanvasSVG(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        return with_titles(buffer.getvalue().decode(), titles).encode("utf-8", "replace")


def _figure(timeline: Timeline, axis: str, titled: int) -> tuple[Figure, dict[str, str]]:
    offenders = timeline.offenders()[:5]
    lanes = max(1, len(timeline.lanes))
    lane_inches = min(0.46, max(0.15, 7.5 / lanes))
    above = timeline.has_loss or timeline.has_steps
    cached = any(c.cache_size is not None and c.limit for c in timeline.compiles)
    parts = [1.5 if above else 0.0, lanes * lane_inches + 0.1, 0.95 if cached else 0.0]
    table = 0.42 + 0.40 * len(offenders) if offenders else 0.0
    header, footer, gap = 0.98, 0.55, 0.22
    height = header + sum(parts) + gap * sum(p > 0 for p in parts[1:]) + footer + table
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    figure.text(0.016, 1 - 0.30 / height, clean(f"Recompile timeline · {timeline.name}", 90), size=14, weight="bold")
    figure.text(0.016, 1 - 0.54 / height, subtitle(timeline), size=9.5, color=FAINT)
    left, width, side, side_width = 0.105, 0.655, 0.785, 0.195

    top = height - header
    axes: list[Axes | None] = []
    for i, inches in enumerate(parts):
        if not inches:
            axes.append(None)
            continue
        top -= inches
        axes.append(figure.add_axes((left, top / height, width, inches / height)))
        if i == 1:
            beside = figure.add_axes((side, top / height, side_width, inches / height))
        top -= gap
    curve, middle, cache = axes
    assert middle is not None

    def position(lane: Lane, times: Sequence[float]) -> np.ndarray:
        array = np.asarray(times, dtype=float)
        return lane.step_at(array) if axis == "step" else array

    low, high = _range(timeline, axis)
    titles = draw_lanes(middle, timeline, position, (low, high), titled)
    if curve is not None:
        _curve(curve, timeline, position)
    if cache is not None:
        _cache(cache, timeline, position, high)
    _seconds_by_part(beside, timeline)
    shown = [a for a in axes if a is not None]
    for one in shown:
        one.set_xlim(low, high)
        one.grid(axis="x", color=GRID, linewidth=0.6, zorder=0)
        one.set_axisbelow(True)
        one.tick_params(labelbottom=one is shown[-1], length=0, pad=4)
    shown[-1].set_xlabel("step" if axis == "step" else "seconds since the run started", size=8.5)
    _legend(figure, timeline, height)
    _table(figure, offenders, table, height)
    return figure, titles


def _range(timeline: Timeline, axis: str) -> tuple[float, float]:
    if axis == "step":
        numbers = [n for lane in timeline.lanes for n in lane.step_numbers]
        low, high = float(min(numbers) - 1), float(max(numbers)) + 0.5
    else:
        low, high = 0.0, timeline.end
    if high <= low:
        high = low + 1.0
    margin = (high - low) * 0.006
    return low - margin, high + margin


# --- around the lanes ------------------------------------------------------------------------------------------------
def _curve(axes: Axes, timeline: Timeline, position: Position) -> None:
    """Loss of every thread, or its steps' time where no loss is known; of many threads the median and the range."""
    loss = timeline.has_loss
    series: list[tuple[Lane, np.ndarray, np.ndarray]] = []
    for lane in timeline.lanes:
        values = np.array(lane.losses if loss else lane.step_seconds)
        x, known = position(lane, lane.step_ends), np.isfinite(values)
        if known.any():
            series.append((lane, x[known], values[known]))
    unit = ", nats a token" if any(lane.thread.startswith("drafter") for lane in timeline.lanes) else ""
    label = f"loss{unit}" if loss else "seconds a step"
    scale(axes, (value for _, _, y in series for value in (y.min(), y.max())), label)
    axes.yaxis.label.set_fontsize(8.5)
    if len(series) > ALONE:
        _range_of_threads(axes, series)
    for i, (lane, x, y) in enumerate(series if len(series) <= ALONE else ()):
        thin = slice(None, None, max(1, len(y) // 4000))
        axes.plot(
            x[thin],
            y[thin],
            color=("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D", "#999999")[i],
            linestyle=("-", "--", "-.", ":")[i % 4],
            linewidth=1.3,
            label=clean(lane.name, 20),
            marker="o" if len(x) == 1 else None,
            markersize=3,
        )
    if series:
        columns = min(4, len(series))
        axes.legend(fontsize=7.5, frameon=False, loc="upper right", ncols=columns, labelcolor=FAINT)


def _range_of_threads(axes: Axes, series: list[tuple[Lane, np.ndarray, np.ndarray]]) -> None:
    grid = np.linspace(min(x[0] for _, x, _ in series), max(x[-1] for _, x, _ in series), 600)
    table = np.array([np.interp(grid, x, y, left=np.nan, right=np.nan) for _, x, y in series])
    grid, table = grid[np.isfinite(table).any(axis=0)], table[:, np.isfinite(table).any(axis=0)]
    low, middle, high = np.nanmin(table, axis=0), np.nanmedian(table, axis=0), np.nanmax(table, axis=0)
    axes.fill_between(grid, low, high, color="#56B4E9", alpha=0.35, linewidth=0, label="lowest to highest")
    axes.plot(grid, middle, color="#0072B2", linewidth=1.3, label=f"median of {len(series)} threads")


def _cache(axes: Axes, timeline: Timeline, position: Position, high: float) -> None:
    """Cache entries of each function over time, against the limit past which it runs eagerly."""
    series: dict[tuple[int, str, str | None, int | None], list[tuple[float, int]]] = {}
    limits: set[int] = set()
    for lane in timeline.lanes:
        counted = [c for c in lane.compiles if c.cache_size is not None and c.limit and c.cls != "backward"]
        for c, x in zip(counted, position(lane, [c.end for c in counted]), strict=True):
            series.setdefault((c.lane, c.frame, c.file, c.line), []).append((float(x), c.cache_size or 0))
            limits.add(c.limit or 0)
    ranked = sorted(series.values(), key=lambda points: -max(size for _, size in points))[:40]
    for i, points in enumerate(reversed(ranked)):
        x, y = np.array([*points, (high, points[-1][1])]).T
        fullest = i == len(ranked) - 1
        axes.step(x, y, where="post", color="#0072B2" if fullest else "#AAAAAA", linewidth=1.6 if fullest else 0.8)
    top = max(max(size for _, size in points) for points in series.values())
    for limit in sorted(limits):
        if limit <= max(16, 2 * top):
            axes.axhline(limit, color="#D55E00", linestyle=(0, (4, 2)), linewidth=1.1)
            axes.annotate(
                f"limit {limit}", (1, limit), xycoords=("axes fraction", "data"), xytext=(5, 0),
                textcoords="offset points", ha="left", va="center", size=7.5, color="#A84600",
            )  # fmt: skip
    near = [limit for limit in limits if limit <= max(16, 2 * top)]
    axes.set_ylim(0, max([top, *near]) * 1.12 + 0.2)
    axes.set_ylabel("cache entries", size=8.5)
    (at, frame, _, _), points = max(series.items(), key=lambda item: max(size for _, size in item[1]))
    name = f"{clean(frame, 26)}\nin {clean(timeline.lanes[at].name, 23)}"
    axes.text(1.018, 0.0, f"fullest: {name}", transform=axes.transAxes, size=7.5, color="#0072B2", va="bottom")


def _seconds_by_part(axes: Axes, timeline: Timeline) -> None:
    """Beside each lane its seconds: Dynamo, AOTAutograd, Inductor, Triton, waiting; in bold what was wasted."""
    lanes = timeline.lanes
    axes.set_ylim(max(1, len(lanes)) - 0.5, -0.5)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_yticks([])
    split = np.array([list(lane.parts.values()) for lane in lanes]).reshape(-1, len(PART_LOOKS))
    ends = split.cumsum(axis=1)
    longest = float(ends.max(initial=0.0)) or 1.0
    for k, style in enumerate(PART_LOOKS.values()):
        some = np.flatnonzero(split[:, k] > 0)
        if len(some):
            right, left = ends[some, k], ends[some, k] - split[some, k]
            axes.add_artist(boxes(left, right, some - 0.31, 0.62, style, hatched=True))
    for i, lane in enumerate(lanes):
        if lane.wasted > 0.005:
            axes.annotate(
                f"{seconds(lane.wasted)} wasted", (ends[i, -1], i), xytext=(4, 0), textcoords="offset points",
                va="center", size=7.5 if len(lanes) <= MANY else 6, color=INK, weight="bold",
            )  # fmt: skip
    axes.set_xlim(0, longest * 1.8)
    axes.set_xticks([tick for tick in MaxNLocator(4).tick_values(0, longest) if tick <= longest * 1.05])
    axes.tick_params(length=0, labelsize=7.5)
    axes.set_xlabel("seconds by thread", size=8.5)
    present = [style for k, style in enumerate(PART_LOOKS.values()) if (split[:, k] > 0).any()]
    if present:
        handles = [Patch(facecolor=s.colour, hatch=s.hatch, edgecolor="white", label=s.label) for s in present]
        axes.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False, fontsize=7.5,
            handlelength=1.4, columnspacing=1.0, labelcolor=FAINT,
        )  # fmt: skip


def _legend(figure: Figure, timeline: Timeline, height: float) -> None:
    counts = {cls: count for cls, (count, _, _) in timeline.by_class().items()}
    looks = [(style, f"{style.label} {counts[cls]:,}") for cls, style in CLASS_LOOKS.items() if cls in counts]
    looks += [(look(cls), look(cls).label) for cls in counts if cls not in CLASS_LOOKS][:1]
    if any(c.wait > 0.005 for c in timeline.compiles):
        looks.append((WAITING, "waiting for another's compile" if len(looks) < 7 else "waiting"))
    handles = [Patch(facecolor=s.colour, hatch=s.hatch, edgecolor="white", label=label) for s, label in looks]
    if handles:
        figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(0.009, 1 - 0.60 / height), ncols=len(handles),
            frameon=False, fontsize=8.5 if len(handles) < 8 else 7.5, handlelength=1.8, handleheight=0.9,
            columnspacing=1.3,
        )  # fmt: skip


def _table(figure: Figure, offenders: list[Offender], inches: float, height: float) -> None:
    if not offenders:
        return
    y = inches - 0.16
    figure.text(0.016, y / height, "Worst offenders", size=10, weight="bold", va="top")
    for offender in offenders:
        y -= 0.40
        cost = f"{seconds(offender.wasted)}"
        where = f"  ({_short_path(offender.where)})" if offender.where else ""
        change = f": {offender.changes[0]}" if offender.changes else ""
        more = f" and {len(offender.changes) - 1:,} more" if len(offender.changes) > 1 else ""
        count = f"{offender.count:,}×"
        figure.text(0.080, (y + 0.02) / height, cost, size=8.8, weight="bold", ha="right", va="bottom")
        threads = f" in {len(offender.lanes)} threads" if len(offender.lanes) > 1 else ""
        text = f"{count} {offender.frame}{threads}{change}{more}{where}"
        figure.text(0.088, (y + 0.02) / height, clean(text, 150), size=8.8, va="bottom")
        figure.text(0.088, (y - 0.02) / height, clean(offender.advice, 170), size=8.2, color=FAINT, va="top")


def _short_path(where: str) -> str:
    return "/".join(where.replace("\\", "/").split("/")[-2:])
