"""Where a target's files come from, and one line for each way in which they cannot be had."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from dflash_lib import packaged
from dflash_lib.anatomy import TargetError


def dtype_of(wanted: str | torch.dtype) -> torch.dtype:
    if isinstance(wanted, torch.dtype):
        return wanted
    if wanted == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    dtype = getattr(torch, wanted, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TargetError(f"dtype: {wanted!r} is none; use 'auto', 'float32', 'bfloat16' or 'float16'")
    return dtype


def place_of(name: str, progress: bool) -> str:
    """What transformers is asked for: the cached folder of the packaged target, a folder, or a hub id."""
    if name == packaged.NAME:
        return str(packaged.folder(progress=progress))
    path = Path(name).expanduser()
    if not path.is_dir():
        if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise TargetError(f"target {name!r}: is no folder; give a model's folder, a hub id, or 'smollm2'")
        return name
    if not (path / "config.json").is_file():
        raise TargetError(f"target {name!r}: the folder holds no config.json; give a folder that transformers wrote")
    try:
        json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TargetError(f"target {name!r}: its config.json is not valid JSON ({error})") from None
    return str(path)


def why_not(name: str, error: Exception) -> str:
    """One line for whatever transformers, the hub or safetensors raised."""
    reason = " ".join(str(error).split())
    if Path(name).expanduser().is_dir() or name == packaged.NAME:
        return f"target {name!r}: cannot be loaded ({type(error).__name__}: {reason:.200})"
    if "trust_remote_code" in reason:
        return f"target {name!r}: wants to run code of its own; set trust_remote_code=True if you trust it"
    reason = reason.partition(". ")[0]  # the first sentence: what follows is advice for those who call transformers
    return (
        f"target {name!r}: cannot be had from the hub ({type(error).__name__}: {reason:.200}); "
        "give a local folder, or use 'smollm2', the packaged target"
    )
