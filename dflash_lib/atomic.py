"""Files and folders that appear whole or not at all: written under a temporary name, flushed to disk, then renamed.

A leaf: no torch, nothing else of the package. A kill or a power cut leaves the old one or the new one, and at most a
hidden ``.NAME.XXXXXXXX.tmp`` beside it, which :func:`remove_leftovers` takes away.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LEFT_OVER = re.compile(r"\.(?P<of>.+)\.[0-9a-f]{8}\.(?P<kind>tmp|old)")


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
        temporary.touch()
        mode = temporary.stat().st_mode  # as the umask has it: some writers make files that only their owner reads
        write(temporary)
        temporary.chmod(mode)
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


def remove_leftovers(folder: str | os.PathLike[str], *, older: float = 0.0) -> None:
    """Removes what killed writers left in ``folder``: temporary names that nobody touched for ``older`` seconds.

    An ``.old`` stays while what it was the old one of is missing: a kill between two renames, and it is all there is.
    """
    for path in Path(folder).iterdir():
        name = _LEFT_OVER.fullmatch(path.name)
        if name is None or (name["kind"] == "old" and not path.with_name(name["of"]).exists()):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process tidies up as well
            if time.time() - path.stat().st_mtime >= older:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{kind}")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
