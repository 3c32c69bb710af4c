"""The shell's options and exit codes: what cannot be used is one line and code 2; a threshold that was hit is 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from timeline_data import compile_fields

from dflash_lib import __main__ as shell
from dflash_lib.events import EventLog


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["evaluate", "run", "--device", "gpu"], "--device: 'gpu' is no device"),
        (["evaluate", "run", "--device", "cuda:99"], "--device: cuda:99 does not exist"),
        (["evaluate", "run", "--out", "file/x"], "file is a file; name a folder"),
        (["timeline", "run", "--out", "file"], "file is a file; name a folder"),
        (["regenerate", "out.jsonl"], "--count: say how many"),
        (["train", "--set", "steps"], "--set steps: write NAME=VALUE"),
        (["train", "--set", "backend=nosuch"], "backend: torch.compile has no 'nosuch'"),
        (["train", "--set", "runs_dir=file"], "runs_dir: "),
        (["train", "file"], "file: holds no names and values"),
        (["train", "--nope"], "No such option: --nope (see "),
        (["evaluate", "run", "--count", "0"], "--count"),
        (["timeline"], "Missing argument"),
        (["nope"], "No such command 'nope' (see "),
    ],
)
def test_a_users_error_is_one_line_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["dflash", *words])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    Path("file").touch()
    with pytest.raises(SystemExit) as ended:
        shell.main()
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert line in errors
    assert len(errors.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "evaluate"),  # nothing was asked for: what there is
        (["evaluate", "--help"], 0, "folder of runs"),
        (["timeline", "log", "--fail-after-step", "1"], 1, "1 compile"),
        (["timeline", "log", "--fail-after-step", "2"], 0, "1 compile"),
    ],
)
def test_help_and_exit_codes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    says: str,
) -> None:
    with EventLog(tmp_path / "log" / "events.jsonl") as log:
        log.emit("step", thread="a", step=1, loss=1.0, t=1.0)
        log.emit("compile", thread="a", step=2, t=2.0, start=1.5, seconds=0.5, cls="recompile", frame="f", reason="r")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["dflash", *words])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        shell.main()
    assert (ended.value.code or 0) == code
    assert says in capsys.readouterr().out


# --- the timeline in other people's CI --------------------------------------------------------------------------------
def recorded(path: Path, *compiles: dict[str, Any], steps: bool = True) -> str:
    """A log as record_compiles writes it: compiles of one thread, each in a step of its own."""
    with EventLog(path) as log:
        for number, changes in enumerate(compiles, start=1):
            fields = compile_fields(start=float(number), **changes)
            log.emit("compile", thread="trainer-0", step=number if steps else None, t=number + 0.5, **fields)
    return str(path)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["dflash", *words])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    try:
        return int(shell.main() or 0)
    except SystemExit as ended:
        return int(ended.code or 0)


GROWN = {"cls": "recompile", "reason": "tensor 'x' size mismatch at index 0. expected 3, actual 4"}


def test_fail_after_step_is_an_exit_code_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(log: str, step: int, *more: str) -> tuple[int, str, str]:
        code = run(monkeypatch, "timeline", log, "--out", str(tmp_path / "out"), "--fail-after-step", str(step), *more)
        out, errors = capsys.readouterr()
        return code, out, errors

    log = recorded(tmp_path / "a.jsonl", {}, GROWN, {**GROWN, "planned": "length 4"})
    code, out, errors = check(log, 1, "--json")
    assert code == 1 and "recompiled after step 1: attend: 1 x size (x: size[0]: 3 -> 4)" in errors
    assert "mark_dynamic(x, 0)" in errors and "1 planned compile after step 1 did not count" in errors
    assert len(json.loads(out.splitlines()[-1])["offenders"]) == 1
    code, out, errors = check(log, 2)
    assert code == 0 and "nothing recompiled after step 2" in out and "1 planned compile after step 2" in errors
    assert check(log, 3)[::2] == (0, "")
    assert check(log, -1)[0] == 2
    bare = recorded(tmp_path / "bare.jsonl", {}, GROWN, steps=False)
    code, _, errors = check(bare, 1)
    assert (
        code == 0 and "no steps" in errors and "--fail-after-step 0" in errors
    )  # else it would pass whatever happened
    assert check(bare, 0)[0] == 1


def test_compare_fails_only_when_asked_and_only_when_it_got_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = recorded(tmp_path / "good.jsonl", {}), recorded(tmp_path / "bad.jsonl", {}, GROWN)
    assert run(monkeypatch, "compare", good, bad) == 0
    assert run(monkeypatch, "compare", bad, good, "--fail-if-worse") == 0
    capsys.readouterr()
    assert run(monkeypatch, "compare", good, bad, "--fail-if-worse", "--json", "--out", str(tmp_path / "c.png")) == 1
    out = capsys.readouterr().out
    assert "worse in b:" in out and json.loads(out.splitlines()[-1])["worse"] is True
    assert (tmp_path / "c.png").stat().st_size > 10_000
    assert run(monkeypatch, "compare", good, str(tmp_path / "none")) == 2
