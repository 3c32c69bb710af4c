"""The files of a checkpoint: tensors that are read only when their file is sound, and JSON objects.

A leaf under :mod:`dflash_lib.checkpoint` and :mod:`dflash_lib.exchange`. Nothing here unpickles.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_lib.atomic import replace_file
from dflash_lib.errors import UserError

WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


class CheckpointError(UserError):
    """A checkpoint that cannot be used: one line that names the file and what is wrong with it."""


def read_tensors(path: Path, *, with_metadata: bool = False) -> Any:
    """Tensors of a safetensors file (and its metadata, if asked), after the file was found sound.

    Raises:
        CheckpointError: file name and kind of fault: missing, empty, cut short, impossible header, wrapped names.
    """
    header = sound_header(path)
    for name in header:
        for prefix in WRAPPERS:
            if prefix in name:
                raise CheckpointError(
                    f"{path}: tensor {name!r} carries {prefix!r}, the mark of a wrapped module: "
                    "save the module inside (model._orig_mod for torch.compile)"
                )
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is not a readable safetensors file ({error})") from None
    return (tensors, header.get("__metadata__") or {}) if with_metadata else tensors


def sound_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file whose length fits what the header says.

    Raises:
        CheckpointError: it is missing, or not such a file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            text = file.read(length) if len(start) == 8 and length <= size - 8 else b""
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    if size == 0:
        raise CheckpointError(f"{path}: is empty (zero bytes); the save was interrupted or the download failed")
    if start[:2] in (b"\x80\x02", b"PK"):
        raise CheckpointError(f"{path}: is a pickle, which is never opened here; convert it to safetensors")
    if len(start) < 8:
        raise CheckpointError(f"{path}: is cut short: {size} bytes, less than a header's length field")
    if length > size - 8:
        raise CheckpointError(
            f"{path}: has an impossible header: it claims {length} bytes, the file has {size - 8} after the length"
        )
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        raise CheckpointError(f"{path}: has an impossible header: {length} bytes that are no tensor table") from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        kind = "is cut short" if size < expected else "has bytes that belong to no tensor"
        raise CheckpointError(f"{path}: {kind}: its header describes {expected} bytes, the file has {size}")
    return header


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file, whole or not at all.

    Raises:
        OSError: it cannot be written (safetensors has an error of its own for a full disk).
    """
    try:
        replace_file(path, lambda temporary: save_file(dict(tensors), temporary, {"format": "pt", **(metadata or {})}))
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written ({error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing, is no JSON or no object.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: is no readable JSON ({error})") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: holds a {type(document).__name__}, not an object")
    return document
