"""What several test modules share."""

from __future__ import annotations

import pytest

from dflash_lib import target as targets


@pytest.fixture(scope="session")
def smollm2() -> targets.Target:
    """The packaged target in float32, loaded once a session. Frozen: no test can change it."""
    return targets.load("smollm2", dtype="float32", progress=False)
