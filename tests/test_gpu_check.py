"""The one command for a GPU: what it runs exists, and what ends badly is said."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import gpu_check
import pytest
from gpu_check import Outcome, Part

ROOT = Path(__file__).resolve().parent.parent
MARK = "@pytest.mark." + "gpu"


@pytest.mark.parametrize("part", gpu_check.PARTS, ids=lambda part: part.name)
def test_each_part_is_a_command_that_exists_and_knows_its_options(part: Part) -> None:
    script, *words = part.command
    if script == "-m":
        return
    source = (ROOT / script).read_text()
    assert all(f'"{word}"' in source for word in words if word.startswith("--"))


def test_every_test_that_needs_a_gpu_is_run() -> None:
    marked = {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py") if MARK in file.read_text()}
    assert marked == set(gpu_check.TESTS)


def test_what_is_timed_runs_alone_and_a_part_that_fails_or_hangs_is_a_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hang = "import subprocess, time; subprocess.Popen(['sleep', '97531']); print('on'); time.sleep(60)"
    wrote = "import sys, time, pathlib; pathlib.Path(sys.argv[1]).write_text('[1]'); time.sleep(60)"
    parts = [
        Part("hangs", ("-c", hang), 3),
        Part("writes", ("-c", wrote, "{out}"), 3),
        Part("timed", ("-c", "import sys; print('seconds', sys.argv[1])", "{seconds}"), 30, timed=True),
        Part("fails", ("-c", "print('why'); raise SystemExit(3)"), 30),
    ]
    found: dict[str, Outcome] = {}
    gpu_check.run_all(parts, time.monotonic() + 60, lambda outcome: found.update({outcome.name: outcome}))
    assert next(iter(found)) == "timed" and found["timed"].tail == ["seconds 22"]
    assert (found["fails"].code, found["fails"].tail) == (3, ["why"])
    assert (found["hangs"].code, found["hangs"].tail) == (None, ["on"]) and found["hangs"].seconds < 30
    assert (found["writes"].code, found["writes"].results) == (None, [1])
    assert "[fails] why" in capsys.readouterr().out
    left = subprocess.run(["pgrep", "-f", "sleep 97531"], capture_output=True, text=True, check=False)
    assert not left.stdout, "what a part started is ended with it"


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run([sys.executable, "benchmarks/gpu_check.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
