"""Files and folders that appear whole or not at all: written under a temporary name, flushed to disk, then renamed.

A leaf: no torch, nothing else of the package. A kill or a power cut leaves the old one or the new one, and at most a
hidden ``.NAME.XXXXXXXX.tmp`` beside it.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_bytes(path: str | os.PathLike[str], data: bytes) -> Path:
    """Writes a file; returns its path."""
    return replace_file(path, lambda temporary: temporary.write_bytes(data))


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Writes a file as UTF-8; half a surrogate pair becomes a question mark."""
    return write_bytes(path, text.encode("utf-8", "replace"))


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    """Writes a value as JSON.

    Raises:
        ValueError: it holds NaN or an infinity, which JSON cannot carry.
    """
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def replace_file(path: str | os.PathLike[str], write: Callable[[Path], Any]) -> Path:
    """Lets ``write`` fill a temporary file beside ``path``, then puts it in place of ``path``."""
    file = Path(path)
    temporary = _beside(file, "tmp")
    try:
        write(temporary)
        _flush(temporary)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    return file


def replace_folder(path: str | os.PathLike[str], write: Callable[[Path], Any]) -> Path:
    """Lets ``write`` fill a temporary folder beside ``path``, then puts it in place of ``path``; parents are made."""
    folder = Path(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = _beside(folder, "tmp"), _beside(folder, "old")
    temporary.mkdir()
    try:
        write(temporary)
        for file in (*temporary.iterdir(), temporary):
            _flush(file)
        if folder.exists():
            folder.replace(old)
        temporary.replace(folder)
        _flush(folder.parent)
    finally:
        if old.exists() and not folder.exists():  # the last rename failed: nothing is lost
            old.replace(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{kind}")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
