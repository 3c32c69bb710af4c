"""Averaging and barriers: across the threads of one process and, through torch.distributed, across nodes.

A :class:`Team` is the group of threads that train one drafter together. They meet (every thread waits for all) and
they sum one buffer (gradients, loss and weight in one piece). Nothing here surrounds a compiled call, a forward or a
backward: threads meet only when each has finished its own.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Answer = TypeVar("Answer")


class Aborted(RuntimeError):
    """A meeting was called off: another thread failed, or a stop became hard. Never the cause itself."""


class Barrier:
    """All threads wait here for each other; one of them may do something for all while the others wait.

    Unlike ``threading.Barrier`` it knows who is missing, tells a waiting thread so after ``patience`` seconds, and
    hands the action's result to everybody.
    """

    def __init__(self, size: int, *, patience: float = 0.5) -> None:
        self.size = size
        self.patience = patience
        self._condition = threading.Condition()
        self._present: set[int] = set()
        self._turn = 0
        self._result: Any = None
        self._aborted = False

    def wait(
        self,
        rank: int,
        action: Callable[[], Answer] | None = None,
        on_wait: Callable[[list[int]], None] | None = None,
    ) -> Answer:
        """Waits until all ``size`` threads are here; the last one to come runs ``action``; all get its result.

        Args:
            rank: this thread's number, 0 to size - 1.
            action: run once, by one thread, while all the others wait. An exception in it is raised there and
                aborts the barrier for the others.
            on_wait: called once, with the missing ranks, when the wait gets longer than ``patience``.

        Raises:
            Aborted: somebody called :meth:`abort`.
        """
        with self._condition:
            if self._aborted:
                raise Aborted("the threads no longer meet")
            turn = self._turn
            self._present.add(rank)
            last = len(self._present) == self.size
            while not last and self._turn == turn and not self._aborted:
                if not self._condition.wait(self.patience) and on_wait is not None and self._turn == turn:
                    on_wait(sorted(set(range(self.size)) - self._present))
                    on_wait = None
            if not last:
                if self._turn == turn:
                    raise Aborted("the threads no longer meet")
                return self._result
        # The others stay in their loops above until the turn advances, so the action runs without the lock.
        try:
            result = action() if action is not None else None
        except BaseException:
            self.abort()
            raise
        with self._condition:
            self._result = result
            self._present.clear()
            self._turn += 1
            self._condition.notify_all()
        return result  # type: ignore[return-value]

    def abort(self) -> None:
        """Everybody who waits here, or comes later, gets :class:`Aborted`."""
        with self._condition:
            self._aborted = True
            self._condition.notify_all()


class Channel:
    """A bounded queue from one thread to another that can be closed: whoever waits at either end is then let go."""

    def __init__(self, size: int, *, patience: float = 0.5) -> None:
        self.size = size
        self.patience = patience
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: Any, on_wait: Callable[[], None] | None = None) -> None:
        """Waits for room. ``on_wait`` is called once when that takes longer than ``patience`` seconds.

        Raises:
            Aborted: the channel was closed.
        """
        self._wait(lambda: len(self._items) < self.size, on_wait, lambda: self._items.append(item))

    def take(self, on_wait: Callable[[], None] | None = None) -> Any:
        """Waits for an item; as :meth:`put`."""
        return self._wait(lambda: bool(self._items), on_wait, lambda: self._items.popleft())

    def close(self) -> None:
        """Ends both sides' waiting, now and later, and lets go of what lies in the queue."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], on_wait: Callable[[], None] | None, act: Callable[[], Answer]) -> Answer:
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or ready(), self.patience):
                if on_wait is not None:
                    on_wait()
                self._changed.wait_for(lambda: self._closed or ready())
            if self._closed:
                raise Aborted("the channel is closed")
            result = act()
            self._changed.notify_all()
            return result


def join_nodes(timeout: float = 600.0) -> tuple[int, int]:
    """(this process's number, how many there are): joins the others when torchrun started us, else (0, 1)."""
    if not dist.is_available():
        return 0, 1
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def from_first_node(key: str, make: Callable[[], str]) -> str:
    """A text that the first process makes and all processes get; ``key`` must be another for each text."""
    if not (dist.is_available() and dist.is_initialized()):
        return make()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set(key, make())
    return bytes(store.get(key)).decode()


class Team:
    """The threads that share one drafter, thread ``rank`` on ``devices[rank]``; a device may repeat.

    One thread alone (independent mode, or one process a GPU) is a team of one: the same loop, and nothing to wait
    for. With ``across_nodes`` and an initialised ``torch.distributed``, the sums go over all processes too.
    """

    def __init__(self, devices: Sequence[torch.device], *, across_nodes: bool = True, patience: float = 0.5) -> None:
        if len({device.type for device in devices}) > 1:
            raise ValueError(f"devices: a team cannot mix {sorted({d.type for d in devices})}")
        self.size = len(devices)
        self._first = devices[0]
        self.across_nodes = across_nodes and dist.is_available() and dist.is_initialized()
        self.nodes = dist.get_world_size() if self.across_nodes else 1
        self.node = dist.get_rank() if self.across_nodes else 0
        self._barrier = Barrier(self.size, patience=patience)
        self._numbers = [0] * self.size
        self._buffers: list[torch.Tensor] = [torch.empty(0)] * self.size
        self._streams: list[Any] = [None] * self.size
        self._done: list[Any] = [None] * self.size
        # The ranks on each device, in order; the first of them speaks for the device.
        self._groups: list[list[int]] = [
            [rank for rank, device in enumerate(devices) if device == one] for one in dict.fromkeys(devices)
        ]

    def meet(
        self,
        rank: int,
        action: Callable[[], Answer] | None = None,
        on_wait: Callable[[list[int]], None] | None = None,
    ) -> Answer:
        """Waits for every thread of the team; ``action`` runs in one of them, its result goes to all."""
        return self._barrier.wait(rank, action, on_wait)

    def abort(self) -> None:
        """Ends every meeting of this team, now and later, with :class:`Aborted`."""
        self._barrier.abort()

    def agree(self, numbers: list[int]) -> list[int]:
        """The largest of each number over all nodes (at home: the numbers themselves). Call it in one thread."""
        if self.nodes == 1:
            return numbers
        # Always this team's first device, whichever thread came last: a communicator belongs to a device.
        tensor = torch.tensor(numbers, device=self._first if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def strays(self, rank: int, number: int, on_wait: Callable[[list[int]], None] | None = None) -> list[int]:
        """Ranks whose ``number`` is not the one most threads have; every thread calls it, all get the same answer.

        Where whole nodes differ from each other, all ranks are named.
        """
        self._numbers[rank] = number

        def compare() -> list[int]:
            usual = statistics.mode(self._numbers)
            low = usual % 2**62
            if self.agree([low])[0] != -self.agree([-low])[0]:
                return list(range(self.size))
            return [other for other, found in enumerate(self._numbers) if found != usual]

        return self._barrier.wait(rank, compare, on_wait)

    def sum_(self, rank: int, buffer: torch.Tensor, on_wait: Callable[[list[int]], None] | None = None) -> None:
        """Replaces ``buffer`` by the sum of all threads' buffers, over all nodes; every thread calls it.

        Buffers are contiguous, one-dimensional and of one length. All of them end bit-for-bit equal, and the order of
        the additions never depends on who came first. On CUDA the result is ordered on the calling thread's current
        stream; nothing waits for the device.

        Raises:
            Aborted: the team was aborted while this thread waited.
        """
        if self.size == self.nodes == 1:
            return
        self._buffers[rank] = buffer
        self._leave_mark(rank)
        self._barrier.wait(rank, on_wait=on_wait)
        self._sum_slice(rank)
        self._leave_mark(rank)
        self._barrier.wait(rank, self._sum_across if len(self._groups) > 1 or self.nodes > 1 else None)
        self._wait_for(rank, self._group(rank))

    # --- the two parts of a sum -----------------------------------------------------------------------------------
    def _group(self, rank: int) -> list[int]:
        return next(group for group in self._groups if rank in group)

    def _sum_slice(self, rank: int) -> None:
        """On one device, each thread sums its own slice over all threads there, and writes it to all of them."""
        group = self._group(rank)
        if len(group) == 1:
            return
        self._wait_for(rank, group)
        place, length = group.index(rank), self._buffers[rank].numel()
        here = slice(place * length // len(group), (place + 1) * length // len(group))
        total = self._buffers[group[0]][here]
        for other in group[1:]:
            total += self._buffers[other][here]
        for other in group[1:]:
            self._buffers[other][here].copy_(total)

    def _sum_across(self) -> None:
        """Across devices and nodes: one thread, on the first buffer of each device, while all others wait.

        Everything is queued on the owners' own streams, so it follows their gradients and precedes their next step.
        """
        heads = [group[0] for group in self._groups]
        for head, group in zip(heads, self._groups, strict=True):
            self._wait_for(head, group)
        buffers, streams = [self._buffers[head] for head in heads], [self._streams[head] for head in heads]
        if len(heads) > 1:
            _sum_on_devices(buffers, streams)
        if self.nodes > 1:
            with _on(streams[0]):
                dist.all_reduce(buffers[0])
            if len(heads) > 1:
                _copy_to_devices(buffers, streams)
        for head, group in zip(heads, self._groups, strict=True):
            with _on(self._streams[head]):
                for other in group[1:]:
                    self._buffers[other].copy_(self._buffers[head])
            self._leave_mark(head)

    # --- order between streams ------------------------------------------------------------------------------------
    def _leave_mark(self, rank: int) -> None:
        """Records how far the thread's stream has come."""
        if self._buffers[rank].is_cuda:
            if self._streams[rank] is None:  # the first call is the owner's: its stream never changes
                self._streams[rank] = torch.cuda.current_stream(self._buffers[rank].device)
            self._done[rank] = self._streams[rank].record_event()

    def _wait_for(self, rank: int, group: list[int]) -> None:
        """The thread's stream goes on only after the marks of its group."""
        for other in group:
            if other != rank and self._done[other] is not None:
                self._streams[rank].wait_event(self._done[other])


def _on(stream: Any) -> AbstractContextManager[Any]:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


def _sum_on_devices(buffers: list[torch.Tensor], streams: list[Any]) -> None:
    """One buffer a device becomes their sum: NCCL in one call from this thread, or copies through the first device."""
    if buffers[0].is_cuda and torch.cuda.nccl.is_available(buffers):
        torch.cuda.nccl.all_reduce(buffers, streams=streams)
        return
    _synchronize(streams)
    for other in buffers[1:]:
        buffers[0] += other.to(buffers[0].device)
    _copy_to_devices(buffers, streams)


def _copy_to_devices(buffers: list[torch.Tensor], streams: list[Any]) -> None:
    if buffers[0].is_cuda and torch.cuda.nccl.is_available(buffers):
        torch.cuda.nccl.broadcast(buffers, root=0, streams=streams)
        return
    _synchronize(streams)
    for other in buffers[1:]:
        other.copy_(buffers[0])


def _synchronize(streams: list[Any]) -> None:
    for stream in streams:
        if stream is not None:
            stream.synchronize()
