"""Runs a notebook through papermill in a run folder, with this Python's kernel and progress on the terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .atomic import write_json
from .run_folder import RUN_DIR_VARIABLE, json_or_none, read_status, run_state, write_status


class NotebookFailed(RuntimeError):
    """A notebook ended in an error; the executed notebook holds the traceback."""


def execute(
    notebook: str | os.PathLike[str],
    parameters: Mapping[str, Any] | None = None,
    run_dir: str | os.PathLike[str] = "runs/notebook",
    *,
    progress: bool = True,
    cwd: str | os.PathLike[str] | None = None,
) -> Path:
    """Executes ``notebook`` with ``parameters`` and leaves ``notebook.ipynb`` and ``status.json`` in ``run_dir``.

    The kernel is always this interpreter, whatever kernelspecs the machine has. A trainer started by the notebook
    writes into the same folder. One Ctrl-C interrupts the running cell (a trainer stops at its next step, with a
    checkpoint), a second one ends the kernel.

    Args:
        parameters: values for the cell tagged ``parameters``.
        run_dir: the run folder; made if missing.
        progress: show the step, the loss and the time left on the terminal.
        cwd: the notebook's working directory; None: this process's.

    Returns:
        The executed notebook's path.

    Raises:
        NotebookFailed: a cell raised or the kernel died; ``status.json`` then says ``"failed"``.
        KeyboardInterrupt: interrupted; ``status.json`` then says ``"stopped"``.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    from .kernel import manager_class

    folder = Path(run_dir).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "notebook.ipynb"
    values = dict(parameters or {})
    write_json(folder / "parameters.json", json.loads(json.dumps(values, default=str)))
    kernel = manager_class(**{RUN_DIR_VARIABLE: str(folder)})
    begun = time.time()
    # papermill warns about every parameter that the tagged cell lacks; RunConfig refuses the wrong ones by name.
    logging.getLogger("papermill").setLevel(logging.ERROR)
    try:
        with progress_bar(folder, Path(notebook).stem) if progress else contextlib.nullcontext():
            papermill.execute_notebook(
                notebook,
                output,
                parameters=values,
                kernel_name="python3",
                progress_bar=False,
                cwd=None if cwd is None else str(cwd),
                kernel_manager_class=kernel,
            )
    except PapermillExecutionError as error:
        if kernel.interrupted or error.ename == "KeyboardInterrupt":
            _end(folder, "stopped", begun)
            raise KeyboardInterrupt from None
        record = {
            "thread": "main",
            "type": error.ename,
            "message": error.evalue,
            "traceback": "\n".join(error.traceback),
        }
        _end(folder, "failed", begun, record)
        raise NotebookFailed(f"{output}: {error.ename}: {error.evalue}") from error
    except DeadKernelError as error:
        if kernel.interrupted:
            _end(folder, "stopped", begun)
            raise KeyboardInterrupt from None
        _end(folder, "failed", begun, error)
        raise NotebookFailed(f"{output}: the kernel died (out of memory, or killed)") from error
    except KeyboardInterrupt:
        _end(folder, "stopped", begun)
        raise
    except Exception as error:
        _end(folder, "failed", begun, error)
        raise
    _end(folder, "completed", begun)
    if kernel.interrupted:  # the trainer stopped as asked, and the rest of the notebook went well
        raise KeyboardInterrupt
    return output


def _end(folder: Path, state: str, begun: float, error: Any = None) -> None:
    """Writes the last status, unless the trainer's own already says it (it knows the failing thread and the step)."""
    status = read_status(folder)
    own = status is not None and (folder / "status.json").stat().st_mtime >= begun - 1
    if own and run_state(folder) in ("failed", "stopped", state):
        return
    write_status(folder, state, error=error, started=datetime.fromtimestamp(begun, UTC))  # type: ignore[arg-type]


@contextlib.contextmanager
def progress_bar(folder: Path, title: str) -> Iterator[None]:
    """Keeps a :class:`RunProgress` up to date from a thread of its own."""
    ended = threading.Event()
    bar = RunProgress(folder, title)

    def follow() -> None:
        while not ended.wait(0.5):
            bar.show()
        bar.show()

    thread = threading.Thread(target=follow, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(5)
        bar.close()


class RunProgress:
    """A terminal bar over a run's steps, fed by the run's own events, whichever process writes them."""

    def __init__(self, run_dir: Path, title: str, position: int | None = None) -> None:
        from tqdm import tqdm

        self.run_dir = run_dir
        self.live = sys.stderr.isatty()
        self._tail = Tail(run_dir / "events.jsonl", skip_existing=True)
        self._bar = tqdm(
            total=None,
            desc=title,
            unit="step",
            position=position,
            leave=position is None,
            dynamic_ncols=True,
            mininterval=0.5 if self.live else 10,
            postfix="preparing: target, rows, features, first compiles",
        )

    def show(self) -> None:
        for event in self._tail.poll():
            if event.get("kind") == "step" and isinstance(event.get("step"), int):
                if self._bar.total is None:
                    self._bar.total = (json_or_none(self.run_dir / "config.json") or {}).get("steps")
                    self._bar.unpause()  # time left is reckoned from the steps, not from what came before them
                if isinstance(event.get("loss"), int | float):
                    self._bar.set_postfix_str(f"loss {event['loss']:.3f}", refresh=False)
                self._bar.update(max(0, event["step"] - self._bar.n))
                if self._bar.n == self._bar.total:
                    self._bar.set_postfix_str("all steps done; decoding and pictures follow")
        if self.live:
            self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


class Tail:
    """New whole lines of a growing JSON-lines file, as objects; a line that is not yet whole is left for later."""

    def __init__(self, path: str | os.PathLike[str], *, skip_existing: bool = False):
        self.path = Path(path)
        self._position = self.path.stat().st_size if skip_existing and self.path.exists() else 0
        self._rest = b""

    def poll(self) -> list[dict[str, Any]]:
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._position)
                data = stream.read()
        except OSError:
            return []
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    events.append(event)
        return events


def main(run_dir: Path) -> int:
    """A sweep's child: runs what ``launch.json`` in the run folder says. Returns the exit code."""
    plan: dict[str, Any] = json.loads((run_dir / "launch.json").read_text(encoding="utf-8"))
    write_json(run_dir / "launch.json", {**plan, "pid": os.getpid()})
    try:
        execute(plan["notebook"], plan["parameters"], run_dir)
    except NotebookFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
