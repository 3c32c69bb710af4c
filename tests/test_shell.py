"""The shell's options: what cannot be used is one line and exit code 2, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

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
