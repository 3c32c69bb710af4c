"""How the dashboard looks: a Board as pieces of HTML and inline SVG, legible in dark and light themes (no widgets)."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence

from .dashboard_state import RECENT, WORDS, Board, Compile, Lane
from .timeline_style import CLASS_LOOKS, WAITING, look, spans_a_decade

# One hue a lane, told apart with common colour blindness and readable on white and on near-black; a dash as well.
LANE_COLOURS = ("#3d8bd4", "#d9822b", "#1f9e7a", "#c76bb0", "#8a7be0", "#a8932a", "#d3574e", "#5aa6b8")
DASHES = ("", "6 3", "2 2", "8 3 2 3")
STYLE = """<style>
.df {font: 13px/1.45 var(--jp-ui-font-family, system-ui, sans-serif); color: var(--jp-ui-font-color1, #222)}
.df table {border-collapse: collapse; width: 100%; margin: 4px 0}
.df th, .df td {padding: 3px 10px 3px 0; text-align: left; vertical-align: middle; white-space: nowrap;
  border-bottom: 1px solid var(--jp-border-color2, #ddd); color: inherit; background: none}
.df th {font-weight: 500; color: var(--jp-ui-font-color2, #555); font-size: 12px}
.df td.n, .df th.n {text-align: right; font-variant-numeric: tabular-nums}
.df td.why {white-space: normal; min-width: 14em; max-width: 34em; font-size: 12px; overflow-wrap: anywhere}
.df .chip {display: inline-block; padding: 0 7px; border-radius: 9px; border: 1px solid currentColor; font-size: 12px}
.df .good {color: var(--jp-success-color1, #1b7f3b)} .df .bad {color: var(--jp-error-color1, #c62828)}
.df .busy {color: var(--jp-brand-color1, #1565c0)} .df .wait {color: var(--jp-warn-color1, #b35c00)}
.df .quiet {color: var(--jp-ui-font-color2, #666)}
.df .note {color: var(--jp-warn-color1, #b35c00); font-size: 12px; white-space: normal; max-width: 24em}
.df .small {font-size: 12px; color: var(--jp-ui-font-color2, #555)}
.df svg {display: block; max-width: 100%; height: auto}
.df svg text {fill: var(--jp-ui-font-color1, #222); font: 11px var(--jp-ui-font-family, system-ui, sans-serif)}
.df svg .bar {stroke: var(--jp-ui-font-color2, #777); stroke-width: 0.4}
.df svg .axis {stroke: var(--jp-ui-font-color3, #999)}
.df svg .grid {stroke: var(--jp-border-color2, #ddd)}
.df .scroll {overflow-x: auto} .df ul {margin: 2px 0; padding-left: 18px}
</style>"""

PAGE_STYLE = """<style>
:root {color-scheme: light dark}
body {margin: 16px auto; max-width: 1100px; padding: 0 12px; background: var(--jp-layout-color1, #fff)}
@media (prefers-color-scheme: dark) {:root {--jp-layout-color1: #111; --jp-ui-font-color1: #e6e6e6;
  --jp-ui-font-color2: #b0b0b0; --jp-ui-font-color3: #8a8a8a; --jp-border-color2: #3a3a3a; --jp-success-color1: #5ec27d;
  --jp-error-color1: #ff7b72; --jp-brand-color1: #6cb2ff; --jp-warn-color1: #e8a24a}}
</style>"""


def text(value: object) -> str:
    """Any text, safe inside HTML: half surrogate pairs and NUL (which break JSON and parsers) are shown as U+FFFD."""
    clean = str(value).encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")
    return html.escape(clean, quote=True)


def duration(seconds: float | None) -> str:
    """``0.8 s``, ``1:23``, ``2:05:09``; a dash when unknown."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}" if minutes else f"{rest} s"


def amount(value: float | None) -> str:
    """Three significant figures with a suffix: ``987``, ``12.3k``, ``4.56M``."""
    if value is None:
        return "–"
    value = float(f"{value:.3g}")  # first, so that 999.6 is 1k
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def plural(number: int, noun: str) -> str:
    """``1 alarm``, ``2 alarms``."""
    return f"{number} {noun}" + ("s" if number != 1 else "")


# --- pieces ---------------------------------------------------------------------------------------------------------
def header(board: Board, title: str) -> str:
    """The run in one line: what it is, what it is doing, since when."""
    paused = board.state == "running" and {lane.state for lane in board.drafters} == {"paused"}
    words, tone = WORDS.get("paused" if paused else board.state, (board.state, "quiet"))
    error = f'<div class="bad">{text(board.error)}</div>' if board.error else ""
    attempt = f" · attempt {board.attempt}" if board.attempt > 1 else ""
    memory = f" · {board.host_gib:.1f} GiB of host memory" if board.host_gib is not None else ""
    return (
        f'<div class="df"><b>{text(title)}</b> <span class="chip {tone}">{text(words)}</span> '
        f'<span class="small">{duration(board.now)}{attempt}{memory}</span>{error}</div>'
    )


def label(board: Board) -> str:
    """``step 34 of 60 · 1:20 left``."""
    of = f" of {board.steps:,}" if board.steps else ""
    left = board.seconds_left()
    time_left = f" · {duration(left)} left" if left is not None else ""
    return f'<span class="df small">step {board.step:,}{of}{time_left}</span>'


def lanes(board: Board) -> str:
    """The table with one row a lane."""
    if not board.lanes:
        return '<div class="df small">no thread has started yet</div>'
    head = "".join(
        f"<th{' class=n' if number else ''}>{name}</th>"
        for name, number in (
            *(("thread", 0), ("state", 0), ("step", 1), ("loss", 1), ("", 0), (f"tokens/s,<br>last {RECENT} steps", 1)),
            *(("GPU memory,<br>GiB", 1), ("compiles<br>(recompiles)", 1), ("compile<br>time", 1), ("waited", 1)),
            ("last reason", 0),
        )
    )
    rows = "".join(_lane_row(lane, i) for i, lane in enumerate(board.lanes.values()))
    return f'<div class="df scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _lane_row(lane: Lane, index: int) -> str:
    colour = LANE_COLOURS[index % len(LANE_COLOURS)]
    tone = WORDS.get(lane.state, ("", "quiet"))[1]
    note = f'<div class="note">{text(lane.note)}</div>' if lane.note else ""
    loss = "–" if lane.loss is None else f"{lane.loss:.3f}"
    memory = "–" if lane.memory_gib is None else f"{lane.memory_gib:.2f}"
    compiles = f"{lane.compiles}" + (f" ({lane.recompiles})" if lane.recompiles else "")
    why = lane.error or lane.last_reason or ""
    return (
        f'<tr data-lane="{text(lane.name)}"><td><b style="color:{colour}">▍</b>{text(lane.name)} '
        f'<span class="small">{text(lane.device or "")}</span></td>'
        f'<td><span class="chip {tone}" title="{text(lane.detail or "")}">{text(lane.words)}</span>{note}</td>'
        f'<td class="n">{lane.step}</td>'
        f'<td class="n">{loss}</td><td>{_spark(lane, colour)}</td><td class="n">{amount(lane.tokens_per_second)}</td>'
        f'<td class="n">{memory}</td><td class="n">{compiles}</td><td class="n">{duration(lane.compile_seconds)}</td>'
        f'<td class="n">{duration(lane.wait_seconds)}</td>'
        f'<td class="why{" bad" if lane.error else ""}">{text(why[:300])}</td></tr>'
    )


def _spark(lane: Lane, colour: str, width: int = 90, height: int = 20) -> str:
    points = lane.losses.points()
    points = points[:: len(points) // 60 + 1]
    if len(points) < 2:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    path = _path(points, (points[0][0], points[-1][0]), (low, high), (1, width - 1), (height - 2, 2))
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.3"/></svg>'
    )


def losses(board: Board, width: int = 440, height: int = 190) -> str:
    """Every lane's loss against the optimizer step, in one plot."""
    curves = [(i, lane, lane.losses.points()) for i, lane in enumerate(board.lanes.values())]
    fewer = len(curves) // 8 + 1
    curves = [(i, lane, points[::fewer]) for i, lane, points in curves if points]
    left, right, top, bottom = 44, width - 18, 18, height - 30
    last = max([x for *_, points in curves for x, _ in points[-1:]], default=1.0)
    ahead = min(board.steps or last, max(10.0, last * 1.25))  # room for the steps that come next
    x_range = (min([p[0][0] for *_, p in curves], default=0.0), max(last, ahead))
    values = [y for *_, points in curves for _, y in points]
    low, high = min(values, default=0.0), max(values, default=1.0)
    scale: Callable[[float], float] = math.log10 if spans_a_decade(values) else float
    marks = [(scale(v), f"{v:g}") for v in (ticks(low, high, 4) if scale is float else log_ticks(low, high))]
    y_range = (scale(low), scale(high))
    curves = [(i, lane, [(x, scale(y)) for x, y in points]) for i, lane, points in curves]
    y_name = "loss, nats a token" + (" (log)" if scale is not float else "") if values else "loss: no step yet"
    y_axis = (y_range, marks if values else [])
    frame = _axes(x_range, y_axis, (left, right), (bottom, top), "optimizer step", y_name)
    lines = "".join(
        f'<path d="{_path(points, x_range, y_range, (left, right), (bottom, top))}" fill="none" stroke-width="1.6" '
        f'stroke="{LANE_COLOURS[i % len(LANE_COLOURS)]}" stroke-dasharray="{DASHES[i // len(LANE_COLOURS) % 4]}">'
        f"<title>{text(lane.name)}</title></path>"
        for i, lane, points in curves
    )
    return _plot(width, height, frame + lines)


def compiles(board: Board, width: int = 440) -> str:
    """The compile timeline so far: a lane a thread, every compile where and as long as it happened."""
    names = [*board.lanes, *sorted({c.thread for c in board.compiles} - set(board.lanes))]
    step = 18 if len(names) <= 16 else max(3, 288 // len(names))
    left, right, top = 92, width - 18, 18
    bottom = top + step * max(1, len(names))
    height = bottom + 46
    now = max(board.now, 1e-3)
    no_marks: tuple[tuple[float, float], list[tuple[float, str]]] = ((0.0, 1.0), [])
    axis = _axes((0.0, now), no_marks, (left, right), (bottom, top), "seconds since the run started", "")
    labels = "".join(
        f'<text x="{left - 6}" y="{top + step * (i + 0.5) + 4:.1f}" text-anchor="end">{text(name[:14])}</text>'
        for i, name in enumerate(names)
        if step >= 12 or i % (12 // step + 1) == 0
    )
    rows = {name: i for i, name in enumerate(names)}
    scale = (right - left) / now
    running = [
        Compile(lane.name, lane.since, None, "first", lane.detail or "a compile")
        for lane in board.lanes.values()
        if lane.state == "compiling" and not board.ended
    ]
    still = [
        (lane.name, lane.since, now)
        for lane in board.lanes.values()
        if lane.state == "waiting_compile" and not board.ended
    ]
    groups = [*merged(board.compiles, 1 / scale), *((c, now, 1) for c in running)]
    bars = "".join(
        _bar(c, end, left, scale, top + step * rows[c.thread], step, count if len(groups) < 600 else None)
        for c, end, count in groups
    )
    waits = "".join(
        f'<rect x="{left + max(0.0, start) * scale:.1f}" y="{top + step * (rows[thread] + 0.3):.1f}" '
        f'width="{(end - max(0.0, start)) * scale:.1f}" height="{step * 0.4:.1f}" fill="{WAITING.colour}"/>'
        for thread, start, end in [*waiting(board.compiles, 1 / scale), *still]
    )
    classes = {c.cls for c in board.compiles}
    seen = [look(cls) for cls in CLASS_LOOKS if cls in classes][:4] + ([WAITING] if waits else [])
    places = [left]
    for one in seen:
        places.append(places[-1] + 28 + 6 * len(one.label))
    legend = "".join(
        f'<rect x="{x}" y="{height - 14}" width="9" height="9" fill="{one.colour}"/>'
        f'<text x="{x + 13}" y="{height - 5}">{one.label}</text>'
        for x, one in zip(places, seen, strict=False)
    )
    total = sum(lane.compile_seconds for lane in board.lanes.values())
    caption = f'<text x="{left}" y="11">{plural(len(board.compiles), "compile")}, {duration(total)} in all</text>'
    return _plot(width, height, caption + axis + labels + waits + bars + legend)


def merged(compiles: Sequence[Compile], gap: float) -> list[tuple[Compile, float, int]]:
    """Compiles as (first of a group, the group's end, how many): what would touch on the screen is drawn once.

    ``gap`` is a pixel's worth of seconds. Groups are of one thread and one class; a thread's drawn bars then number
    at most the pixels of the axis, however many compiles there were.
    """
    open_groups: dict[tuple[str, str], list] = {}
    groups: list[list] = []
    for c in sorted(compiles, key=lambda c: c.start):
        end = c.start + (c.seconds or 0.0)
        group = open_groups.get((c.thread, c.cls))
        if group is not None and c.start <= group[1] + gap and end - group[0].start < 8 * gap:
            group[1], group[2] = max(group[1], end), group[2] + 1
        else:
            open_groups[c.thread, c.cls] = group = [c, end, 1]
            groups.append(group)
    return [(c, end, count) for c, end, count in groups]


def waiting(compiles: Sequence[Compile], gap: float) -> list[tuple[str, float, float]]:
    """(thread, start, end) of what was waited before compiles; in a thread, what is nearer than ``gap`` is one."""
    spans: dict[str, list[list[float]]] = {}
    for c in sorted((c for c in compiles if c.wait > gap), key=lambda c: c.start):
        own = spans.setdefault(c.thread, [])
        if own and c.start - c.wait <= own[-1][1] + gap:
            own[-1][1] = c.start
        else:
            own.append([c.start - c.wait, c.start])
    return [(thread, start, end) for thread, own in spans.items() for start, end in own]


def _bar(c: Compile, end: float, left: float, scale: float, y: float, height: float, count: int | None) -> str:
    """A rectangle; ``count`` is how many compiles it stands for (None: too many bars for a title on each)."""
    colour, words = look(c.cls).colour, look(c.cls).label
    x, wide = left + c.start * scale, max(1.5, (end - c.start) * scale)
    if c.seconds is None:
        paint = f'fill="{colour}" fill-opacity="0.3" stroke="{colour}" stroke-dasharray="3 2"'
        title = f"{c.thread}: compiling {c.frame}, {duration(end - c.start)} so far"
    else:
        paint = f'class="bar" fill="{colour}"'
        many = f"{count} compiles, the first: " if count and count > 1 else ""
        title = f"{c.thread}: {many}{c.frame}, {words}, {c.seconds:.2f} s" + (f"\n{c.reason}" if c.reason else "")
    inner = max(1.0, height - 4)
    place = f'x="{x:.1f}" y="{y + (height - inner) / 2:.1f}" width="{wide:.1f}" height="{inner:.1f}"'
    return (
        f"<rect {place} {paint}/>"
        if count is None
        else f"<rect {place} {paint}><title>{text(title[:500])}</title></rect>"
    )


def findings(board: Board, most: int = 6) -> str:
    """Acceptance measured and estimated, checkpoints, and alarms, newest first."""
    parts = []
    estimates = {lane.name: f"{lane.estimated_tau:.2f}" for lane in board.lanes.values() if lane.estimated_tau}
    if estimates:
        one = len(set(estimates.values())) == 1
        items = next(iter(estimates.values())) if one else ", ".join(f"{text(n)} {t}" for n, t in estimates.items())
        parts.append(
            f'<div title="1 + a1 + a1 a2 + ..., a_i the share of right tokens in slot i">estimated acceptance length: '
            f'{items} <span class="small">(each slot\'s accuracy on the rows of the last {RECENT} steps)</span></div>'
        )
    if board.evaluations:
        newest = board.evaluations[-most:][::-1]
        items = ", ".join(f"{text(name)} {tau:.2f}" + (f" at step {s}" if s else "") for s, name, tau in newest)
        parts.append(f"<div><b>acceptance length</b> (tokens a target pass, by decoding): {items}</div>")
    if board.checkpoints:
        step, path = board.checkpoints[-1]
        parts.append(
            f'<div class="small">{plural(len(board.checkpoints), "checkpoint")}, the last at step {text(step)}: '
            f"{text(path)}</div>"
        )
    if board.alarm_count:
        items = "".join(
            f"<li>{text(thread)}, {duration(t)}: {text(message[:300])}</li>"
            for t, thread, message in list(board.alarms)[-most:][::-1]
        )
        parts.append(f'<div class="bad"><b>{plural(board.alarm_count, "alarm")}</b><ul>{items}</ul></div>')
    return f'<div class="df" role="status">{"".join(parts)}</div>'


def page(board: Board, title: str) -> str:
    """The whole dashboard as one HTML file that needs nothing else."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{text(title)}</title>{PAGE_STYLE}'
        f"<body>{snapshot(board, title)}</body></html>\n"
    )


def snapshot(board: Board, title: str) -> str:
    """Everything at once, as a fragment of HTML with its style."""
    plots = f'<div style="display:flex;flex-wrap:wrap;gap:16px">{losses(board)}{compiles(board)}</div>'
    return f"{STYLE}{header(board, title)}{label(board)}{lanes(board)}{plots}{findings(board)}"


# --- drawing --------------------------------------------------------------------------------------------------------
def _plot(width: int, height: int, inside: str) -> str:
    return f'<div class="df"><svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">{inside}</svg></div>'


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers inside [low, high], about ``about`` of them."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    size = 10 ** math.floor(math.log10(span / about))
    size *= next((m for m in (1, 2, 5, 10) if span / (size * m) <= about), 10)
    first = math.ceil(low / size)
    return [i * size for i in range(first, math.floor(high / size + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten inside [low, high], both above 0."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]


def _path(
    points: Iterable[tuple[float, float]],
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    x_pixels: tuple[float, float],
    y_pixels: tuple[float, float],
) -> str:
    def to(value: float, span: tuple[float, float], pixels: tuple[float, float]) -> float:
        share = (value - span[0]) / (span[1] - span[0]) if span[1] > span[0] else 0.5
        return pixels[0] + share * (pixels[1] - pixels[0])

    return "M" + "L".join(f"{to(x, x_range, x_pixels):.1f} {to(y, y_range, y_pixels):.1f}" for x, y in points)


def _axes(
    x_range: tuple[float, float],
    y_axis: tuple[tuple[float, float], list[tuple[float, str]]],
    x_pixels: tuple[float, float],
    y_pixels: tuple[float, float],
    x_name: str,
    y_name: str,
) -> str:
    (left, right), (bottom, top) = x_pixels, y_pixels
    parts = [f'<path class="axis" fill="none" d="M{left} {top}V{bottom}H{right}"/>']
    for value in ticks(*x_range):
        x = left + (value - x_range[0]) / max(x_range[1] - x_range[0], 1e-9) * (right - left)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 13}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text x="{(left + right) / 2:.0f}" y="{bottom + 26}" text-anchor="middle">{x_name}</text>')
    (low, high), marks = y_axis
    for value, words in marks:
        y = bottom + (value - low) / max(high - low, 1e-9) * (top - bottom)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{right}"/>')
        parts.append(f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">{words}</text>')
    if y_name:
        parts.append(f'<text x="{left}" y="{top - 7}">{y_name}</text>')
    return "".join(parts)
