"""A run's numbers for other people's viewers, TensorBoard and trackio, live or afterwards (each behind its extra)."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from .config import ConfigError
from .events import read
from .run_folder import json_or_none

_STEP = ("loss", "grad_norm", "lr", "seconds")
_ACCEPTANCE = ("tau_mean", "tau_pooled", "speedup")


class Sink(Protocol):
    """Where numbers go. Called from one thread at a time."""

    def write(self, values: Mapping[str, float], step: int, wall_time: float) -> None:
        """Takes named numbers of an optimizer step; ``wall_time`` is seconds since 1970."""

    def close(self) -> None:
        """Brings everything written to its place."""


class TensorBoard:
    """Event files that ``tensorboard --logdir <folder>`` reads. Needs the extra ``tensorboard``, not torch.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise ConfigError("tensorboard is not installed: pip install 'dflash-workspace[tensorboard]'") from None
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def write(self, values: Mapping[str, float], step: int, wall_time: float) -> None:
        summary = self._summary(value=[self._summary.Value(tag=n, simple_value=v) for n, v in values.items()])
        self._writer.add_event(self._event(wall_time=wall_time, step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class Trackio:
    """A trackio run (kept on this machine unless ``space_id`` is given). Needs the extra ``trackio``.

    Raises:
        ConfigError: trackio is not installed.
    """

    def __init__(
        self, project: str, name: str | None = None, config: Mapping[str, Any] | None = None, **init: Any
    ) -> None:
        try:
            import trackio
        except ImportError:
            raise ConfigError("trackio is not installed: pip install 'dflash-workspace[trackio]'") from None
        self._run = trackio.init(project=project, name=name, config=dict(config or {}), embed=False, **init)

    def write(self, values: Mapping[str, float], step: int, wall_time: float) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Numbers:
    """Events as named numbers: ``loss/drafter-0``, ``tokens_per_s/drafter-0``, ``compile_seconds/drafter-0`` (so far),
    ``tau_mean/heldout``. Keeps what has to be summed."""

    def __init__(self) -> None:
        self._compile_seconds: dict[str, float] = {}
        self._step = 0

    def of(self, event: Mapping[str, Any]) -> tuple[dict[str, float], int]:
        """The numbers of one event (often none) and the optimizer step they belong to."""
        thread, kind = str(event.get("thread")), event.get("kind")
        if isinstance(event.get("step"), int):
            self._step = max(self._step, event["step"])
        step = event["step"] if isinstance(event.get("step"), int) else self._step
        found: dict[str, Any] = {}
        if kind == "step":
            found = {f"{name}/{thread}": event.get(name) for name in _STEP}
            if event.get("seconds") and isinstance(event.get("tokens"), int | float):
                found[f"tokens_per_s/{thread}"] = event["tokens"] / event["seconds"]
        elif kind == "compile" and isinstance(event.get("seconds"), int | float):
            total = self._compile_seconds.get(thread, 0.0) + event["seconds"]
            found[f"compile_seconds/{thread}"] = self._compile_seconds[thread] = total
        elif kind == "evaluation":
            found = {f"{name}/{one['name']}": one.get(name) for one in event.get("sets") or () for name in _ACCEPTANCE}
        numbers = {n: float(v) for n, v in found.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        return numbers, step


def follow(trainer: Any, sink: Sink) -> Callable[[], None]:
    """Sends a trainer's numbers to ``sink`` while it runs; call before ``trainer.start()``.

    A thread of its own does the writing: a slow disk or network never holds a training thread, and a sink that
    fails is dropped with a warning in the run's log. Returns a function that ends it (the run's end does too).
    """
    waiting: queue.SimpleQueue[tuple[float, Mapping[str, Any]] | None] = queue.SimpleQueue()
    unsubscribe = trainer.log.subscribe(lambda event: waiting.put((time.time(), event)))

    def work() -> None:
        numbers = Numbers()
        try:
            while (item := waiting.get()) is not None:
                moment, event = item
                values, step = numbers.of(event)
                if values:
                    sink.write(values, step, moment)
            sink.close()
        except Exception as error:
            unsubscribe()
            trainer.log.emit("warning", message=f"the sink {type(sink).__name__} failed and was dropped: {error!r}")

    thread = threading.Thread(target=work, name="sink", daemon=True)
    thread.start()

    def end() -> None:
        unsubscribe()
        waiting.put(None)
        thread.join(30)

    trainer.on_finish(end)
    return end


def export(run_dir: str | os.PathLike[str], sink: Sink) -> int:
    """Sends the numbers of a run that is over (or as far as it is) to ``sink``; returns how many.

    Times on the viewer's clock are the run's: its start is that of ``status.json``, else now.
    """
    folder = Path(run_dir)
    started = (json_or_none(folder / "status.json") or {}).get("started")
    begun = _seconds(started) if isinstance(started, str) else time.time()
    numbers, written = Numbers(), 0
    for event in read(folder / "events.jsonl"):
        values, step = numbers.of(event)
        if values:
            sink.write(values, step, begun + event["t"])
            written += len(values)
    sink.close()
    return written


def _seconds(moment: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(moment).timestamp()
