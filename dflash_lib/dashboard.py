"""The live view of a run: what every thread is doing, redrawn by one publisher thread, and buttons to steer it.

Only widgets with a value are used, and one thread sets them all: an Output widget used from worker threads loses
lines and can end a headless run. A training thread pays one ``deque.append`` an event; the publisher looks twice a
second at most, and less often where drawing is dear (:data:`SHARE`).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .dashboard_panel import Panel
from .dashboard_picture import png, save
from .dashboard_state import ENDED, Board
from .errors import UserError
from .events import read
from .launch import Tail
from .memory import gpu_gib, host_gib
from .run_folder import json_or_none, read_status, run_state

INTERVAL = 0.5  # seconds between redraws, at least
SHARE = 0.01  # of one core's time that redrawing may take: a dear redraw comes less often

_live: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # run folder -> trainer of this process


class Dashboard:
    """Shows a trainer's run while it goes on; ``display(Dashboard(trainer))`` before ``trainer.start()``, or after.

    When the run ends, before its waiting cell does, the last state is shown and left in the notebook as one PNG and
    one piece of plain HTML, and ``loss.png`` and ``dashboard.html`` are written into the run folder.

    Args:
        trainer: has ``log`` (an EventLog), ``config``, ``on_finish(callback)`` and the controls ``pause``,
            ``resume``, ``checkpoint``, ``evaluate``, ``stop``. None (see :meth:`attach`): a run that is watched only.
        run_dir: a run folder whose events so far are shown first.
    """

    def __init__(self, trainer: Any, *, run_dir: str | os.PathLike[str] | None = None) -> None:
        self._trainer = trainer
        self._folder = None if run_dir is None else Path(run_dir)
        config = json_or_none(self._folder / "config.json") if self._folder else trainer.config.model_dump(mode="json")
        config = config if isinstance(config, dict) else {}
        self.board = Board(config, tuple(getattr(trainer, "lanes", None) or ()))
        self.panel = Panel(self._folder.name if self._folder else str(config.get("name", "run")), self._pressed)
        self.redraws = 0
        self.redraw_seconds = 0.0  # processor time, of the publisher's thread alone
        self._events: deque[dict[str, Any]] = deque()
        self._changes: deque[tuple[Callable[[], None], threading.Event | None]] = deque()
        self._wake, self._done = threading.Event(), threading.Event()
        self._interval = INTERVAL
        self._picture: bytes | None = None
        self._closing = False
        self._tail = Tail(self._folder / "events.jsonl") if self._folder and trainer is None else None
        self._unsubscribe = trainer.log.subscribe(self._events.append) if trainer is not None else lambda: None
        self._seen = self._read_what_is_there()
        self._publisher = threading.Thread(target=self._publish, name="dashboard", daemon=True)
        self._publisher.start()
        if trainer is not None:
            trainer.on_finish(self.close)

    @classmethod
    def attach(cls, run_dir: str | os.PathLike[str]) -> Dashboard:
        """Shows a run folder: as it ended, or as it goes on, whichever process writes it.

        The buttons work where the run's trainer lives in this kernel (a notebook that was closed and opened again);
        a run of another process is watched only.

        Raises:
            UserError: no run has begun there.
        """
        folder = Path(run_dir).expanduser().absolute()
        if not (folder / "events.jsonl").exists() and not (folder / "status.json").exists():
            raise UserError(f"{folder}: holds no run (no events.jsonl); name a folder of runs/")
        trainer = _live.get(str(folder.resolve())) if run_state(folder) == "running" else None
        dashboard = cls(trainer, run_dir=folder)
        if trainer is None and run_state(folder) != "running":
            dashboard._done.wait(20)
        return dashboard

    # --- what callers use -------------------------------------------------------------------------------------------
    def close(self, timeout: float = 20.0) -> None:
        """Shows the last state, leaves the picture and ends the publisher. A second call does nothing."""
        self._closing = True
        self._wake.set()
        if threading.current_thread() is not self._publisher:
            self._done.wait(timeout)

    def flush(self, timeout: float = 5.0) -> bool:
        """Waits until everything that has happened so far is shown; returns whether it is."""
        shown = threading.Event()
        self._post(lambda: None, shown)
        return self._done.is_set() or shown.wait(timeout)

    @property
    def run_dir(self) -> Path | None:
        """The run's folder, once there is one."""
        if self._folder is None and getattr(self._trainer, "run_dir", None) is not None:
            self._folder = Path(self._trainer.run_dir)
            _live[str(self._folder.resolve())] = self._trainer
        return self._folder

    def _ipython_display_(self) -> None:
        self.panel.display()
        if self._picture is not None:
            self.panel.leave(self.board, self._picture)

    def _pressed(self, what: str) -> None:
        """A button (in the kernel's main thread): every lane says so at once, then the trainer is asked."""
        self._post(lambda: self.board.request(what))
        try:
            getattr(self._trainer, what)()
        except Exception as error:
            message = f"{what}: {error}"
            self._post(lambda: self.board.refuse(what, message))

    def _post(self, change: Callable[[], None], shown: threading.Event | None = None) -> None:
        self._changes.append((change, shown))
        self._wake.set()

    # --- the publisher's thread -------------------------------------------------------------------------------------
    def _publish(self) -> None:
        shown: list[threading.Event] = []
        try:
            while True:
                last = self._closing
                shown = self._redraw()
                last = last or (self._trainer is None and self.board.ended)
                if last:
                    self._finish()
                for event in shown:
                    event.set()
                if last:
                    return
                self._wake.wait(self._interval)
                self._wake.clear()
        finally:
            self._unsubscribe()
            self._done.set()

    def _redraw(self) -> list[threading.Event]:
        """Folds in what is new and shows it; returns who waits to hear that it is shown."""
        begun = time.thread_time()
        while self._events:
            self._apply(self._events.popleft())
        if self._tail is not None:
            for event in self._tail.poll():
                self._apply(event)
            self._look_at_status()
        waiting = []
        while self._changes:
            change, shown = self._changes.popleft()
            change()
            waiting += [shown] if shown is not None else []
        if self._trainer is not None and self.run_dir is not None:
            self._look_at_machine()
        self.panel.show(self.board, controls=self._trainer is not None)
        cost = time.thread_time() - begun
        self.redraws += 1
        self.redraw_seconds += cost
        self._interval = min(10.0, max(INTERVAL, cost / SHARE))
        return waiting

    def _apply(self, event: dict[str, Any]) -> None:
        if event.get("seq", 0) > self._seen.get(event.get("node", 0), -1):
            self.board.apply(event)

    def _read_what_is_there(self) -> dict[int, int]:
        """Folds in the log of a run that has begun; returns each node's last ``seq``, so that none counts twice."""
        seen: dict[int, int] = {}
        if self.run_dir is not None and (self.run_dir / "events.jsonl").exists():
            for event in read(self.run_dir / "events.jsonl"):
                self.board.apply(event)
                seen[event["node"]] = max(event["seq"], seen.get(event["node"], -1))
        return seen

    def _look_at_machine(self) -> None:
        """Between events time goes on (a long compile), and memory is what the device says."""
        board = self.board
        error = getattr(getattr(self._trainer, "run", None), "error", None)
        if board.ended and error is not None:  # one raised before any thread ran is in no worker's event
            board.error = board.error or f"{type(error).__name__}: {error}"
        if board.ended or board.state == "not started":
            return
        board.now = max(board.now, self._trainer.log.now())
        board.host_gib = host_gib()
        for lane in board.lanes.values():
            if lane.state not in ENDED and (held := gpu_gib(lane.device)) is not None:
                lane.memory_gib = held

    def _look_at_status(self) -> None:
        """A run of another process: whether it still lives, and how it ended."""
        assert self._folder is not None
        state, status = run_state(self._folder), read_status(self._folder) or {}
        if state == "died":
            self.board.end("failed", f"process {status.get('pid')} died without a word (killed, or out of memory)")
        elif state in ("completed", "failed", "stopped"):
            error = status.get("error") or {}
            words = f"{error.get('thread')}: {error.get('type')}: {error.get('message')}" if error else None
            self.board.end("finished" if state == "completed" else state, words)

    def _finish(self) -> None:
        self._picture = png(self.board, self.panel.title)
        self.panel.leave(self.board, self._picture)
        if self._trainer is not None and self.run_dir is not None and self.run_dir.is_dir():
            save(self.board, self.run_dir, self.panel.title, self._picture)
