"""Every notebook as it is committed: no outputs, the kernel everybody has, isolation first, strict parameters."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from little_notebooks import ROOT

from dflash_lib.config import RunConfig

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_clean_and_takes_parameters(path: Path) -> None:
    book = nbformat.read(path, 4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert book.metadata.kernelspec.name == "python3"
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert book.cells[0].cell_type == "markdown", "it begins with its question"
    assert code[0].source.startswith("from dflash_lib import fx_patch\n\nfx_patch.install()"), (
        "before anything compiles"
    )
    assert ["parameters" in cell.metadata.get("tags", []) for cell in code] == [False, True] + [False] * (len(code) - 2)


def test_the_parameters_of_notebook_01_are_a_configuration() -> None:
    (path,) = (path for path in NOTEBOOKS if path.stem.startswith("01"))
    (cell,) = (cell for cell in nbformat.read(path, 4).cells if "parameters" in cell.metadata.get("tags", []))
    namespace: dict[str, object] = {}
    exec(cell.source, namespace)
    assert RunConfig.from_namespace(namespace, {"__builtins__"}).steps > 0
