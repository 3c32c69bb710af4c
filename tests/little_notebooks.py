"""Notebooks of two cells, written where a test wants them."""

from __future__ import annotations

from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]


def write(path: Path, parameters: str, *cells: str) -> Path:
    """A notebook with a tagged ``parameters`` cell and then ``cells``."""
    first = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
    book = nbformat.v4.new_notebook(cells=[first, *map(nbformat.v4.new_code_cell, cells)])
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    nbformat.write(book, path)
    return path


def outputs(path: Path) -> str:
    """Everything an executed notebook printed."""
    book = nbformat.read(path, 4)
    return "".join(o.get("text", "") for cell in book.cells for o in cell.get("outputs", ()))
