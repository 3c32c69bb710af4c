"""The race's laboratory: every strategy under every workload, each in a watched process whose death is a result.

``run("none", "compile_storm")`` measures one cell, ``Race().run()`` a grid; ``table``, ``explain``, ``draw`` show it.
This module loads no torch: what compiles, hangs or crashes is always another process (:mod:`dflash_lib.race_cell`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from dflash_lib.config import Float, Int, Parameters
from dflash_lib.race_report import about_torch, draw, explain, table

__all__ = ["OUTCOMES", "STRATEGIES", "WORKLOADS", "Race", "Result", "about_torch", "draw", "explain", "run", "table"]

_Strategy = Literal["none", "exec_lock", "warmup_lock", "main_thread_warmup", "module_wrapper", "thread_local"]
_Workload = Literal["compile_storm", "make_fx", "symbolic_trace", "unpickle_graph_module", "shared_gpu_backward"]
STRATEGIES: tuple[_Strategy, ...] = get_args(_Strategy)
WORKLOADS: tuple[_Workload, ...] = get_args(_Workload)
OUTCOMES = ("ok", "leaks", "errors", "hang", "crash")


@dataclass(frozen=True)
class Result:
    """What one cell did. Times in seconds, shares between 0 and 1.

    ``outcome`` is the worst thing seen: ``crash`` (the process died), ``hang`` (no lane moved), ``errors``, ``leaks``
    (state seen in the wrong thread or left behind, or losses unlike those of the same thread alone), else ``ok``.
    """

    strategy: str
    workload: str
    device: str
    threads: int
    outcome: str
    torch: str = ""
    steps_planned: int = 0
    steps_done: int = 0
    attempts: int = 0
    traces: int = 0  # traces finished by tracer threads meanwhile
    compiles: int = 0  # forward graphs compiled by the lanes
    compiles_by_thread: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)  # kind -> count
    examples: dict[str, str] = field(default_factory=dict)  # kind -> the first message
    leaks: dict[str, Any] = field(default_factory=dict)  # reads, is_compiling_seen, tracing_seen, left_behind
    differences: dict[str, Any] | None = None  # lanes, steps, largest; None: not compared
    first_step_seconds: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    stacks: dict[str, list[str]] = field(default_factory=dict)  # thread -> frames, innermost last
    costs: dict[str, Any] = field(default_factory=dict)
    features: dict[str, bool] = field(default_factory=dict)  # of this torch, detected
    exit_code: int = 0

    @property
    def imitated(self) -> bool:
        """Whether this is the CPU twin of a workload that needs a GPU."""
        return self.workload == "shared_gpu_backward" and self.device == "cpu"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a results file."""
        return asdict(self)


def run(
    strategy: str,
    workload: str,
    *,
    steps: int = 60,
    seconds: float = 20.0,
    threads: int = 3,
    device: str = "cpu",
    backend: str | None = None,
    repeat: int = 2,
    same_lengths: bool = False,
    shift: int = 0,
    kernels: bool = False,
    compare: bool = True,
    stall: float = 15.0,
    timeout: float = 120.0,
    environment: dict[str, str] | None = None,
) -> Result:
    """Measures one cell in a process of its own.

    Args:
        steps: steps per thread (20 times as many in the workloads whose steps do not train).
        seconds: when to stop earlier.
        threads: lanes; workloads that trace have two tracer threads more.
        device: ``"cpu"`` or ``"cuda:0"``: one device, which all lanes share; ``"cuda"``: lanes spread over all GPUs.
        backend: of torch.compile; None: ``aot_eager`` on a CPU, ``inductor`` on CUDA.
        repeat: steps a lane does at one row length before it takes the next.
        same_lengths: all lanes take the same lengths; else each lane is a length ahead of the one before it.
        shift: how many lengths later the lengths begin (to go on where another cell ended).
        kernels: on a CPU, compile pointwise work around the attention too, so that Inductor writes kernels.
        compare: also run each lane alone, and compare the losses bit for bit (compile_storm).
        stall: seconds without any progress that count as a hang.
        timeout: seconds after which the process writes its stacks and dies, whatever it is doing.
        environment: variables set on top of this process's own.

    Raises:
        ValueError: a name that is none of STRATEGIES or WORKLOADS.
    """
    for value, names in ((strategy, STRATEGIES), (workload, WORKLOADS)):
        if value not in names:
            raise ValueError(f"{value!r} is not in the laboratory: choose one of {', '.join(names)}")
    backend = backend or ("aot_eager" if device == "cpu" else "inductor")
    spec: dict[str, Any] = {"strategy": strategy, "workload": workload, "device": device, "backend": backend}
    spec |= {"steps": steps, "seconds": seconds, "threads": threads, "repeat": repeat, "compare": compare}
    spec |= {"same_lengths": same_lengths, "shift": shift, "kernels": kernels, "stall": stall, "timeout": timeout}
    package = Path(__file__).resolve().parent
    paths = [str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
    variables.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="dflash-race-") as folder:
        out, stacks = Path(folder, "result.json"), Path(folder, "stacks.txt")
        command = [sys.executable, "-m", f"{package.name}.race_cell", json.dumps(spec), str(out), str(stacks)]
        started = time.monotonic()
        process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            _, stderr = process.communicate(timeout=timeout + 30)
        except subprocess.TimeoutExpired:
            process.kill()
            _, stderr = process.communicate()
        except BaseException:
            process.kill()
            process.wait()
            raise
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        dump = stacks.read_text() if stacks.exists() else ""
    finished = bool(found.pop("finished", False))
    if not finished and not found.get("stacks"):
        found["stacks"] = _dumped(dump) or {"stderr": stderr.strip().splitlines()[-12:]}
        found["seconds"] = time.monotonic() - started
    result = Result(strategy, workload, device, threads, outcome="ok", exit_code=process.returncode, **found)
    return replace(result, outcome=_outcome(result, finished, timed_out="Timeout (" in dump))


_list = BeforeValidator(lambda value: [part.strip() for part in value.split(",")] if isinstance(value, str) else value)


class Race(Parameters):
    """The choices of notebook 02: which cells run, and how large each is."""

    strategies: Annotated[tuple[_Strategy, ...], _list] = STRATEGIES
    workloads: Annotated[tuple[_Workload, ...], _list] = WORKLOADS
    threads: Int = Field(3, ge=2, le=64, description="lanes; workloads that trace have two tracer threads more")
    steps: Int = Field(16, ge=1, description="training steps of a lane (other workloads' steps are shorter: 20 times)")
    seconds: Float = Field(30.0, gt=0, description="when a cell stops earlier")
    stall: Float = Field(10.0, gt=0, description="seconds without any progress that count as a hang")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="the one device that all lanes share")
    out: str = Field("runs/thread-race", description="folder for results and picture")

    def run(self, on_result: Callable[[Result], None] | None = None) -> list[Result]:
        """Measures the cells, one after the other, workload by workload; ``on_result`` sees each as it comes."""
        results = []
        size = {"threads": self.threads, "steps": self.steps, "seconds": self.seconds, "stall": self.stall}
        for workload in self.workloads:
            for strategy in self.strategies:
                results.append(run(strategy, workload, device=self.device, **size))  # type: ignore[arg-type]
                if on_result:
                    on_result(results[-1])
        return results


def _outcome(result: Result, finished: bool, *, timed_out: bool) -> str:
    if not finished:
        return "hang" if timed_out or result.exit_code in (0, -signal.SIGKILL) else "crash"
    if result.errors:
        return "errors"
    leaks = result.leaks
    seen = leaks["is_compiling_seen"] or leaks["tracing_seen"] or leaks["left_behind"]
    differs = result.differences and result.differences["lanes"]
    return "leaks" if seen or differs else "ok"


def _dumped(text: str) -> dict[str, list[str]]:
    """faulthandler's dump as stacks: it names threads by number and puts the innermost frame first."""
    stacks: dict[str, list[str]] = {}
    frames: list[str] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            frames = stacks.setdefault(line.split(" (")[0], [])
        elif line.startswith("  File ") and stacks:
            frames.insert(0, line.strip().removeprefix("File ").replace('"', ""))
    return stacks
