"""Four threads recompile all the time, and each has bit for bit the losses it has alone: the full counts.

1,000 recompiles with ``aot_eager`` and 100 with Inductor (which writes kernels here), forward and backward, changing
lengths, own code objects, default AdamW, in chunks that are processes of their own. Every finished chunk is kept in
``benchmarks/results/soak_isolation.json``: a soak that was interrupted goes on there, and one chunk without isolation
shows that the comparison can fail. ``python -m pytest -m soak tests/soak/test_isolation.py``
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from dflash_lib import race_lab

RESULTS = (
    Path(os.environ.get("SOAK_RESULTS", Path(__file__).parents[2] / "benchmarks" / "results")) / "soak_isolation.json"
)
LANES = 4
# backend -> (recompiles wanted, lengths a lane sees in a chunk); a lane's first compile in a chunk is no recompile
PLANS = {"aot_eager": (1000, 26), "inductor": (100, 6)}


def known() -> dict[str, Any]:
    """The chunks done so far with the installed torch."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found if found.get("torch") == version("torch") else {"torch": version("torch"), "chunks": {}}


def chunk(strategy: str, backend: str, number: int) -> dict[str, Any]:
    """One process: its lanes alone, then together. Done chunks are not repeated."""
    results = known()
    name = f"{strategy} {backend} {number}"
    if name not in results["chunks"]:
        lengths = PLANS[backend][1]
        result = race_lab.run(
            strategy,
            "compile_storm",
            threads=LANES,
            steps=lengths,
            repeat=1,
            shift=number * lengths,
            backend=backend,
            kernels=backend == "inductor",
            seconds=3000,
            stall=600,
            timeout=3600,
        )
        kept = ("outcome", "steps_done", "steps_planned", "compiles", "errors", "leaks", "differences", "seconds")
        results["chunks"][name] = {key: value for key, value in result.to_dict().items() if key in kept}
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.with_suffix(".part").write_text(json.dumps(results, indent=1) + "\n")
        RESULTS.with_suffix(".part").replace(RESULTS)
    return results["chunks"][name]


def chunks_of(backend: str) -> int:
    wanted, lengths = PLANS[backend]
    return -(-wanted // (LANES * (lengths - 1)))


@pytest.mark.soak
@pytest.mark.timeout(4000)
@pytest.mark.parametrize(
    ("backend", "number"), [(backend, number) for backend in PLANS for number in range(chunks_of(backend))]
)
def test_isolated_threads_have_the_losses_they_have_alone(backend: str, number: int) -> None:
    found = chunk("thread_local", backend, number)
    lengths = PLANS[backend][1]
    assert found["outcome"] == "ok" and not found["errors"], found
    assert found["compiles"] == found["steps_done"] == LANES * lengths
    assert found["differences"] == {"lanes": 0, "steps": LANES * lengths, "largest": 0.0}


@pytest.mark.soak
@pytest.mark.timeout(4000)
def test_without_isolation_the_comparison_fails() -> None:
    found = chunk("none", "aot_eager", 0)
    assert found["outcome"] != "ok"
    assert found["errors"] or found["differences"]["lanes"] > 0
