"""What a worker reports of the threads it waits for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dflash_lib.events import EventLog, lane
from dflash_lib.replica import Pending
from dflash_lib.reporting import BEHIND, Reporter


def alarms_after(waits: list[list[int]]) -> list[dict[str, Any]]:
    """Alarms of drafter-0 when, step after step, it waited for these ranks."""
    log, found = EventLog(None), []
    log.subscribe(lambda event: found.append(event) if event["kind"] == "alarm" else None)
    with lane("drafter-0", "cpu"):
        reporter = Reporter(log, ["drafter-0", "drafter-1", "drafter-2"], late=False)
        for step, missing in enumerate(waits, 1):
            if missing:
                reporter.waiting(missing)
            figures = Pending(torch.tensor([2.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0]))
            reporter.stepped(step, figures, time.monotonic(), tokens=1, rows=1, lr=1.0, bucket=1)
    return found


def test_a_thread_that_is_waited_for_step_after_step_is_an_alarm_once() -> None:
    (alarm,) = alarms_after([[1]] * BEHIND[0] + [[]] * 5)
    assert (alarm["alarm"], alarm["thread"], alarm["step"]) == ("thread_behind", "drafter-0", BEHIND[0])
    assert alarm["message"].startswith("drafter-1 kept this thread waiting in 10 of the last 10 steps")


@pytest.mark.parametrize(
    "waits",
    [
        [[1]] * (BEHIND[0] - 1) + [[]] * 30,  # a few long compiles
        [[1], [2]] * (BEHIND[0] - 1),  # everybody waits for somebody now and then
        ([[1]] + [[]] * 3) * 20,  # one step in four
        [[]] * 40,
    ],
)
def test_waiting_now_and_then_is_no_alarm(waits: list[list[int]]) -> None:
    assert alarms_after(waits) == []
