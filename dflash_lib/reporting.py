"""What others see of a worker: its state, its step events, and whom it waits for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from .events import EventLog
from .replica import Pending


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

    def show(self, state: str, detail: str = "") -> None:
        """A state event, when the state is another than before."""
        if (state, detail) != (self.state, self.detail):
            self.state, self.detail = state, detail
            fields: dict[str, Any] = {"detail": detail} if detail else {}
            self.log.emit("state", state=state, **fields)

    def waiting(self, missing: list[int]) -> None:
        """Names the threads that this one waits for; given to the team's meetings."""
        self.show("waiting_others", "for " + ", ".join(self.lanes[rank] for rank in missing))

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
