"""What several test modules share."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator

import pytest
import torch

from dflash_lib import target as targets


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is no GPU, tests that need one are skipped and say so: each has a CPU twin."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _signals_and_watchdogs_are_as_usual() -> Iterator[None]:
    """A shell that starts us in the background makes us, and every process that we start, deaf to Ctrl-C; so do some
    event loops that other tests leave. Tests press Ctrl-C: Python's usual answer is put back before each. And a
    watchdog that a benchmark set would end the whole run minutes later."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def smollm2() -> targets.Target:
    """The packaged target in float32, loaded once a session. Frozen: no test can change it."""
    return targets.load("smollm2", dtype="float32", progress=False)
