"""pyproject.toml is the one list of dependencies; everything else repeats it or is compared with it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The packages that the workspace is defined by.
DEFINING = {"torch", "triton", "jupyterlab", "ipywidgets", "matplotlib", "papermill"}


def declared() -> dict[str, Requirement]:
    lines = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["notebook"]
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def test_environment_yml_repeats_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip_section,) = (entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    *packages, editable = pip_section
    listed = {requirement.name: requirement for requirement in map(Requirement, packages)}
    assert set(listed) == DEFINING
    assert {name: listed[name].specifier for name in DEFINING} == {
        name: declared()[name].specifier for name in DEFINING
    }
    assert editable.startswith("-e .[")
    extras = editable.removeprefix("-e .[").removesuffix("]").split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    assert [entry.split(">=")[0] for entry in conda] == ["python", "pip"]


def pinned() -> dict[str, str]:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            pins[requirement.name.lower().replace("_", "-")] = specifier.version
    return pins


def test_constraints_satisfy_pyproject() -> None:
    pins = pinned()
    assert pins["torch"] == "2.13.0"
    assert pins["triton"] == "3.7.1"  # what torch 2.13.0's CUDA build asks for
    everything = PROJECT["dependencies"] + [
        line for extra in PROJECT["optional-dependencies"].values() for line in extra
    ]
    for requirement in map(Requirement, everything):
        name = requirement.name.lower().replace("_", "-")
        assert name in pins, f"{name} is not pinned"
        assert requirement.specifier.contains(pins[name]), f"{name} {pins[name]} is outside {requirement.specifier}"


def test_pins_admit_every_python_that_the_readme_names() -> None:
    """Debian 12 has 3.11.2. With one pin that refuses it, pip tries every release of everything, for a quarter hour."""
    pins, refused, seen = pinned(), [], 0
    for installed in metadata.distributions():
        if pins.get(installed.name.lower().replace("_", "-")) == installed.version.partition("+")[0]:
            seen += 1
            allowed = SpecifierSet(installed.metadata.get("Requires-Python") or "")
            refused += [
                f"{installed.name} on {python}" for python in ("3.11.2", "3.12.0", "3.13.0") if python not in allowed
            ]
    assert not refused and seen > 100


@pytest.mark.parametrize("module", ["dflash_lib", "dflash_lib.events", "dflash_lib.timeline", "dflash_lib.runs"])
def test_light_modules_load_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'papermill', 'polars'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_core_runs_without_notebook_packages() -> None:
    """Train, evaluate, regenerate and hazards import where jupyter, papermill, polars and matplotlib are absent."""
    code = (
        "import sys\n"
        "for name in ('IPython', 'ipywidgets', 'jupyterlab', 'papermill', 'polars', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "import dflash_lib.__main__, dflash_lib.threads, dflash_lib.evaluate, dflash_lib.data, dflash_lib.hazards\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_says_first_what_it_answers_how_long_it_takes_and_on_what(path: Path) -> None:
    cell = json.loads(path.read_text())["cells"][0]
    words = "".join(cell["source"])
    assert cell["cell_type"] == "markdown" and words.startswith(f"# {path.name[:2]} · ")
    assert [words.count(f"**{label}.** ") for label in ("Question", "How long", "On what")] == [1, 1, 1]


def test_no_module_is_named_after_nothing() -> None:
    names = {path.stem for path in (ROOT / "dflash_lib").glob("*.py")}
    assert not names & {"utils", "helpers", "misc", "common"}
    for path in (ROOT / "dflash_lib").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, f"{path.name} has more than one job"


def test_the_map_has_every_module_with_its_own_first_line() -> None:
    rows = [line for line in (ROOT / "docs" / "map.md").read_text().splitlines() if line.startswith("| `")]
    expected = set()
    for path in (ROOT / "dflash_lib").glob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring, f"{path.name} does not say its job"
        expected.add(f"| `{path.name}` | {docstring.splitlines()[0]} |")
    assert set(rows) == expected
    assert len(rows) == len(expected)
