"""The one command for a GPU: what it runs exists, and what ends badly is said."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import gpu_check
import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("check", gpu_check.CHECKS, ids=lambda check: check.name)
def test_each_check_is_a_command_that_exists(check: gpu_check.Check) -> None:
    script = check.command[0]
    assert script == "-m" or (ROOT / script).is_file()


def test_a_check_that_fails_or_hangs_is_a_result() -> None:
    end = time.monotonic() + 60
    failed = gpu_check.run(gpu_check.Check("fails", ("-c", "print('why'); raise SystemExit(3)"), 30), end)
    assert (failed.code, failed.tail) == (3, ["why"])
    hung = gpu_check.run(gpu_check.Check("hangs", ("-c", "import time; print('on'); time.sleep(60)"), 2), end)
    assert (hung.code, hung.tail) == (None, ["on"])
    assert hung.seconds < 20
    wrote = gpu_check.run(
        gpu_check.Check(
            "writes", ("-c", "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('[1]')", "{out}"), 30
        ),
        end,
    )
    assert (wrote.code, wrote.results) == (0, [1])


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run([sys.executable, "benchmarks/gpu_check.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
