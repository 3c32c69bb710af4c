"""Run: watches over the worker threads of a run, ends it in good order, and is what callers wait for."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from . import checkpoint, evaluate, fx_patch, prepare, runs, summary, timeline
from .launch import progress_bar
from .run_folder import State

if TYPE_CHECKING:
    from .threads import DrafterWorker, TargetWorker, Trainer

LOOK_EVERY = 0.1  # seconds between looks at the threads
STATUS_EVERY = 5.0  # seconds between writes of status.json


class Run:
    """A run that has been started: wait for it in a notebook with ``await run.wait()``, elsewhere with ``run.join()``.

    Attributes:
        dir: the run's folder.
        state: "running", "completed", "failed" or "stopped".
    """

    def __init__(self, trainer: Trainer, *, progress: bool = False) -> None:
        self.trainer, self._progress = trainer, progress
        self.dir: Path = trainer.run_dir
        self.state: State = "running"
        self.error: BaseException | None = None
        self._failed_in = "main"
        self._lock = threading.RLock()  # a signal's handler may come in while this thread holds it
        self._finished = threading.Event()
        self._threads: list[threading.Thread] = []
        self._stop_by: float | None = None
        self._settings = ExitStack()
        self._context = contextvars.copy_context()  # torch's settings for the run live here, not in the caller's
        self._supervised = self._terminated = False

    # --- beginning ------------------------------------------------------------------------------------------------
    @contextmanager
    def failing_early(self) -> Iterator[None]:
        """What goes wrong before the threads run is raised at once, and is the run's failure too."""
        trainer = self.trainer
        self._write_status("running")
        trainer.log.emit(
            "run_started",
            config=trainer.config.model_dump(mode="json"),
            lanes=trainer.lanes,
            devices=[str(device) for device in trainer.devices],
        )
        try:
            yield
        except BaseException as error:
            if not isinstance(error, (KeyboardInterrupt, SystemExit)):  # those are somebody's wish, no failure
                self.record_failure("main", error)
            trainer.abort()
            if self._supervised:  # an interrupt of the last moment: the supervisor ends the run
                self._wait_until_finished(self.trainer.config.stop_timeout)
            else:
                self._end()
            raise

    def launch(self, workers: Sequence[DrafterWorker | TargetWorker], shapes: int | None) -> None:
        """Fixes torch's settings, starts the threads, each with a copy of this one's context, and looks after them."""
        trainer = self.trainer
        self._context.run(self._settings.enter_context, prepare.torch_settings(trainer.config, shapes))
        self._settings.enter_context(trainer.monitor)
        if self._progress and trainer.node == 0:
            self._settings.enter_context(progress_bar(self.dir, trainer.config.name))
        self._listen_for_sigterm()
        atexit.register(self._at_exit)
        self._threads = [self._context.run(fx_patch.run_in_thread, worker.main, name=worker.lane) for worker in workers]
        self._supervised = True
        threading.Thread(target=self._supervise, name="supervisor", daemon=True).start()

    # --- waiting --------------------------------------------------------------------------------------------------
    async def wait(self) -> None:
        """Returns when the run has ended; buttons of the notebook stay alive meanwhile.

        The first interrupt stops the run at its next step boundary (with a checkpoint), the second aborts it; either
        is then raised.

        Raises:
            The error of the worker that failed first, with its own traceback and its thread's name as a note.
        """
        ended = asyncio.ensure_future(self._look_until_finished())
        try:
            await asyncio.shield(ended)
        except (asyncio.CancelledError, KeyboardInterrupt):
            try:
                self.trainer.stop()
                await asyncio.shield(ended)
            except (asyncio.CancelledError, KeyboardInterrupt):
                self.trainer.abort()
            raise
        self._raise()

    async def _look_until_finished(self) -> None:
        """Wakes the event loop now and then: an interrupt by ipykernel waits until something else wakes an idle one."""
        while not self._finished.is_set():
            await asyncio.sleep(LOOK_EVERY)

    def join(self, timeout: float | None = None) -> bool:
        """As :meth:`wait`, blocking; with a ``timeout`` in seconds it returns False when that has passed first."""
        try:
            ended = self._wait_until_finished(timeout)
        except (KeyboardInterrupt, SystemExit):
            try:
                self.trainer.stop()
                self._wait_until_finished()
            except (KeyboardInterrupt, SystemExit):
                self.trainer.abort()
                self._finished.wait(5)
            raise
        if ended:
            self._raise()
        return ended

    def _wait_until_finished(self, timeout: float | None = None) -> bool:
        """Wakes now and then: a signal that the system gave to another thread is handled only when this one wakes."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._finished.wait(LOOK_EVERY if end is None else min(LOOK_EVERY, max(0.0, end - time.monotonic()))):
            if end is not None and time.monotonic() >= end:
                return False
        return True

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error
        if self._terminated:
            raise SystemExit(128 + signal.SIGTERM)

    def evaluate(self) -> dict[str, Any]:
        """Acceptance length and speed-up of the last checkpoint on held-out prompts, once the run has ended.

        Real speculative decoding against plain decoding of the same prompts in this process; writes
        ``acceptance.json`` and ``acceptance.png``, and returns what the former holds.

        Raises:
            CheckpointError: the run has left no checkpoint. EvaluationError: there is no held-out prompt.
        """
        config, ready = self.trainer.config, self.trainer.ready
        device = next(iter(ready.on_device or ready.ends))
        target = ready.on_device.get(device) or ready.target.to(device)
        return evaluate.evaluate(
            target,
            checkpoint.load(self.dir, device=device, target=target),
            {"heldout": ready.prompts},
            out=self.dir,
            temperature=config.temperature,
            max_new_tokens=config.evaluate_tokens,
            seed=config.seed,
            checkpoint=str(checkpoint.latest(self.dir)),
            step=checkpoint.describe(self.dir)["step"],
        )

    # --- while it runs --------------------------------------------------------------------------------------------
    def stop_by(self, moment: float) -> None:
        """When a stop becomes hard, on the clock of ``time.monotonic``; an earlier one stays."""
        with self._lock:
            self._stop_by = moment if self._stop_by is None else min(moment, self._stop_by)

    def record_failure(self, thread: str, error: BaseException) -> bool:
        """Keeps the first failure; returns whether this one is it."""
        with self._lock:
            if self.error is not None:
                return False
            error.add_note(f"(in thread {thread} of the run in {self.dir})")
            self.error, self._failed_in = error, thread
            return True

    def _supervise(self) -> None:
        written = time.monotonic()
        while any(thread.is_alive() for thread in self._threads) and not self._given_up():
            time.sleep(LOOK_EVERY)
            if time.monotonic() - written > STATUS_EVERY:
                with suppress(OSError):  # a full disk must not end the watch
                    self._write_status("running")
                written = time.monotonic()
        self._end()

    def _given_up(self) -> bool:
        """Past ``stop_timeout`` the threads that still compute are left behind, and the run ends without them."""
        if self._stop_by is None or time.monotonic() < self._stop_by:
            return False
        self.trainer.abort()
        for thread in self._threads:
            thread.join(1.0)
        late = [thread.name for thread in self._threads if thread.is_alive()]
        if late:
            seconds = self.trainer.config.stop_timeout
            message = f"stopped without {', '.join(late)}: no step boundary within {seconds:.0f} s"
            with suppress(OSError):
                self.trainer.log.emit("warning", message=message)
        return True

    # --- the end --------------------------------------------------------------------------------------------------
    def _end(self) -> None:
        """Settings back, pictures, status; then whoever waits may go on. Nothing here may keep the run from ending."""
        trainer = self.trainer
        state: State = "failed" if self.error else "stopped" if trainer.control.wishes.stop else "completed"
        try:
            self._context.run(self._settings.close)
            with suppress(OSError):  # a full disk
                trainer.log.emit("run_finished", step=self._step() or None, state=state)
            self.state = state
            with suppress(OSError):
                self._leave_pictures()
            if not any(thread.is_alive() for thread in self._threads):  # one left behind may still have a word to say
                with suppress(OSError):
                    trainer.log.close()
            self._write_status(state)
        except OSError as error:  # the disk is full, the folder gone: whoever waits must hear of it
            self.record_failure("supervisor", error)
            state = "failed"
        finally:
            self.state = state
            atexit.unregister(self._at_exit)
            self._finished.set()

    def _leave_pictures(self) -> None:
        """Views of the log: without matplotlib, or with a fault in one of them, the run is still what it is."""
        steps: list[Callable[[], Any]] = list(self.trainer.at_finish)
        if self.trainer.node == 0 and self._threads:
            steps += [lambda: timeline.draw_all(self.dir), lambda: summary.draw_losses(self.dir)]
        for step in steps:
            try:
                step()
            except ImportError:
                continue
            except Exception as error:
                message = f"a picture was not drawn: {type(error).__name__}: {error}"
                self.trainer.log.emit("warning", message=message)

    def _step(self) -> int:
        return max((worker.reporter.step for worker in self.trainer.workers), default=0)

    def _write_status(self, state: State) -> None:
        if self.trainer.node == 0:
            runs.write_status(self.dir, state, step=self._step() or None, error=self.error, thread=self._failed_in)

    # --- the process ----------------------------------------------------------------------------------------------
    def _listen_for_sigterm(self) -> None:
        """SIGTERM stops the run in good order, then ends the process with 143; a handler of the program's own stays."""
        here = threading.current_thread() is threading.main_thread()
        if not here or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return

        def handler(number: int, frame: FrameType | None) -> Any:
            self._terminated = True
            self.trainer.stop()
            self._wait_until_finished()
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, handler)
        self._settings.callback(self._restore_sigterm)

    def _restore_sigterm(self) -> None:
        with suppress(ValueError):  # signal.signal works in the main thread only; the handler then does no harm
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _at_exit(self) -> None:
        """The process ends while the run goes on: stop, and leave a status that says so."""
        self.trainer.stop()
        self._finished.wait(min(10.0, self.trainer.config.stop_timeout))
