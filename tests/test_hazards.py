"""Every hazard that this torch has is seen unpatched and not seen patched, in watched processes."""

from __future__ import annotations

import json
import sys
import threading
import types

import pytest
import torch

from dflash_lib import hazards, provocations
from dflash_lib.hazard import Outcome
from dflash_lib.hazard_tracing import DeviceGuard

NEEDS_A_GPU = {"backward-deadlock", "backward-context"}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    """The matrix of this torch, in quick form, without what needs a GPU."""
    names = [hazard.name for hazard in hazards.ALL if hazard.name not in NEEDS_A_GPU]
    return {row["hazard"]: row for row in hazards.matrix(names, seconds=0.7)}


@pytest.mark.parametrize("hazard", [h for h in hazards.ALL if h.name not in NEEDS_A_GPU], ids=lambda h: h.name)
def test_the_fault_is_seen_unpatched_where_it_exists_and_never_patched(hazard: hazards.Hazard, rows: dict) -> None:
    row = rows[hazard.name]
    fault = "crashed" if hazard.name == "device-guard" else "failed"
    assert row["unpatched"]["status"] == (fault if hazard.present() else "clean"), row["unpatched"]
    assert (row["patched"]["status"], row["patched"]["failures"]) == ("clean", 0), row["patched"]
    assert row["patched"]["attempts"] > 0
    assert row["holds"] is True


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(NEEDS_A_GPU))
def test_on_a_gpu_nothing_hangs_or_raises_when_patched(name: str) -> None:
    assert hazards.by_name(name).provoke(patched=True, seconds=20).status == "clean"


def test_backward_stays_in_a_thread_that_traces_or_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadlock needs a GPU; what prevents it can be seen anywhere."""
    seen: list[bool] = []

    def look(*arguments: object) -> object:
        seen.append(torch._C._is_multithreading_enabled())
        return arguments[0]

    hazard = hazards.by_name("backward-deadlock")
    was = hazard.patched
    hazard.patch()
    try:
        torch.fx.symbolic_trace(look)
        torch.compile(lambda x: x + 5, backend=look)(torch.ones(2))
    finally:
        if not was:
            hazard.restore()
    assert seen == [False, False]
    assert torch._C._is_multithreading_enabled()


def test_hazards_are_told_apart_and_described() -> None:
    names = [hazard.name for hazard in hazards.ALL]
    assert len(set(names)) == len(names)
    for hazard in hazards.ALL:
        assert hazard.description and hazard.where and isinstance(hazard.present(), bool)
    with pytest.raises(KeyError, match="no hazard 'nothing'"):
        hazards.by_name("nothing")


def test_where_a_gpu_is_each_unpatched_program_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def one_process(names: list[str], patched: bool, forks: bool, seconds: float, timeout: float) -> object:
        started.append(names)
        assert not forks
        return [(name, Outcome("clean")) for name in names]

    monkeypatch.setattr(provocations, "_one_process", one_process)
    monkeypatch.setattr(provocations.Path, "exists", lambda path: str(path) == "/proc/driver/nvidia")
    names = ["tracing-flag", "generators", "defaults"]
    assert [name for name, _ in provocations.run_many(names, patched=False)] == names
    assert sorted(started) == sorted([name] for name in names)
    started.clear()
    assert [name for name, _ in provocations.run_many(names, patched=True)] == names
    assert started == [names]


def test_a_crash_and_a_hang_are_results_and_the_next_program_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(command: list[str], **_: object) -> types.SimpleNamespace:
        asked.append(command[4 : command.index("--seconds")])
        clean = json.dumps({"hazard": "x", "status": "clean", "failures": 0, "attempts": 3, "detail": "", "seconds": 1})
        stuck = 'Timeout (0:01:30)!\nThread 0x1 (newest first):\n  File "/site-packages/torch/lock.py", line 7 in wait'
        answers = {
            "tracing-flag": (clean.replace("x", "tracing-flag"), "", -11),
            "trace-context": ("", stuck, 1),
            "automatic-dynamic": (clean.replace('"x"', '"automatic-dynamic"'), "", 0),
        }
        output, errors, code = answers[asked[-1][0]]
        return types.SimpleNamespace(stdout=output, stderr=errors, returncode=code)

    asked: list[list[str]] = []
    monkeypatch.setattr(provocations.subprocess, "run", process)
    names = ["tracing-flag", "recompile-limit", "trace-context", "automatic-dynamic"]
    outcomes = dict(provocations.run_many(names, patched=True))
    assert [outcome.status for outcome in outcomes.values()] == ["clean", "crashed", "hung", "clean"]
    assert list(outcomes) == names
    assert outcomes["recompile-limit"].detail == "exit -11: no message"
    assert outcomes["trace-context"].detail == "stuck in torch/lock.py, line 7 in wait"
    assert asked == [names, names[2:], names[3:]]


def test_the_printed_matrix_fails_loudly_where_isolation_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(names: list[str], *, patched: bool, **_: object) -> list[tuple[str, Outcome]]:
        return [
            (name, Outcome("failed", 2, 9) if name == "defaults" or not patched else Outcome("clean", 0, 9))
            for name in names
        ]

    monkeypatch.setattr(provocations, "run_many", made_up)
    text, code = hazards.main_text(as_json=True, names=["generators", "defaults"])
    lines = text.splitlines()
    assert code == 1
    assert lines[2].split() == ["generators", "yes", "failed", "2/9", "clean", "0/9", "holds"]
    assert lines[3].split()[-1] == "FAILS"
    assert [row["holds"] for row in json.loads(lines[-1])["hazards"]] == [True, False]
    assert hazards.main_text(names=["generators"])[1] == 0


def test_the_device_guard_is_asked_for_by_a_thread_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The crash itself needs torch 2.10 or 2.11 without a GPU; who asks can be seen anywhere."""
    asked: list[int] = []
    ask = "_ensureCUDADeviceGuardSet"
    monkeypatch.setattr(torch._C, ask, lambda: asked.append(threading.get_ident()), raising=False)
    DeviceGuard().patch()
    installer = threading.Thread(target=lambda: DeviceGuard().patch())
    installer.start()
    installer.join()
    assert asked[0] == threading.main_thread().ident
    assert asked[1] in sys._current_frames()
    assert asked[1] not in [thread.ident for thread in threading.enumerate()]
