"""Where a drafter thread's features come from: the target on its own device, or a target thread that runs ahead.

Either way the frozen embedding and head are on the drafter's device (:class:`Ends`), and the features of a batch are
the same: what comes from where never changes what is learned.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .collective import Channel
from .data import RowBatch
from .head import Head
from .loss import needs_target
from .target import Features, Target
from .worker import Worker

if TYPE_CHECKING:
    from .threads import DrafterWorker, Trainer

AHEAD = 2  # batches that a target thread may be ahead of each drafter thread


@dataclass(frozen=True, eq=False)
class Ends:
    """The target's two ends that training needs beside the features: embedding and head, on one device."""

    weight: Tensor
    scale: float
    head: Head
    mask_token_id: int

    @classmethod
    def of(cls, target: Target, device: torch.device) -> Ends:
        """Shares the target's tensors where they are on ``device`` already (tied ends stay one tensor)."""
        embedding: Tensor = target.embedding.weight  # type: ignore[assignment]
        weight, head = embedding.to(device), target.head
        tied = head.weight.data_ptr() == embedding.data_ptr() and head.bias is None
        moved = Head(weight, None, head.softcap, head.scale) if tied else head.to(device)
        return cls(weight, target.embedding_scale, moved, target.mask_token_id)

    def embed(self, ids: Tensor) -> Tensor:
        """``ids [..]`` -> ``[.., H]``, as :meth:`Target.embed`."""
        embedded = torch.nn.functional.embedding(ids, self.weight)
        return embedded if self.scale == 1.0 else embedded * self.scale


def run_target(target: Target, batch: RowBatch, last_hidden: bool) -> Features:
    """The target's features of one batch of rows: ``[R, S, K*H]``, and the last hidden states where they are needed."""
    return target.features(batch.input_ids, document_ids=batch.document_ids, last_hidden=last_hidden)


class Own:
    """The target runs on the drafter's own device, in the drafter's own thread."""

    def __init__(self, target: Target, last_hidden: bool) -> None:
        self.target, self.last_hidden = target, last_hidden

    def features(self, batch: RowBatch) -> Features:
        return run_target(self.target, batch, self.last_hidden)


class Fed:
    """A target thread feeds this drafter thread through a bounded queue, batch after batch in the drafter's order."""

    def __init__(self, channel: Channel, lane: str, on_wait: Callable[[], None]) -> None:
        self.channel, self.lane, self.on_wait = channel, lane, on_wait

    def features(self, batch: RowBatch) -> Features:
        row_ids, found, ready = self.channel.take(self.on_wait)
        if row_ids != list(batch.row_ids):
            raise RuntimeError(f"{self.lane}: got features of rows {row_ids}, wanted those of {list(batch.row_ids)}")
        if found.features.is_cuda:
            stream = torch.cuda.current_stream(found.features.device)
            if ready is not None:
                stream.wait_event(ready)
            for tensor in found:  # made in the target's thread: its memory is not free before this stream is done
                if tensor is not None:
                    tensor.record_stream(stream)
        return found


class TargetWorker(Worker):
    """A thread that runs the target on a device of its own, a little ahead of the drafter threads it feeds."""

    def __init__(self, trainer: Trainer, index: int, device: torch.device, fed: list[DrafterWorker]) -> None:
        super().__init__(trainer, f"target-{index}", device, trainer.lanes)
        self.fed = fed
        self.target = trainer.ready.on_device[device]
        self.last_hidden = needs_target(self.config.objective, self.config.label_source)
        self._sides: dict[torch.device, torch.cuda.Stream] = {}

    def work(self) -> None:
        """Step after step, each drafter's batches in the order in which it will ask for them."""
        self.reporter.show("running")
        for step in range(self.trainer.ready.first_step, self.trainer.config.steps):
            for drafter in self.fed:
                for batch in drafter.batches(step):
                    found = run_target(self.target, batch, self.last_hidden)
                    drafter.channel.put(self.hand_over(found, batch, drafter.device), self.wait)
                    self.reporter.show("running")
        self.reporter.show("finished")

    def hand_over(self, found: Features, batch: RowBatch, device: torch.device) -> tuple[list[int], Features, Any]:
        """Copies to the drafter's device on this thread's stream; the event says when the copies are there.

        A copy makes the receiving device's current stream wait for it. In this thread that is a stream nobody works on:
        on the drafter's own, its step would wait for features of a later one. Between CPU and GPU the copy is waited
        for: no event orders it for the thread that reads it.
        """
        on_gpus = self.device.type == device.type == "cuda"
        with self._beside(device):
            last = None if found.last_hidden is None else found.last_hidden.to(device, non_blocking=on_gpus)
            here = Features(found.features.to(device, non_blocking=on_gpus), last)
        ready = torch.cuda.current_stream(self.device).record_event() if on_gpus else None
        return list(batch.row_ids), here, ready

    def _beside(self, device: torch.device) -> AbstractContextManager[Any]:
        if device.type != "cuda" or device == self.device:
            return nullcontext()
        if device not in self._sides:
            self._sides[device] = torch.cuda.Stream(device)
        return torch.cuda.stream(self._sides[device])

    def wait(self) -> None:
        """A full queue is what a target thread should see: it is ahead."""
        self.reporter.show("waiting_others", "for room: the drafter threads are behind")
