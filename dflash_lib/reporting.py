"""What others see of a worker: its state, its step events, and whom it waits for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from .events import EventLog
from .replica import Pending

BEHIND = (10, 20)  # a thread that kept this one waiting in so many of its last so many steps is behind


class Reporter:
    """Writes one worker's events.

    On a GPU the figures of a step are read one step late: nobody waits for the device to write a log.

    Args:
        log: the run's events. lanes: names of the team's threads, by rank. late: whether to report one step late.
    """

    def __init__(self, log: EventLog, lanes: Sequence[str], *, late: bool) -> None:
        self.log, self.lanes, self.late = log, lanes, late
        self.state, self.detail = "", ""
        self.step = 0
        self._due: tuple[Pending, dict[str, Any]] | None = None
        self._waited: set[str] = set()  # for whom, in the step that goes on
        self._waits: deque[set[str]] = deque(maxlen=BEHIND[1])

    def show(self, state: str, detail: str = "") -> None:
        """A state event, when the state is another than before."""
        if (state, detail) != (self.state, self.detail):
            self.state, self.detail = state, detail
            fields: dict[str, Any] = {"detail": detail} if detail else {}
            self.log.emit("state", state=state, **fields)

    def waiting(self, missing: list[int]) -> None:
        """Names the threads that this one waits for; the meetings of a team call it after half a second."""
        names = [self.lanes[rank] for rank in missing]
        self._waited.update(names)
        self.show("waiting_others", "for " + ", ".join(names))

    def _watch_for_stragglers(self) -> None:
        """A compile makes others wait once; a thread that does so step after step is an alarm, given once a stretch."""
        self._waits.append(self._waited)
        self._waited = set()
        for name in set().union(*self._waits):
            times = sum(name in step for step in self._waits)
            if times >= BEHIND[0]:
                message = f"{name} kept this thread waiting in {times} of the last {len(self._waits)} steps"
                self.log.emit("alarm", step=self.step, alarm="thread_behind", message=message)
                self._waits.clear()
                return

    def stepped(self, step: int, figures: Pending, began: float, **fields: Any) -> None:
        """A step is through the host; ``fields`` are those of the contract that the device does not know.

        The step's seconds run from ``began`` (of ``time.monotonic``) until the device has done the step before, so
        that they add up to the time that passes.
        """
        self.flush()
        self.step = step
        self._due = (figures, {"step": step, "seconds": round(time.monotonic() - began, 6), **fields})
        if not self.late:
            self.flush()
        self._watch_for_stragglers()
        if self.state == "waiting_others":
            self.show("running")

    def flush(self) -> None:
        """Writes the step event that is still due, waiting for the device if need be."""
        if self._due is None:
            return
        (pending, fields), self._due = self._due, None
        figures = pending.read()
        self.log.emit(
            "step",
            loss=figures.loss,
            loss_all=figures.loss_all,
            grad_norm=figures.grad_norm,
            accuracy=[round(value, 5) for value in figures.accuracy],
            **fields,
        )
        if figures.weight_all == 0:
            message = f"step {fields['step']}: no position of any row is to be learned; its gradient is zero"
            self.log.emit("warning", step=fields["step"], message=message)
