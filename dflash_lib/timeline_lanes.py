"""Draws the lanes: every compile where and as long as it happened, by colour and hatch, any number of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from .timeline_model import Compile, Lane, Timeline
from .timeline_style import WAITING, Look, clean, look, seconds

INK, FAINT = "#222222", "#666666"
PIXELS = 1100  # across the lanes; compiles of a class closer together than one of them are drawn as one
NARROWEST = 2.0 / PIXELS  # of the axis: a compile is never too short to be seen
HATCHED = 5.0 / PIXELS  # of the axis: narrower boxes have no room for a hatch
MOST_TITLES = 1500  # SVG rectangles with a title of their own; beyond, the longest ones
MANY = 18  # lanes; beyond, labels are small and lanes have no device

Position = Callable[[Lane, Sequence[float]], np.ndarray]
Boxes = dict[tuple[str, bool], list[np.ndarray]]  # (class, hatched) -> arrays of corners [n, 4, 2]


def draw_lanes(
    axes: Axes, timeline: Timeline, position: Position, span: tuple[float, float], titled: int
) -> dict[str, str]:
    """Draws all lanes.

    Args:
        position: a lane and times -> places on the x axis.
        span: the x axis from where to where.
        titled: how many compiles (the longest) become rectangles of their own, for SVG's hover titles.

    Returns:
        gid of each rectangle of its own -> its title.
    """
    lanes = timeline.lanes
    axes.set_ylim(max(1, len(lanes)) - 0.5, -0.5)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_yticks(range(len(lanes)), [_label(lane, len(lanes)) for lane in lanes])
    axes.tick_params(axis="y", labelcolor=INK, labelsize=9 if len(lanes) <= MANY else 7)
    for i in range(0, len(lanes), 2):
        axes.axhspan(i - 0.5, i + 0.5, color="#F7F7F7", zorder=0, linewidth=0)
    if not timeline.compiles:
        axes.text(0.5, 0.5, "no compile in this run", transform=axes.transAxes, ha="center", va="center", color=FAINT)
    longest = sorted(timeline.compiles, key=lambda c: -(c.seconds + c.wait))[:titled]
    own = {id(c) for c in longest}
    width = span[1] - span[0]
    groups: Boxes = defaultdict(list)
    titles: dict[str, str] = {}
    for i, lane in enumerate(lanes):
        if not lane.compiles:
            if timeline.compiles and len(lanes) <= MANY:
                place = axes.get_yaxis_transform()
                axes.text(0.008, i, "no compile", transform=place, va="center", size=8, color="#999999")
            continue
        start = position(lane, [c.start for c in lane.compiles])
        end = np.maximum(position(lane, [c.end for c in lane.compiles]), start + NARROWEST * width)
        begin = position(lane, [c.begin for c in lane.compiles])
        row = np.array([c.row for c in lane.compiles])
        waited = np.array([c.wait > 0 for c in lane.compiles]) & (start - begin > NARROWEST / 2 * width)
        _group(groups, "waiting", begin[waited], start[waited], row[waited], (i, lane.rows), width)
        alone = np.array([id(c) in own for c in lane.compiles])
        classes = np.array([c.cls for c in lane.compiles])
        for cls in dict.fromkeys(classes):
            mine = (classes == cls) & ~alone
            _group(groups, str(cls), start[mine], end[mine], row[mine], (i, lane.rows), width)
        for j in np.flatnonzero(alone):
            gid = f"compile-{len(titles)}"
            titles[gid] = title(lane.compiles[j], lane)
            axes.add_patch(_rectangle(lane.compiles[j], start[j], end[j], (i, lane.rows), width, gid))
    counts = {cls: count for cls, (count, _, _) in timeline.by_class().items()}
    for (cls, hatched), corners in groups.items():
        style = WAITING if cls == "waiting" else look(cls)
        rare = 3 + 1 / (1 + counts.get(cls, 0))  # what is rare lies above what is frequent
        axes.add_artist(_patch(np.concatenate(corners), style, hatched, zorder=2 if cls == "waiting" else rare))
    return titles


def boxes(
    left: np.ndarray, right: np.ndarray, bottom: np.ndarray | float, height: float, style: Look, hatched: bool
) -> PathPatch:
    """Boxes of one look as one artist: thousands of them cost what a few do."""
    return _patch(_corners(left, right, bottom, height), style, hatched, zorder=2)


def _corners(left: np.ndarray, right: np.ndarray, bottom: np.ndarray | float, height: float) -> np.ndarray:
    corners = np.empty((len(left), 4, 2))
    corners[:, 0, 0] = corners[:, 3, 0] = left
    corners[:, 1, 0] = corners[:, 2, 0] = right
    corners[:, 0, 1] = corners[:, 1, 1] = bottom
    corners[:, 2, 1] = corners[:, 3, 1] = bottom + height
    return corners


def _patch(corners: np.ndarray, style: Look, hatched: bool, zorder: float) -> PathPatch:
    return PathPatch(
        Path.make_compound_path_from_polys(corners),
        facecolor=style.colour,
        edgecolor="white" if hatched else "none",
        linewidth=0.4 if hatched else 0.0,
        hatch=style.hatch if hatched else None,
        zorder=zorder,
    )


def _place(lane: int, row: int, rows: int) -> tuple[float, float]:
    height = 0.68 / rows
    return lane - 0.34 + row * height, height


def _group(
    groups: Boxes, cls: str, x0: np.ndarray, x1: np.ndarray, row: np.ndarray, lane: tuple[int, int], width: float
) -> None:
    """Adds boxes of one class and lane; those less than a pixel apart become one: what the eye sees anyway."""
    for r in np.unique(row):
        low, high = x0[row == r], np.maximum.accumulate(x1[row == r])
        apart = np.flatnonzero(low[1:] - high[:-1] >= width / PIXELS) + 1
        low, high = low[np.r_[0, apart]], high[np.r_[apart - 1, len(high) - 1]]
        y, height = _place(lane[0], int(r), lane[1])
        corners = _corners(low, high, y, height)
        wide = high - low > HATCHED * width
        for hatched in (True, False):
            if (wide == hatched).any():
                groups[cls, hatched].append(corners[wide == hatched])


def _rectangle(c: Compile, x0: float, x1: float, lane: tuple[int, int], width: float, gid: str) -> Rectangle:
    style = look(c.cls)
    wide = x1 - x0 > HATCHED * width
    y, height = _place(lane[0], c.row, lane[1])
    return Rectangle(
        (x0, y),
        x1 - x0,
        height,
        facecolor=style.colour,
        edgecolor="white" if wide else "none",
        linewidth=0.4 if wide else 0.0,
        hatch=style.hatch if wide else None,
        zorder=3,
        gid=gid,
    )


def _label(lane: Lane, lanes: int) -> str:
    if not lane.device or lanes > MANY:
        return clean(lane.name, 22)
    return f"{clean(lane.name, 22)}\n{clean(lane.device, 12)}"


def title(c: Compile, lane: Lane) -> str:
    """What a compile says of itself when pointed at."""
    lines = [f"{look(c.cls).label}: {c.frame}", f"{lane.name}, {seconds(c.seconds)} from {c.start:.2f} s"]
    if c.step is not None:
        lines[1] += f", step {c.step}"
    if c.wait > 0.005:
        lines.append(f"waited {seconds(c.wait)} before")
    if c.change:
        lines.append(c.change)
    if where := c.source or (f"{c.file}:{c.line}" if c.file else None):
        lines.append(where)
    if c.cache_size is not None and c.limit:
        lines.append(f"cache {c.cache_size} of {c.limit}")
    return "\n".join(clean(line, 200) for line in lines)


def with_titles(svg: str, titles: dict[str, str]) -> str:
    """The SVG with a hover title in each group that has one."""

    def add(match: re.Match[str]) -> str:
        return f"{match[0]}<title>{escape(titles[match[1]])}</title>" if match[1] in titles else match[0]

    return re.sub(r'<g id="(compile-\d+)">', add, svg)
