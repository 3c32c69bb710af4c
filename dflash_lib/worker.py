"""Worker: what every thread of a run has in common, from its first line to its last."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import torch

from . import events, fx_patch
from .collective import Aborted
from .reporting import Reporter

if TYPE_CHECKING:
    from .threads import Trainer


class Worker:
    """A thread with a lane, a device and a reporter; subclasses fill in :meth:`work` and :meth:`leave`."""

    def __init__(self, trainer: Trainer, lane: str, device: torch.device, others: Sequence[str]) -> None:
        self.trainer, self.config, self.log = trainer, trainer.config, trainer.log
        self.lane, self.device = lane, device
        self.reporter = Reporter(self.log, others, late=device.type == "cuda")

    def main(self) -> None:
        """The thread's whole life; an error goes to the trainer, which ends the others."""
        with events.lane(self.lane, str(self.device)):
            self.reporter.show("starting")
            try:
                with fx_patch.worker_context(), on_device(self.device, self.trainer.all_devices):
                    self.work()
            except Aborted:
                self._last_word("stopped")
            except BaseException as error:
                self._last_word("failed", f"{type(error).__name__}: {error}")
                self.trainer.failed(self.lane, self.device, error)
            finally:
                self.leave()

    def _last_word(self, state: str, detail: str = "") -> None:
        with suppress(OSError):  # a full disk, which may be the error itself, must not keep it from the trainer
            self.reporter.show(state, detail)

    def work(self) -> None:
        raise NotImplementedError

    def leave(self) -> None:
        """Lets go of whoever waits for this thread."""


@contextmanager
def on_device(device: torch.device, everybody: list[torch.device]) -> Iterator[None]:
    """What a worker sets at its top: its GPU, and a stream of its own where others are on it; on a CPU its cores."""
    if device.type != "cuda":
        torch.set_num_threads(intra_op_threads(len(everybody)))
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)) if everybody.count(device) > 1 else nullcontext():
        yield


def intra_op_threads(workers: int) -> int:
    """Threads that one operation of one worker may use on a CPU."""
    return max(1, (os.cpu_count() or 1) // workers)
