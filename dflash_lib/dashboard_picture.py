"""The dashboard as it ended: one PNG, and one HTML file that needs neither a kernel nor the internet."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from .atomic import write_bytes, write_text
from .dashboard_state import Board
from .dashboard_view import DASHES, LANE_COLOURS, amount, duration, merged, page, plural, waiting
from .timeline_style import WAITING, look, scale

_LINES = {"": "-", "6 3": "--", "2 2": ":", "8 3 2 3": "-."}


def png(board: Board, title: str) -> bytes:
    """Loss of every lane, compiles of every lane, and a line of numbers a lane, as a PNG (about 1000 x 600 pixels).

    Never touches pyplot: this runs in a thread of its own, beside whatever the notebook draws.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = list(board.lanes.values())
    shown = lanes[:16]
    height = 4.6 + 0.17 * len(shown)
    figure = Figure(figsize=(10, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=[4.0, 0.2 + 0.17 * len(shown)], width_ratios=[1, 1])
    _draw_losses(figure.add_subplot(grid[0, 0]), board)
    _draw_compiles(figure.add_subplot(grid[0, 1]), board)
    _draw_numbers(figure.add_subplot(grid[1, :]), board, len(lanes) - len(shown))
    compiles = plural(len(board.compiles), "compile")
    figure.suptitle(
        _plain(f"{title}: {board.state}, step {board.step:,}, {duration(board.now)}, {compiles}"), fontsize=11
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def _draw_losses(axes: Any, board: Board) -> None:
    for i, lane in enumerate(board.lanes.values()):
        points = lane.losses.points()
        if points:
            x, y = zip(*points, strict=True)
            style = {"color": LANE_COLOURS[i % len(LANE_COLOURS)], "ls": _LINES[DASHES[i // len(LANE_COLOURS) % 4]]}
            axes.plot(x, y, label=_plain(lane.name), lw=1.4, marker="." if len(x) < 3 else None, **style)
    scale(axes, [y for lane in board.lanes.values() for _, y in lane.losses.points()], "loss, nats a token")
    axes.set_xlabel("optimizer step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if axes.lines and len(axes.lines) <= 8:
        axes.legend(fontsize=8, frameon=False)


def _draw_compiles(axes: Any, board: Board) -> None:
    names = [*board.lanes, *sorted({c.thread for c in board.compiles} - set(board.lanes))]
    rows = {name: i for i, name in enumerate(names)}
    now = max(board.now, 1e-3)
    bars: dict[str, list[tuple[float, float, int]]] = {}
    for c, end, _ in merged(board.compiles, now / 400):
        bars.setdefault(c.cls, []).append((c.start, max(end - c.start, now / 400), rows[c.thread]))
    waits = waiting(board.compiles, now / 400)
    if waits:
        spans = [(end - start, start, rows[thread]) for thread, start, end in waits]
        wide, left, row = (list(column) for column in zip(*spans, strict=True))
        axes.barh(row, wide, left=left, height=0.25, color=WAITING.colour, label=WAITING.label)
    for cls, spans in bars.items():
        axes.barh(
            [row for *_, row in spans],
            [width for _, width, _ in spans],
            left=[start for start, *_ in spans],
            height=0.6,
            color=look(cls).colour,
            hatch=look(cls).hatch or None,
            edgecolor="white",
            linewidth=0,
            label=look(cls).label,
        )
    axes.set_xlim(0, now)
    axes.set_ylim(max(len(names), 4) - 0.4, -0.6)  # one lane's bars do not fill the plot
    every = max(1, len(names) // 16)
    axes.set_yticks(range(0, len(names), every), [_plain(name) for name in names[::every]], fontsize=8)
    axes.set_xlabel("seconds since the run started")
    if bars:
        axes.legend(fontsize=8, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderpad=0)


def _draw_numbers(axes: Any, board: Board, left_out: int) -> None:
    axes.axis("off")
    lines = []
    for lane in list(board.lanes.values())[:16]:
        loss = "–" if lane.loss is None else f"{lane.loss:.3f}"
        first = lane.losses.points()[:1]
        began = f" (from {first[0][1]:.3f})" if first else ""
        lines.append(
            f"{lane.name:<11.11} {lane.device or '':<7.7} {lane.words:<24.24} step {lane.step:<6} loss {loss}{began}  "
            f"{amount(lane.tokens_per_second):>5} tokens/s at the end  {plural(lane.compiles, 'compile')}, "
            f"{duration(lane.compile_seconds)}"
        )
    if left_out:
        lines.append(f"... and {left_out} more lanes")
    if board.evaluations:
        _, name, tau = board.evaluations[-1]
        lines.append(f"acceptance length {tau:.2f} ({name})")
    if board.alarm_count:
        lines.append(f"{plural(board.alarm_count, 'alarm')}, the last: {board.alarms[-1][2][:100]}")
    axes.text(0, 1, _plain("\n".join(lines)), va="top", family="monospace", fontsize=8, transform=axes.transAxes)


def _plain(text: str) -> str:
    """Text that matplotlib draws as it stands: no mathematics between dollars, no half surrogates, no NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd").replace("$", r"\$")


def save(board: Board, run_dir: str | os.PathLike[str], title: str, picture: bytes | None = None) -> list[Path]:
    """Writes ``loss.png`` and ``dashboard.html`` into the run folder and returns their paths."""
    folder = Path(run_dir)
    picture = png(board, title) if picture is None else picture
    html = page(board, title)
    return [write_bytes(folder / "loss.png", picture), write_text(folder / "dashboard.html", html)]
