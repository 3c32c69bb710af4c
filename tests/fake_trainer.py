"""A trainer's outside without its inside, for the dashboard's tests: real threads and log, invented numbers."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_lib.config import RunConfig
from dflash_lib.events import EventLog, lane
from dflash_lib.run_folder import new_run_dir, write_status


class FakeTrainer:
    """Takes ``steps`` steps of ``seconds`` in each of ``threads`` threads, compiling at step 1 and at step 60."""

    def __init__(
        self,
        config: RunConfig,
        threads: int = 2,
        seconds: float = 0.05,
        compile_seconds: float = 0.5,
        devices: list[str] | None = None,
    ) -> None:
        self.config = config
        self.run_dir: Path = new_run_dir(config)
        self.log = EventLog(self.run_dir / "events.jsonl")
        self.lanes = [f"drafter-{i}" for i in range(threads)]
        self.devices = devices or ["cpu"] * threads
        self.seconds, self.compile_seconds = seconds, compile_seconds
        self.asked: list[tuple[str, float]] = []
        self._stop, self._go = threading.Event(), threading.Event()
        self._go.set()
        self._checkpoints = self._evaluations = 0
        self._finish: list[Callable[[], None]] = []
        self._threads: list[threading.Thread] = []

    def on_finish(self, callback: Callable[[], None]) -> None:
        self._finish.append(callback)

    def start(self) -> FakeTrainer:
        write_status(self.run_dir, "running", step=0)
        self.log.emit("run_started", steps=self.config.steps)
        self._threads = [threading.Thread(target=self._work, args=(name, i)) for i, name in enumerate(self.lanes)]
        for thread in self._threads:
            thread.start()
        return self

    def _work(self, name: str, index: int) -> None:
        with lane(name, self.devices[index]):
            emit: Callable[..., Any] = self.log.emit
            for step in range(1, self.config.steps + 1):
                if not self._go.is_set():
                    emit("state", state="paused")
                    self._go.wait()
                if self._stop.is_set():
                    emit("state", state="stopped")
                    return
                if step in (1, 60):
                    if index:
                        emit("state", state="waiting_compile")
                        time.sleep(self.compile_seconds / 2)
                    emit("state", state="compiling", detail="attention")
                    begun = self.log.now()
                    time.sleep(self.compile_seconds)
                    emit(
                        "compile",
                        step=step,
                        **_compile(begun, self.log.now() - begun, "first" if step == 1 else "recompile"),
                    )
                emit("state", state="running")
                time.sleep(self.seconds)
                loss = 3 + 6 * math.exp(-step / 20) + 0.1 * math.sin(step * 1.7 + index)
                emit(
                    "step",
                    step=step,
                    loss=loss,
                    tokens=512,
                    rows=4,
                    seconds=self.seconds,
                    lr=1e-3,
                    grad_norm=1.0,
                    bucket=256,
                )
                if index == 0 and self._checkpoints:
                    self._checkpoints = 0
                    self.log.emit("checkpoint", thread="main", step=step, path=f"checkpoints/step-{step:06}")
                if index == 0 and self._evaluations:
                    self._evaluations = 0
                    sets = [{"name": "heldout", "tau_mean": 1.5 + step / 100, "speedup": 1.1}]
                    self.log.emit("evaluation", thread="main", step=step, sets=sets)
            emit("state", state="finished")

    def pause(self) -> None:
        self._ask("pause")
        self._go.clear()

    def resume(self) -> None:
        self._ask("resume")
        self._go.set()

    def stop(self) -> None:
        self._ask("stop")
        self._stop.set()
        self._go.set()

    def checkpoint(self) -> None:
        self._ask("checkpoint")
        self._checkpoints += 1

    def evaluate(self) -> None:
        self._ask("evaluate")
        self._evaluations += 1

    def _ask(self, what: str) -> None:
        self.asked.append((what, self.log.now()))

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        state = "stopped" if self._stop.is_set() else "finished"
        self.log.emit("run_finished", thread="main", state=state)
        write_status(self.run_dir, "stopped" if state == "stopped" else "completed", step=self.config.steps)
        for callback in self._finish:
            callback()
        self.log.close()

    async def wait(self) -> None:
        await asyncio.to_thread(self.join)


def _compile(start: float, seconds: float, cls: str) -> dict[str, Any]:
    return {
        "start": start,
        "seconds": seconds,
        "wait_seconds": 0.0,
        "frame": "attention",
        "file": "drafter.py",
        "line": 10,
        "compile_id": "0/0",
        "cls": cls,
        "reason": None if cls == "first" else "tensor 'q' size mismatch at index 2. expected 128, actual 256",
        "expected": None if cls == "first" else "128",
        "actual": None if cls == "first" else "256",
        "cache_size": 1,
        "limit": 8,
        "parts": {"dynamo": seconds / 4, "aot": seconds / 4, "inductor": seconds / 2, "triton": 0.0},
    }
