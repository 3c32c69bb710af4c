"""What a sweep is to run: its file, its grid, the names of its folders; and what is refused before anything runs."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .config import ConfigError, RunConfig
from .run_folder import json_or_none, runs_root

Grid = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]
KEYS = ("notebook", "grid", "runs", "base", "out", "parallel", "gpus_per_run", "timeout")


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A sweep file as the arguments of :func:`dflash_lib.sweep.sweep`.

    Raises:
        ConfigError: it cannot be read, is no YAML, has a key that is unknown, or lacks one.
    """
    file = Path(path)
    try:
        plan = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(f"{file}: line {mark.line + 1 if mark else '?'} is not valid YAML") from None
    if not isinstance(plan, dict):
        raise ConfigError(f"{file}: holds no names and values")
    for key in plan:
        if key not in KEYS:
            raise ConfigError(f"{file}: {key}: is no key of a sweep{_meant(str(key), KEYS)}")
    if "notebook" not in plan or ("grid" in plan) == ("runs" in plan):
        raise ConfigError(f"{file}: needs notebook: and either grid: or runs:")
    if not isinstance(plan.get("base") or {}, dict):
        raise ConfigError(f"{file}: base: holds no names and values")
    for key in ("parallel", "gpus_per_run"):
        if key in plan and type(plan[key]) is not int:
            raise ConfigError(f"{file}: {key}: is not a whole number (given: {plan[key]!r:.60})")
    notebook = Path(str(plan["notebook"]))
    beside = file.parent / notebook
    grid = plan.pop("runs") if "runs" in plan else plan.pop("grid")
    defaults = {"out": runs_root("runs") / file.stem}
    return {
        **defaults,
        **plan,
        "grid": grid,
        "notebook": notebook if notebook.exists() or not beside.exists() else beside,
    }


def _meant(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def points(grid: Grid, base: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parameter sets of a grid: every combination of lists of values, or the sets of a list.

    Raises:
        ConfigError: it is no grid, it is empty, or it names a parameter that ``base`` has too.
    """
    if isinstance(grid, Mapping):
        for name, values in grid.items():
            if isinstance(values, str | bytes) or not isinstance(values, Sequence) or not values:
                raise ConfigError(f"grid: {name}: is not a list of values (given: {values!r:.60}); write [a, b]")
        values = [[_number(value) for value in column] for column in grid.values()]
        found = [dict(zip(grid, row, strict=True)) for row in itertools.product(*values)]
    elif isinstance(grid, Sequence) and not isinstance(grid, str) and all(isinstance(p, Mapping) for p in grid):
        found = [{name: _number(value) for name, value in point.items()} for point in grid]
    else:
        raise ConfigError("grid: is neither names with lists of values nor a list of parameter sets")
    if not found or found == [{}]:
        raise ConfigError("grid: is empty; name at least one parameter and its values")
    for point in found:
        if twice := set(point) & set(base):
            raise ConfigError(f"base: {sorted(twice)[0]}: is in the grid as well; leave it in one of them")
    return found


def _number(value: Any) -> Any:
    """YAML reads ``1e-4`` as text: a grid means the number."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value


def named(points: list[dict[str, Any]], base: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Folder name -> all parameters. The name shows what varies; a short hash of all values keeps others apart."""
    everywhere = {name for name in points[0] if len({json.dumps(p.get(name), default=str) for p in points}) == 1}
    named: dict[str, dict[str, Any]] = {}
    for point in points:
        parameters = {**base, **point}
        shown = {n: v for n, v in point.items() if n not in everywhere or len(points) == 1}
        words = ",".join(f"{n}={v:g}" if isinstance(v, float) else f"{n}={v}" for n, v in shown.items())
        digest = hashlib.sha256(json.dumps(parameters, sort_keys=True, default=str).encode()).hexdigest()[:6]
        named[(re.sub(r"[^A-Za-z0-9._=,+-]+", "_", words)[:80] or "run") + f"-{digest}"] = parameters
    return named


def check(notebook: Path, points: list[dict[str, Any]], base: Mapping[str, Any]) -> None:
    """Refuses what every run would refuse, before the first one starts.

    Raises:
        ConfigError: a line for each parameter that the notebook lacks, and each value that RunConfig would not take.
    """
    book = json_or_none(notebook)
    if not isinstance(book, dict) or "cells" not in book:
        raise ConfigError(f"notebook: {notebook} is no notebook that can be read")
    code = ["".join(cell.get("source", "")) for cell in book["cells"] if cell.get("cell_type") == "code"]
    tagged = [c for c in book["cells"] if "parameters" in c.get("metadata", {}).get("tags", ())]
    source = "".join(tagged[0]["source"]) if tagged else ""
    known = set(re.findall(r"^([A-Za-z_]\w*)\s*(?::[^=\n]+)?=", source, re.M))
    trains = any("RunConfig" in text for text in code)
    fields = set(RunConfig.model_fields) if trains else set()
    lines = []
    for where, names in (("grid", {n for point in points for n in point}), ("base", set(base))):
        for name in sorted(str(name) for name in names - known - fields):
            lines.append(f"{where}: {name}: is no parameter of {notebook.name}{_meant(name, known | fields)}")
    for point in points if trains else ():
        try:
            RunConfig.from_dict({name: value for name, value in {**base, **point}.items() if name in fields})
        except ConfigError as error:
            for line in str(error).splitlines():
                lines.append(f"{'base' if line.partition(':')[0] in base else 'grid'}: {line}")
    if lines:
        raise ConfigError("\n".join(dict.fromkeys(lines)))
