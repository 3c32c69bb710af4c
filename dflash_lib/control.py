"""Control: what people ask of a run while it goes on, and how its threads take it up at a step boundary."""

from __future__ import annotations

import threading
from dataclasses import astuple, dataclass
from typing import Literal

Request = Literal["pause", "resume", "checkpoint", "evaluate", "stop"]


@dataclass(frozen=True)
class Wishes:
    """What is asked for at one moment. Counts only grow, so a thread compares them with the last ones it saw."""

    stop: bool = False
    paused: bool = False
    checkpoints: int = 0
    evaluations: int = 0

    def numbers(self) -> list[int]:
        """As numbers, so that nodes can agree on the largest of each."""
        return [int(value) for value in astuple(self)]

    @classmethod
    def of(cls, numbers: list[int]) -> Wishes:
        stop, paused, checkpoints, evaluations = numbers
        return cls(bool(stop), bool(paused), checkpoints, evaluations)


class Control:
    """Takes requests from any thread, at any time, at once; the training threads look at each step boundary."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wishes = Wishes()

    def ask(self, request: Request) -> None:
        """Writes a request down. A stop is final; a pause lasts until resume or stop."""
        with self._changed:
            now = self._wishes
            self._wishes = Wishes(
                stop=now.stop or request == "stop",
                paused=request == "pause" or (now.paused and request not in ("resume", "stop")),
                checkpoints=now.checkpoints + (request == "checkpoint"),
                evaluations=now.evaluations + (request == "evaluate"),
            )
            self._changed.notify_all()

    @property
    def wishes(self) -> Wishes:
        return self._wishes

    def wait_for_change(self, seen: Wishes, timeout: float) -> None:
        """Sleeps until a request differs from ``seen``, at most ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._wishes != seen, timeout)
