"""Checkpoints: save and load a drafter and its training state, safely and whole or not at all.

A checkpoint is a folder::

    checkpoints/step-000100/
        model.safetensors      the drafter's tensors, named as DFlash names them
        config.json            the layout z-lab's checkpoints have, so that a checkpoint is already an export
        training.safetensors   tensors of the training state that are not the drafter's own: AdamW's moments
        training.json          everything else of it: step, position in the data

A tensor of the training state that is one of the drafter's parameters (a float32 master) is kept once, in the first.
Nothing is pickled, so a checkpoint from anywhere is safe to open. A folder is written under a temporary name, flushed
and then renamed: it is there whole or it is not there. Formats of other projects are in :mod:`dflash_lib.exchange`.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash_lib.atomic import remove_leftovers, replace_folder, write_json
from dflash_lib.exchange import OURS, dtype_name, export, import_, zlab_config
from dflash_lib.storage import CheckpointError, read_json, read_tensors, write_tensors

if TYPE_CHECKING:
    from dflash_lib.drafter import Drafter
    from dflash_lib.target import Target

__all__ = [
    "CheckpointError",
    "all_steps",
    "check_fits",
    "describe",
    "export",
    "import_",
    "latest",
    "load",
    "load_training",
    "prune",
    "resolve",
    "save",
]

MODEL, CONFIG = "model.safetensors", "config.json"
TRAINING_TENSORS, TRAINING_STATE = "training.safetensors", "training.json"


# --- a drafter ---------------------------------------------------------------------------------------------------
def save(
    drafter: Drafter,
    path: str | os.PathLike[str],
    *,
    step: int,
    extra_state: Mapping[str, Any] | None = None,
    target: str | None = None,
) -> Path:
    """Writes a checkpoint folder; an older folder of that name is replaced only when the new one is whole.

    Args:
        drafter: the draft model; its parameters keep their dtype.
        path: the folder, such as ``run/checkpoints/step-000100``.
        step: optimizer steps finished.
        extra_state: training state for :func:`load_training`: any tree of dicts, lists, tuples, numbers, strings,
            None and tensors (``optimizer.state_dict()`` is one). The drafter's own parameters in it cost nothing.
        target: name of the target the drafter was trained for, kept for messages.

    Raises:
        CheckpointError: the state holds something that is neither JSON nor a tensor, or the folder cannot be written.
    """
    tensors = drafter_tensors(drafter)
    config = zlab_config(drafter.config, dtype_name(tensors))
    compute = str(drafter.config.dtype).removeprefix("torch.")
    config[OURS] = {"v": 1, "step": step, "target": target, "compute_dtype": compute}

    stamp = uuid.uuid4().hex  # ties the files together: somebody may copy one of them over another save's

    def write(folder: Path) -> None:
        write_tensors(tensors, folder / MODEL, {"save": stamp})
        write_json(folder / CONFIG, config)
        if extra_state is not None:
            _write_training(folder, extra_state, step, stamp, _parameters(drafter))

    return replace_folder(path, write)


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    target: Target | None = None,
) -> Drafter:
    """Reads a drafter from a checkpoint folder, ours or an export of a known format.

    Args:
        path: a checkpoint folder, or a run folder (its newest checkpoint is taken).
        device: where its tensors go.
        dtype: of its tensors; None keeps what is in the file.
        target: the target it is meant for; one that does not fit is refused (see :func:`check_fits`).

    Raises:
        CheckpointError: a file is missing, damaged or of another model; the line names file and fault.
    """
    folder = resolve(path)
    drafter = import_(folder, device=device, dtype=dtype)
    if target is not None:
        check_fits(drafter, target, folder)
    return drafter


def check_fits(drafter: Drafter, target: Target, where: str | os.PathLike[str] = "this checkpoint") -> None:
    """Refuses a drafter that was trained for another target: vocabulary, width, layers, feature layers.

    Raises:
        CheckpointError: one line with both numbers.
    """
    config = drafter.config
    facts = [
        ("a vocabulary of {} tokens", config.vocab_size, target.vocab_size),
        ("a target of width {}", config.target_hidden_size, target.hidden_size),
        ("a target of {} layers", config.num_target_layers, target.num_layers),
        ("features of layers {}", list(config.target_layer_ids), list(target.layer_ids)),
    ]
    for words, wanted, found in facts:
        if wanted != found:
            raise CheckpointError(
                f"{os.fspath(where)}: was trained for {words.format(wanted)}, but {target.name} has {found}: "
                "name the target it was trained for"
            )


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """``{"step": int | None, "target": str | None}`` of a checkpoint folder, without reading its tensors."""
    ours = read_json(resolve(path) / CONFIG).get(OURS)
    ours = ours if isinstance(ours, dict) else {}
    return {"step": ours.get("step"), "target": ours.get("target")}


def drafter_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The drafter's parameters on the CPU under their checkpoint names, without a wrapper's prefix."""
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in _parameters(drafter).items()}


def _parameters(drafter: Drafter) -> dict[str, Tensor]:
    return dict(getattr(drafter, "_orig_mod", drafter).named_parameters())


# --- training state ----------------------------------------------------------------------------------------------
def load_training(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tree that was given to :func:`save` as ``extra_state``, tensors on the CPU, plus ``"step"``.

    Raises:
        CheckpointError: there is none, it is damaged, or its files are of different saves.
    """
    folder = resolve(path)
    document = read_json(folder / TRAINING_STATE)
    version, step, state = (document.get(key) for key in ("v", "step", "state"))
    if version not in (1, 2) or not isinstance(step, int) or not isinstance(state, dict):
        what = (
            f"is of format {version!r}, which is not known here" if version not in (1, 2) else "has no step and state"
        )
        raise CheckpointError(f"{folder / TRAINING_STATE}: {what}")
    found: dict[str, dict[str, Tensor]] = {}
    # Format 1 had all its tensors in one file.
    for file in (TRAINING_TENSORS,) if version == 1 else (TRAINING_TENSORS, MODEL):
        found[file], metadata = read_tensors(folder / file, with_metadata=True)
        if metadata.get("save") != document.get("save"):
            raise CheckpointError(f"{folder}: {TRAINING_STATE} and {file} come from different saves")
    try:
        state = _unpack(state, found[TRAINING_TENSORS], found.get(MODEL, {}))
    except KeyError as error:
        raise CheckpointError(f"{folder / TRAINING_STATE}: names {error} which {' and '.join(found)} lack") from None
    return {"step": step, **state}


def _write_training(
    folder: Path, state: Mapping[str, Any], step: int, stamp: str, parameters: Mapping[str, Tensor]
) -> None:
    tensors: dict[str, Tensor] = {}
    packed = _pack(dict(state), "state", tensors, {_memory(tensor): name for name, tensor in parameters.items()})
    write_tensors(tensors, folder / TRAINING_TENSORS, {"save": stamp})
    write_json(folder / TRAINING_STATE, {"v": 2, "step": step, "save": stamp, "state": packed})


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are the same values in the same memory."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _pack(value: Any, name: str, tensors: dict[str, Tensor], parameters: Mapping[tuple[Any, ...], str]) -> Any:
    """A tree as JSON; its tensors go to ``tensors`` under the path that leads to them, but for the parameters."""

    def pack(item: Any, key: Any) -> Any:
        return _pack(item, f"{name}.{key}", tensors, parameters)

    if isinstance(value, Tensor):
        if (parameter := parameters.get(_memory(value))) is not None:
            return {"$parameter": parameter}
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"$tensor": name}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: pack(item, key) for key, item in value.items()}
        return {"$pairs": [[pack(key, "key"), pack(item, key)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [pack(item, i) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [pack(item, i) for i, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(f"{name}: a {type(value).__name__} is neither JSON nor a tensor and cannot be saved")


def _unpack(value: Any, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Any:
    def unpack(item: Any) -> Any:
        return _unpack(item, tensors, parameters)

    if isinstance(value, list):
        return [unpack(item) for item in value]
    if isinstance(value, dict):
        if "$parameter" in value:
            return parameters[value["$parameter"]]
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        if "$tuple" in value:
            return tuple(unpack(item) for item in value["$tuple"])
        if "$pairs" in value:
            return {unpack(key): unpack(item) for key, item in value["$pairs"]}
        return {key: unpack(item) for key, item in value.items()}
    return value


# --- finding and pruning -----------------------------------------------------------------------------------------
def all_steps(run_dir: str | os.PathLike[str]) -> list[Path]:
    """Every whole checkpoint of a run, oldest step first (a folder without both files is not one)."""
    root = Path(run_dir) / "checkpoints"
    found = [
        (int(match[1]), folder)
        for folder in (root.iterdir() if root.is_dir() else ())
        if (match := re.fullmatch(r"step-(\d+)", folder.name))
        and (folder / MODEL).is_file()
        and (folder / CONFIG).is_file()
    ]
    return [folder for _, folder in sorted(found)]


def latest(run_dir: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint of a run folder, or None."""
    steps = all_steps(run_dir)
    return steps[-1] if steps else None


def resolve(path: str | os.PathLike[str]) -> Path:
    """A checkpoint folder from a checkpoint folder, one of its files, or a run folder (then its newest)."""
    given = Path(path)
    if given.is_file() and given.name in (MODEL, CONFIG):
        return given.parent
    if not given.is_dir():
        raise CheckpointError(f"{given}: no such folder; name a checkpoint (.../checkpoints/step-000100) or a run")
    if (given / CONFIG).is_file() and (given / MODEL).is_file():
        return given
    newest = latest(given)
    if newest is not None:
        return newest
    missing = CONFIG if (given / MODEL).is_file() else MODEL
    raise CheckpointError(f"{given}: has no {missing} and no checkpoints/step-* that is whole")


def prune(run_dir: str | os.PathLike[str], keep: int) -> list[Path]:
    """Removes all but the newest ``keep`` checkpoints, and what a killed save left; returns the checkpoints removed."""
    old = all_steps(run_dir)[: -max(keep, 1)]
    for folder in old:
        shutil.rmtree(folder)
    if (root := Path(run_dir) / "checkpoints").is_dir():
        remove_leftovers(root)
    return old
