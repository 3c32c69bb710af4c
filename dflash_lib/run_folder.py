"""A run's folder: its name, its status and its environment."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from .atomic import write_json, write_text
from .config import ConfigError, RunConfig

State = Literal["running", "completed", "failed", "stopped"]
RUN_DIR_VARIABLE = "DFLASH_RUN_DIR"

_PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy"),
    *("jupyterlab", "ipykernel", "ipywidgets", "matplotlib", "papermill", "polars"),
)
# Settings that change what a run does. Whole environments are not copied: they hold people's secrets.
_VARIABLES = ("TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TRITON_", "CUDA_", "NCCL_", "OMP_", "MKL_", "PYTORCH_")
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY")


def json_or_none(path: str | os.PathLike[str]) -> Any | None:
    """What the file holds, or None where it is missing or no JSON (a run that has only begun)."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def runs_root(runs_dir: str | os.PathLike[str]) -> Path:
    """The folder of run folders. A notebook opened in JupyterLab works in ``notebooks/``: its runs lie beside it."""
    root, here = Path(runs_dir).expanduser(), Path.cwd()
    if not root.is_absolute() and here.name == "notebooks" and (here.parent / "dflash_lib").is_dir():
        return here.parent / root
    return root.absolute()


def new_run_dir(config: RunConfig) -> Path:
    """Makes the run's folder and writes ``config.json`` and ``environment.json`` into it.

    The folder is ``config.run_dir``, else the one a launcher asked for (``execute`` and ``sweep`` hand it over in
    the environment), else ``<runs_dir>/<name>-YYYYmmdd-HHMMSS[-k]``, where ``-k`` tells two runs of one second apart.

    Raises:
        ConfigError: the folder holds a run that is completed or still going on, and ``config.resume`` is not it.
    """
    wanted = config.run_dir or os.environ.get(RUN_DIR_VARIABLE)
    run_dir = _exact_run_dir(Path(wanted).expanduser().absolute(), config) if wanted else _dated_run_dir(config)
    write_text(run_dir / "config.json", config.to_json())
    write_environment(run_dir)
    return run_dir


def _dated_run_dir(config: RunConfig) -> Path:
    root = runs_root(config.runs_dir)
    stem = f"{config.name}-{datetime.now():%Y%m%d-%H%M%S}"
    for k in range(1, 1000):
        folder = root / (stem if k == 1 else f"{stem}-{k}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"runs_dir: {folder} cannot be made ({error.strerror})") from None
    raise ConfigError(f"runs_dir: {root} has a thousand runs of this second; choose another name")


def _exact_run_dir(folder: Path, config: RunConfig) -> Path:
    resumed = Path(config.resume).expanduser().absolute() if config.resume else None
    own, state = resumed is not None and (folder == resumed or folder in resumed.parents), run_state(folder)
    if state == "running":
        raise ConfigError(f"run_dir: {folder} holds a run that is running; name another folder, or stop that run first")
    if state == "completed" and not own:
        raise ConfigError(f"run_dir: {folder} holds a run that is completed; name another folder, or resume it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir: {folder} cannot be made ({error.strerror})") from None
    return folder


def write_status(
    run_dir: str | os.PathLike[str],
    state: State,
    *,
    step: int | None = None,
    error: BaseException | Mapping[str, str] | None = None,
    thread: str = "main",
    started: datetime | None = None,
) -> dict[str, Any]:
    """Writes ``status.json`` (contracts.md) and returns what it now holds.

    ``step`` is the number of finished optimizer steps; None keeps the one written before. The time a run started is
    kept across writes and resumes (``started`` is for a caller that knows better). ``error`` is an exception
    (``thread`` names where it was raised) or an object of the contract's own form.
    """
    before = read_status(run_dir) or {}
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    status = {
        "v": 1,
        "state": state,
        "step": int(before.get("step", 0) if step is None else step),
        "started": before.get("started") or (started.isoformat(timespec="milliseconds") if started else now),
        "ended": None if state == "running" else now,
        "pid": os.getpid(),
        "error": error_record(error, thread) if isinstance(error, BaseException) else dict(error) if error else None,
    }
    write_json(Path(run_dir) / "status.json", status)
    return status


def error_record(error: BaseException, thread: str) -> dict[str, str]:
    """An exception as ``status.json`` keeps it."""
    text = "".join(traceback.format_exception(error))
    return {"thread": thread, "type": type(error).__name__, "message": str(error), "traceback": text}


def read_status(run_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What ``status.json`` says, letter by letter, or None before a run has begun."""
    status = json_or_none(Path(run_dir) / "status.json")
    return status if isinstance(status, dict) else None


def run_state(run_dir: str | os.PathLike[str]) -> str:
    """``"new"``, ``"running"``, ``"completed"``, ``"failed"``, ``"stopped"``, or ``"died"``.

    A killed process cannot write its last status: ``"died"`` is a run that says it is running while no process of
    this machine has its number (or the number has since gone to a process younger than the status).
    """
    status = read_status(run_dir)
    if status is None:
        return "new"
    state = str(status.get("state"))
    if state != "running":
        return state
    return "running" if lives(int(status.get("pid") or 0), Path(run_dir) / "status.json") else "died"


def lives(pid: int, written: Path) -> bool:
    """Whether the process that wrote its number into the file ``written`` is still at work on this machine."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and Path(f"/proc/{pid}").stat().st_ctime <= written.stat().st_mtime + 1
    except (OSError, IndexError):
        return True  # no /proc on this system: a living number is all that can be known


def write_environment(run_dir: str | os.PathLike[str], **extra: Any) -> dict[str, Any]:
    """Writes ``environment.json``: what the run ran on. ``extra`` adds to it (the hazards found, for one)."""
    environment = {
        "v": 1,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": platform.node(),
        "command": sys.argv,
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpus": gpus(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not any(part in name for part in _SECRET)
        },
        "commit": _commit(),
        **extra,
    }
    write_json(Path(run_dir) / "environment.json", environment)
    return environment


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def gpus() -> list[dict[str, Any]]:
    """Names and memory from the driver itself: torch is not needed, and no CUDA context is made."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver: no GPUs
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        driver = pynvml.nvmlSystemGetDriverVersion()
        return [
            {
                "name": pynvml.nvmlDeviceGetName(handle),
                "memory_gib": round(pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30, 1),
                "driver": driver,
            }
            for handle in handles
        ]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _commit() -> str | None:
    """The source's commit, with ``+changes`` where the working tree differs from it; None outside git."""
    here = Path(__file__).parent
    try:
        head, changes = (
            subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.strip() + ("+changes" if changes.strip() else "")
