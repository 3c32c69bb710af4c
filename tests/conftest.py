"""What several test modules share."""

from __future__ import annotations

import signal

import pytest

from dflash_lib import target as targets

# A shell that starts us in the background makes us, and every process that we start, deaf to Ctrl-C, and Python leaves
# that so. Tests press Ctrl-C: Python's usual answer is put back.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2() -> targets.Target:
    """The packaged target in float32, loaded once a session. Frozen: no test can change it."""
    return targets.load("smollm2", dtype="float32", progress=False)
