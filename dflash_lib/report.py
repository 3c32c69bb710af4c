"""Runs compared: a row of numbers a run, a curve a run, by any metric, as a polars frame, plain text or a picture."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .atomic import replace_file
from .config import ConfigError
from .events import read
from .run_folder import json_or_none, read_status, run_state
from .timeline_style import scale

if TYPE_CHECKING:
    import polars

Runs = str | os.PathLike[str] | Iterable[str | os.PathLike[str] | Mapping[str, Any]]
LAST = 10  # steps that a run's final loss is the mean of, as is its first
_UNITS = {
    "loss": "loss, nats a token",
    "loss_all": "loss of all threads, nats a token",
    "loss_first": "loss of the first steps, nats a token",
    "lr": "learning rate",
    "grad_norm": "gradient norm, before clipping",
    "compile_seconds": "seconds of compiling",
    "wait_seconds": "seconds of waiting for other threads' compiles",
    "tokens_per_s": "tokens a second",
}
_COLOURS = ("#3d8bd4", "#d9822b", "#1f9e7a", "#c76bb0", "#8a7be0", "#a8932a", "#d3574e", "#5aa6b8")


def folders(runs: Runs) -> list[Path]:
    """Run folders from what people have: one, a sweep's folder (all its runs), a list of them, a sweep's records.

    Raises:
        ConfigError: a folder that holds no run, or none at all.
    """
    if isinstance(runs, str | os.PathLike):
        folder = Path(runs)
        if _is_run(folder):
            return [folder]
        plan = json_or_none(folder / "sweep.json")
        if isinstance(plan, dict):
            return [folder / run["run"] for run in plan["runs"]]
        found = sorted(f for f in folder.glob("*/") if _is_run(f))
        if not found:
            raise ConfigError(f"{folder}: holds no run; name a run folder, or one that holds some")
        return found
    named = [Path(run["run_dir"] if isinstance(run, Mapping) else run) for run in runs]
    return [inner for folder in named for inner in ([folder] if not folder.is_dir() else folders(folder))]


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("status.json", "events.jsonl", "config.json", "launch.json"))


def summary(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """One run in numbers; null where the run has none.

    ``loss_first`` and ``loss`` are means over all threads and the first and last ten steps; ``tokens_per_s`` is all
    threads' tokens over the time from the first step's beginning to the last one's end; ``tau_<set>`` and
    ``speedup_<set>`` are those of ``acceptance.json``; seconds are seconds.
    """
    folder = Path(run_dir)
    log = folder / "events.jsonl"
    events = read(log) if log.exists() else []
    steps = [e for e in events if e["kind"] == "step" and e["step"] is not None]
    compiles = [e for e in events if e["kind"] == "compile"]
    status = read_status(folder) or {}
    last = max((e["step"] for e in steps), default=0)
    first = min((e["step"] for e in steps), default=0)
    wall = max((e["t"] for e in steps), default=0.0) - min((e["t"] - _value(e, "seconds") for e in steps), default=0.0)
    tokens = sum(_value(e, "tokens") for e in steps)
    error = status.get("error") or {}
    row: dict[str, Any] = {
        "run": folder.name,
        "state": run_state(folder),
        "step": last,
        "loss": _mean(e.get("loss") for e in steps if e["step"] > last - LAST),
    }
    acceptance = json_or_none(folder / "acceptance.json") or {}
    for part in acceptance.get("sets", ()):
        row[f"tau_{part['name']}"], row[f"speedup_{part['name']}"] = part.get("tau_mean"), part.get("speedup")
    row |= {
        "threads": len({(e["node"], e["thread"]) for e in steps}),
        "loss_first": _mean(e.get("loss") for e in steps if e["step"] < first + LAST),
        "tokens_per_s": tokens / wall if wall > 0 else None,
        "seconds": max((e["t"] for e in events), default=None),
        "compiles": len(compiles),
        "recompiles": sum(e.get("cls") in ("recompile", "race_duplicate", "eager_fallback") for e in compiles),
        "compile_seconds": sum(_value(e, "seconds") for e in compiles),
        "wait_seconds": sum(_value(e, "wait_seconds") for e in compiles),
        "alarms": sum(e["kind"] == "alarm" for e in events),
        "error": f"{error.get('thread')}: {error.get('type')}: {error.get('message')}" if error else None,
    }
    return row


def rows(runs: Runs) -> list[dict[str, Any]]:
    """:func:`summary` of each run, with the parameters in which the runs differ after the run's name."""
    found = folders(runs)
    settings = [_settings(folder) for folder in found]
    names = dict.fromkeys(name for setting in settings for name in setting)
    varying = [n for n in names if len({json.dumps(s.get(n), default=str) for s in settings}) > 1]
    result = []
    for folder, setting in zip(found, settings, strict=True):
        numbers = summary(folder)
        name = numbers.pop("run")
        own = {n: v if isinstance(v := setting.get(n), int | float | str | None) else json.dumps(v) for n in varying}
        clash = {f"{n}_set" if n in numbers else n: v for n, v in own.items()}
        result.append({"run": name, **clash, **numbers})
    return result


def _settings(folder: Path) -> dict[str, Any]:
    """A run's configuration; for a notebook without one (or a run that never began), its parameters."""
    for name in ("config.json", "parameters.json"):
        value = json_or_none(folder / name)
        if isinstance(value, dict):
            return {n: v for n, v in value.items() if n not in ("run_dir", "resume", "runs_dir")}
    return (json_or_none(folder / "launch.json") or {}).get("parameters", {})


def frame(runs: Runs) -> polars.DataFrame:
    """:func:`rows` as a polars frame; ``pandas.DataFrame(frame.to_dicts())`` for pandas."""
    import polars

    return polars.from_dicts(_aligned(rows(runs)), infer_schema_length=None)


def history(runs: Runs, metric: str = "loss") -> polars.DataFrame:
    """A metric of every step: columns ``run, thread, step, t, <metric>``, the threads of a step side by side.

    Args:
        metric: any number that ``step`` events carry (``loss``, ``grad_norm``, ``lr``, ``seconds``, ``tokens``), or
            ``tokens_per_s``, a thread's tokens over its seconds.

    Raises:
        ConfigError: no run has such a metric; the line names those there are.
    """
    import polars

    found, available = [], set()
    for folder in folders(runs):
        log = folder / "events.jsonl"
        for event in read(log) if log.exists() else []:
            if event["kind"] != "step" or event["step"] is None:
                continue
            if event.get("seconds") and isinstance(event.get("tokens"), int | float):
                event["tokens_per_s"] = event["tokens"] / event["seconds"]
            available |= {k for k, v in event.items() if isinstance(v, int | float) and not isinstance(v, bool)}
            if isinstance(event.get(metric), int | float):
                keys = {"run": folder.name, "thread": event["thread"], "step": event["step"], "t": event["t"]}
                found.append({**keys, metric: float(event[metric])})
    if not found:
        there = (
            ", ".join(sorted(available - {"v", "seq", "attempt", "node", "t", "step"})) or "none: no run took a step"
        )
        raise ConfigError(f"metric: {metric}: no run has it; there is {there}")
    return polars.from_dicts(found, infer_schema_length=None)


def table(runs: Runs, columns: Sequence[str] | None = None) -> str:
    """:func:`rows` as aligned plain text; ``columns`` picks some.

    Columns that are empty everywhere are left out; what several runs have in common is said once, below the table.
    """
    found = _aligned(rows(runs))
    given = [n for n in found[0] if any(row[n] is not None for row in found)]
    common = {n: found[0][n] for n in given if len(found) > 1 and all(row[n] == found[0][n] for row in found)}
    names = list(columns or [n for n in given if n not in common])
    heads = zip(*(_halves(name) for name in names), strict=True)
    cells = [*map(list, heads), *([_cell(row.get(name)) for name in names] for row in found)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    numeric = [all(isinstance(row.get(n), int | float | None) for row in found) for n in names]
    lines = [
        "  ".join(
            c.rjust(w) if right else c.ljust(w) for c, w, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    ]
    same = "" if columns else ", ".join(f"{name} {_cell(value)}" for name, value in common.items())
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([*lines[:2], rule, *lines[2:], *([f"the same in all: {same}"] if same else [])])


def draw(runs: Runs, out: str | os.PathLike[str], metric: str = "loss", final: str | None = None) -> Path:
    """A picture of runs: ``metric`` by step, a curve a run (mean over its threads), and ``final`` of each run.

    Args:
        out: a file name ending in .png or .svg.
        metric: what :func:`history` can give.
        final: a column of :func:`rows`; None: the acceptance length where it was measured, else the final loss.
    """
    import polars
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    numbers = rows(runs)
    if final is None:
        final = next((n for row in numbers for n in row if n.startswith("tau_") and row[n] is not None), "loss")
    curves = history(runs, metric)
    curves = curves.group_by("run", "step").agg(polars.col(metric).mean()).sort("run", "step")
    figure = Figure(figsize=(10, max(3.6, 1.2 + 0.3 * len(numbers))), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[1.4, 1])
    labels = _labels([row["run"] for row in numbers])
    colours = {row["run"]: _COLOURS[i % len(_COLOURS)] for i, row in enumerate(numbers)}
    dashes = {row["run"]: ("-", "--", ":", "-.")[i // len(_COLOURS) % 4] for i, row in enumerate(numbers)}
    for (name,), curve in curves.group_by("run", maintain_order=True):
        left.plot(curve["step"], curve[metric], color=colours[name], ls=dashes[name], lw=1.3, label=labels[name])
    left.set_xlabel("optimizer step")
    left.xaxis.get_major_locator().set_params(integer=True)
    scale(left, curves[metric].drop_nulls(), _axis(metric))
    left.grid(alpha=0.3)
    if len(numbers) <= 12:
        left.legend(fontsize=7, frameon=False)
    for place, row in enumerate(numbers):  # points, not bars: losses differ by little, and none of them starts at zero
        value = row.get(final)
        if isinstance(value, int | float):
            right.plot(value, place, "o", color=colours[row["run"]])
            right.annotate(_cell(value), (value, place), (7, 0), textcoords="offset points", va="center", fontsize=8)
        else:
            right.text(0.02, place, row["state"], va="center", fontsize=8, transform=right.get_yaxis_transform())
    right.set_yticks(range(len(numbers)), [labels[row["run"]] for row in numbers], fontsize=8)
    right.set_ylim(len(numbers) - 0.5, -0.5)
    right.margins(x=0.25)
    right.grid(axis="y", alpha=0.3)
    right.set_xlabel(_axis(final))
    form = Path(out).suffix.removeprefix(".")
    return replace_file(out, lambda temporary: figure.savefig(temporary, dpi=110, format=form))


def _axis(column: str) -> str:
    """A metric, or a column of :func:`rows`, in words with its unit."""
    kind, _, group = column.partition("_")
    names = {"tau": "acceptance length, tokens a target pass", "speedup": "speed-up over plain decoding"}
    return f"{names[kind]} ({group})" if kind in names and group else _UNITS.get(column, column)


# --- small things ---------------------------------------------------------------------------------------------------
def _aligned(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row with every column, ``error`` last."""
    names = [n for n in dict.fromkeys(name for row in found for name in row) if n != "error"] + ["error"]
    return [{name: row.get(name) for name in names} for row in found]


def _value(event: Mapping[str, Any], name: str) -> float:
    value = event.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _mean(values: Iterable[Any]) -> float | None:
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return sum(numbers) / len(numbers) if numbers else None


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    line = " ".join(str(value).split())
    return line if len(line) <= 60 else line[:59] + "…"


def _halves(name: str) -> tuple[str, str]:
    """A column's name in two lines where it has two parts: ``("tokens", "per_s")``, ``("", "loss")``."""
    first, _, rest = name.partition("_")
    return (first, rest) if rest else ("", name)


def _labels(names: list[str]) -> dict[str, str]:
    """Names as a picture shows them: without a sweep's hash where they differ without it, and not as mathematics."""
    short = {name: re.sub(r"-[0-9a-f]{6}$", "", name) for name in names}
    kept = short if len(set(short.values())) == len(set(names)) else dict(zip(names, names, strict=True))
    return {name: label.replace("$", r"\$")[:48] for name, label in kept.items()}
