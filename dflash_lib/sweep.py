"""Many runs of one notebook: a folder a run, several at once, failures kept apart, and a state that goes on later."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import sweep_plan
from .atomic import write_json
from .config import ConfigError
from .launch import RunProgress
from .run_folder import gpus, json_or_none, lives, read_status, run_state, runs_root, write_status
from .sweep_plan import Grid


def sweep(
    notebook: str | os.PathLike[str],
    grid: Grid,
    *,
    out: str | os.PathLike[str] | None = None,
    base: Mapping[str, Any] | None = None,
    parallel: int = 1,
    gpus_per_run: int | None = None,
    timeout: float | None = None,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Runs ``notebook`` once for every point of ``grid``; returns one record a run.

    A run's folder is named after its parameters, so calling again with the same grid goes on where it was left: what
    is completed is not repeated, what failed or was stopped is tried again (from its last checkpoint, if it has one),
    and a grid that has grown adds runs. A run that fails does not stop the others.

    Args:
        grid: parameter -> values, for every combination; or a list of parameter sets, for just those.
        out: the sweep's folder; None: ``runs/<notebook>-sweep``.
        base: parameters that all runs share.
        parallel: runs at once. Each gets its share of the processor's cores.
        gpus_per_run: give every run that many GPUs of its own (``CUDA_VISIBLE_DEVICES``); None: all see all.
        timeout: seconds after which a run is stopped and counts as failed; None: never.
        progress: show the runs on the terminal.

    Returns:
        ``{"run", "run_dir", "parameters", "state", "step", "error"}`` for each run, in the grid's order.

    Raises:
        ConfigError: a wrong grid, an unknown parameter, a value that RunConfig refuses, a folder in use: nothing ran.
        KeyboardInterrupt: Ctrl-C; the runs were stopped at their next step first (a second Ctrl-C kills them).
    """
    source = Path(notebook).expanduser().absolute()
    if not source.exists() and (source.parent / "notebooks" / source.name).exists():
        source = source.parent / "notebooks" / source.name  # a notebook names its neighbours; this runs from above
    if parallel < 1 or (gpus_per_run is not None and gpus_per_run < 1):
        raise ConfigError("parallel: and gpus_per_run: are whole numbers from 1")
    if gpus_per_run is not None and parallel * gpus_per_run > len(visible_gpus()):
        wanted = f"{parallel} runs at once with {gpus_per_run} GPUs each"
        raise ConfigError(f"gpus_per_run: {wanted} need more than the {len(visible_gpus())} GPUs there are")
    points = sweep_plan.points(grid, base or {})
    sweep_plan.check(source, points, base or {})
    folder = runs_root("runs") / f"{source.stem}-sweep" if out is None else Path(out).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    runs = [Planned(folder / name, parameters) for name, parameters in sweep_plan.named(points, base or {}).items()]
    with _alone_in(folder), _terminable():
        return _Sweep(source, folder, runs, parallel, gpus_per_run, timeout, progress).go()


def sweep_file(path: str | os.PathLike[str], *, progress: bool = True) -> list[dict[str, Any]]:
    """Runs the sweep that a YAML file describes (docs/batches.md shows one); its folder is ``runs/<file's name>``.

    Raises:
        ConfigError: the file cannot be read, has a key that is unknown, or says something :func:`sweep` refuses.
    """
    plan = sweep_plan.read(path)
    try:
        return sweep(plan.pop("notebook"), plan.pop("grid"), progress=progress, **plan)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


@dataclass
class Planned:
    """One run of a sweep, and its process while it has one."""

    run_dir: Path
    parameters: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    begun: float = 0.0
    slot: int = 0
    adopted: bool = False
    bar: Any = field(default=None, repr=False)

    @property
    def state(self) -> str:
        if self.process is not None and self.process.poll() is None:
            return "running"
        state = run_state(self.run_dir)
        launcher = json_or_none(self.run_dir / "launch.json") or {}
        if state not in ("completed", "running") and lives(launcher.get("pid", 0), self.run_dir / "launch.json"):
            return "running"  # an earlier sweep's child that has not written its status yet
        return "failed" if state == "died" else state

    @property
    def can_go_on(self) -> bool:
        """Whether a checkpoint is there that is not that of the last step (from which nothing is left to train)."""
        found = (self.run_dir / "checkpoints").glob("step-*")
        steps = [int(folder.name.removeprefix("step-")) for folder in found if folder.name[5:].isdigit()]
        return bool(steps) and max(steps) < (json_or_none(self.run_dir / "config.json") or {}).get("steps", math.inf)

    def record(self) -> dict[str, Any]:
        status = read_status(self.run_dir) or {}
        error = status.get("error") or {}
        state = self.state
        return {
            "run": self.run_dir.name,
            "run_dir": str(self.run_dir),
            "parameters": self.parameters,
            "state": state,
            "step": status.get("step", 0),
            "error": f"{error.get('type')}: {error.get('message')}" if error and state == "failed" else None,
        }


# --- doing it -------------------------------------------------------------------------------------------------------
class _Sweep:
    """Starts runs while there are free slots, looks at them five times a second, writes ``sweep.json``."""

    def __init__(
        self,
        notebook: Path,
        folder: Path,
        runs: list[Planned],
        parallel: int,
        gpus_per_run: int | None,
        timeout: float | None,
        progress: bool,
    ) -> None:
        self.notebook, self.folder, self.runs = notebook, folder, runs
        self.parallel, self.gpus_per_run, self.timeout = parallel, gpus_per_run, timeout
        self.progress = SweepProgress(folder.name, len(runs)) if progress else None

    def go(self) -> list[dict[str, Any]]:
        waiting = []
        for run in self.runs:
            state = run.state
            run.adopted = state == "running"
            if state == "completed":
                self._say(run, "done before")
            elif not run.adopted:
                waiting.append(run)
        active = [run for run in self.runs if run.adopted]
        try:
            while waiting or active:
                while waiting and len(active) < self.parallel:
                    run = waiting.pop(0)
                    run.slot = min(set(range(self.parallel)) - {r.slot for r in active if not r.adopted})
                    active.append(run)  # first: a Ctrl-C in the middle of starting must stop it too
                    self._start(run)
                    self._write()
                time.sleep(0.2)
                for run in [run for run in active if self._over(run)]:
                    active.remove(run)
                    self._say(run, run.state)
                    self._write()
                if self.progress:
                    self.progress.show(active)
        except KeyboardInterrupt:
            self._stop([run for run in active if not run.adopted])
            raise
        finally:
            self._write()
            if self.progress:
                self.progress.close()
        return [run.record() for run in self.runs]

    def _start(self, run: Planned) -> None:
        run.run_dir.mkdir(parents=True, exist_ok=True)
        parameters = dict(run.parameters)
        if run.can_go_on:
            parameters["resume"] = str(run.run_dir)
        environment = {**os.environ, **self._share(run.slot)}
        root = str(Path(__file__).parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        write_json(run.run_dir / "launch.json", {"notebook": str(self.notebook), "parameters": parameters, "pid": 0})
        with (run.run_dir / "launch.log").open("ab") as log:
            run.process = subprocess.Popen(
                [sys.executable, "-m", "dflash_lib.launch", str(run.run_dir)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # a terminal's Ctrl-C reaches this process alone, which passes it on once
            )
        run.begun = time.time()

    def _share(self, slot: int) -> dict[str, str]:
        """The part of the machine a slot may use."""
        share = {}
        if self.gpus_per_run is not None:
            first = slot * self.gpus_per_run
            share["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus()[first : first + self.gpus_per_run])
        if self.parallel > 1 and "OMP_NUM_THREADS" not in os.environ:
            share["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // self.parallel))
        return share

    def _over(self, run: Planned) -> bool:
        if run.process is None:  # another sweep's child, still at work when this one began
            return run.state != "running"
        if run.process.poll() is None:
            if self.timeout is None or time.time() - run.begun < self.timeout:
                return False
            self._stop([run])
            words = f"took longer than {self.timeout:g} s"
            write_status(run.run_dir, "failed", error=TimeoutError(words))
        elif not self._wrote_its_end(run):
            words = f"the launcher ended with code {run.process.returncode}; see launch.log"
            write_status(run.run_dir, "failed", error=RuntimeError(words))
        return True

    @staticmethod
    def _wrote_its_end(run: Planned) -> bool:
        """Whether ``status.json`` is this attempt's (one killed at once leaves none, or that of the attempt before)."""
        written = run.run_dir / "status.json"
        return run_state(run.run_dir) in ("completed", "failed", "stopped") and written.stat().st_mtime >= run.begun - 1

    def _stop(self, runs: list[Planned]) -> None:
        """One interrupt each, so that trainers stop at a step with a checkpoint; a second Ctrl-C kills."""
        processes = [run.process for run in runs if run.process is not None and run.process.poll() is None]
        for process in processes:
            process.send_signal(signal.SIGINT)
        try:
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(150)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait(10)

    def _say(self, run: Planned, words: str) -> None:
        if self.progress:
            error = run.record()["error"]
            self.progress.ended(run, words + (f" ({error[:120]})" if error else ""))

    def _write(self) -> None:
        plan = {"v": 1, "notebook": str(self.notebook), "runs": [run.record() for run in self.runs]}
        write_json(self.folder / "sweep.json", json.loads(json.dumps(plan, default=str)))


class SweepProgress:
    """A bar over the runs and one for each run at work; where there is no terminal, a line for each finished run."""

    def __init__(self, title: str, total: int) -> None:
        from tqdm import tqdm

        self.total, self.done = total, 0
        self.bar = tqdm(total=total, desc=title, unit="run", position=0) if sys.stderr.isatty() else None

    def show(self, active: list[Planned]) -> None:
        if self.bar is None:
            return
        for position, run in enumerate(active, 1):
            if run.bar is None:
                run.bar = RunProgress(run.run_dir, run.run_dir.name, position=position)
            run.bar.show()
        self.bar.refresh()

    def ended(self, run: Planned, words: str) -> None:
        self.done += 1
        if self.bar is None:
            print(f"[{self.done}/{self.total}] {run.run_dir.name}: {words}", flush=True)
            return
        if run.bar is not None:
            run.bar.close()
        self.bar.write(f"{run.run_dir.name}: {words}", file=sys.stderr)
        self.bar.update()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def visible_gpus() -> list[str]:
    """The GPUs this process may hand out: what CUDA_VISIBLE_DEVICES names, else all that the driver has."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [part.strip() for part in named.split(",") if part.strip()]
    return [str(index) for index in range(len(gpus()))]


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One sweep a folder; the lock goes with the process, however it ends."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"out: another sweep is at work in {folder}; wait for it, or name another folder"
            ) from None
        yield


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """A termination is taken as Ctrl-C, so that runs are stopped in order; in another thread nothing changes."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
