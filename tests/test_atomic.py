"""Files and folders are whole or as before, whatever goes wrong on the way, and nothing is left beside them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dflash_lib import atomic


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill(text: str) -> Any:
    return lambda folder: (folder / "a").write_text(text)


def fails(*_: object) -> None:
    raise OSError("no space left on device")


def test_files_hold_what_was_given(tmp_path: Path) -> None:
    assert atomic.write_bytes(tmp_path / "b", b"\x00\xff").read_bytes() == b"\x00\xff"
    assert atomic.write_text(tmp_path / "t", "é \ud800").read_bytes() == b"\xc3\xa9 ?"
    assert json.loads(atomic.write_json(tmp_path / "j", {"a": [1, None]}).read_text()) == {"a": [1, None]}
    assert atomic.replace_folder(tmp_path / "deep" / "f", fill("x")) == tmp_path / "deep" / "f"
    assert names(tmp_path) == ["b", "deep", "j", "t"] and names(tmp_path / "deep") == ["f"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    atomic.write_json(tmp_path / "j", 1)
    atomic.replace_folder(tmp_path / "f", fill("old"))
    with pytest.raises(ValueError):
        atomic.write_json(tmp_path / "j", float("nan"))
    with pytest.raises(OSError, match="no space"):
        atomic.replace_file(tmp_path / "j", fails)
    with pytest.raises(OSError, match="no space"):
        atomic.replace_folder(tmp_path / "f", fails)
    assert (tmp_path / "j").read_text() == "1\n" and (tmp_path / "f" / "a").read_text() == "old"
    assert names(tmp_path) == ["f", "j"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_rename_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """A folder takes two renames: the old one aside, the new one in its place."""
    atomic.write_json(tmp_path / "j", 1)
    atomic.replace_folder(tmp_path / "f", fill("old"))
    rename, calls = Path.replace, [0]

    def replace(path: Path, target: Path) -> Path:
        calls[0] += 1
        return fails() if calls[0] == failing else rename(path, target)  # type: ignore[return-value]

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="no space"):
        atomic.replace_folder(tmp_path / "f", fill("new"))
    assert (tmp_path / "f" / "a").read_text() == "old"
    calls[0] = failing - 1
    with pytest.raises(OSError, match="no space"):
        atomic.write_json(tmp_path / "j", 2)
    assert (tmp_path / "j").read_text() == "1\n"
    assert names(tmp_path) == ["f", "j"]


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    """safetensors makes files for their owner alone, and puts them in the place of what is there."""

    def write(file: Path) -> None:
        (private := file.with_suffix(".private")).touch(0o600)
        private.replace(file)

    (tmp_path / "plain").touch()
    mode = (tmp_path / "plain").stat().st_mode
    assert atomic.replace_file(tmp_path / "f", write).stat().st_mode == mode


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left = [".f.0123abcd.tmp", ".kept.0123abcd.old"]  # a file, and a folder whose new one is there
    stays = [".gone.0123abcd.old", ".f.tmp", "f.0123abcd.tmp", "kept"]  # the first is all there is of its folder
    for name in (*left, *stays):
        (tmp_path / name).mkdir()
    (tmp_path / left[0]).rmdir()
    (tmp_path / left[0]).touch()
    atomic.remove_leftovers(tmp_path, older=60.0)
    assert names(tmp_path) == sorted(left + stays)  # somebody may be writing them
    for name in left:
        os.utime(tmp_path / name, (1.0, 1.0))
    atomic.remove_leftovers(tmp_path, older=60.0)
    assert names(tmp_path) == sorted(stays)
