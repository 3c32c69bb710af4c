"""Runs one cell of the race (a strategy under a workload) in this process, watched, and writes what happened as JSON.

``race_lab.run`` starts it: ``python -m dflash_lib.race_cell SPEC_JSON OUT_JSON STACKS``. The process is expendable. The
main thread only watches: when no lane moves for ``stall`` seconds it writes every thread's stack and leaves; when even
that fails, :mod:`faulthandler`'s own timer, which needs no lock of Python's, does.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflash_lib import race_strategies, race_workloads
from dflash_lib.hazard_tracing import DeviceGuard
from dflash_lib.race_workloads import Context, Workload

# The messages that the laboratory is about, under names short enough for a table.
_KINDS = {
    "using FX to symbolically trace": "RuntimeError: FX tracing flag",
    "is not installed as a submodule": "NameError: entered a tracer",
    "CURRENT_PATCHER": "AssertionError: another trace's patches",
    "gave another result": "wrong result",
    "the traced graph has": "wrong graph",
}


def features() -> dict[str, bool]:
    """What decides how this torch behaves, found by looking, never by its version."""
    import torch.fx._symbolic_trace as tracer
    from torch._functorch import config as functorch_config

    settings: dict[str, int] = {}
    config: Any = torch._dynamo.config
    before = config.recompile_limit
    config.recompile_limit = before + 1

    def read() -> None:
        settings["thread"] = config.recompile_limit

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    config.recompile_limit = before
    return {
        "tracing_flag_is_global": hasattr(tracer, "_is_fx_tracing_flag"),
        "module_patches_are_global": hasattr(tracer, "CURRENT_PATCHER"),
        "is_compiling_held_while_compiling": hasattr(torch.compiler, "_compile_session_context"),
        "settings_stay_in_their_thread": settings["thread"] == before,
        "backward_can_be_compiled_early": hasattr(functorch_config, "force_non_lazy_backward_lowering"),
        "device_guard_dies_with_its_thread": DeviceGuard().present(),
    }


class Cell:
    """One run: lanes, tracers and a watcher, and everything they saw."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.strategy = race_strategies.CLASSES[spec["strategy"]]()
        self.strategy.prepare()
        options = ("device", "threads", "backend", "repeat", "same_lengths", "shift", "kernels")
        self.context = Context(self.strategy, **{name: spec[name] for name in options})
        self.lanes = [f"drafter-{index}" for index in range(spec["threads"])]
        self.attempts: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.watched: Counter[str] = Counter()
        self.losses: dict[str, list[float | None]] = {lane: [] for lane in self.lanes}
        self.alone: dict[str, list[float | None]] = {}
        self.first_step: dict[str, float] = {}
        self.costs: dict[str, Any] = {}
        self.seconds = 0.0
        self.planned = 0
        self._over = threading.Event()
        self._counting = threading.Lock()
        self._clean = self._process_state()

    # --- the threads ----------------------------------------------------------------------------------------------
    def note(self, error: Exception) -> None:
        """Counts an error by kind and keeps the first of each."""
        text = str(error).strip()
        kind = next((kind for words, kind in _KINDS.items() if words in text), type(error).__name__)
        with self._counting:
            self.errors[kind] += 1
            self.examples.setdefault(kind, f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300])

    def _lane(self, workload: Workload, lane: str, index: int, losses: list[float | None], attempts: int) -> None:
        """A lane's whole life. An error costs the step it happened in and no more: we want to count them."""
        _raise_limits()
        if self.spec["device"] != "cpu":
            device = torch.device(self.spec["device"])
            # Plain "cuda" spreads the lanes over the GPUs: each works on its own thread's current device.
            torch.cuda.set_device(index % torch.cuda.device_count() if device.index is None else device)
        with self.strategy.worker():
            step: Callable[[int], float | None] | None = None
            for number in range(attempts):
                if self._over.is_set():
                    return
                started = time.perf_counter()
                loss = None
                try:
                    step = step or workload.lane(lane, index)
                    with self.strategy.step(lane):
                        loss = step(number)
                    self.done[lane] += 1
                except Exception as error:
                    self.note(error)
                losses.append(loss)
                self.attempts[lane] += 1
                self.first_step.setdefault(lane, time.perf_counter() - started)

    def _tracer(self, workload: Workload) -> None:
        """Traces without end, once every lane's first step is over: what protects first steps has had its chance."""
        with self.strategy.worker():
            while len(self.attempts) < len(self.lanes) and not self._over.is_set():
                time.sleep(0.001)
            while not self._over.is_set():
                try:
                    workload.trace()
                    self.done["tracers"] += 1
                except Exception as error:
                    self.note(error)

    def _watcher(self) -> None:
        """Eager code beside the race: reads the state that only a tracing or compiling thread should see."""
        with self.strategy.worker():
            module = torch.nn.Linear(4, 4)
            x = torch.ones(1, 4)
            while not self._over.is_set():
                self.watched["reads"] += 1
                self.watched["is_compiling"] += torch.compiler.is_compiling()
                self.watched["tracing"] += torch.fx._symbolic_trace.is_fx_symbolic_tracing()
                try:
                    module(x)
                except Exception as error:
                    self.note(error)
                time.sleep(0.0005)

    # --- the run --------------------------------------------------------------------------------------------------
    def run(self, workload: Workload) -> None:
        """Alone, warm-up, race. Returns when all is over; a hang does not return (see :meth:`watch`)."""
        steps = self.planned = self.spec["steps"] * workload.steps_factor
        if workload.compares_with_alone and self.spec["compare"]:
            for index, lane in enumerate(self.lanes):
                losses: list[float | None] = []
                self.watch(
                    [self._thread(f"alone-{index}", self._lane, workload, f"alone-{index}", index, losses, steps)]
                )
                self.alone[lane] = losses
            self.context.compiles.clear()
            self.errors.clear()
        started = time.perf_counter()
        self.strategy.warm_up(workload.warm_up)
        self.costs["warm_up_seconds"] = time.perf_counter() - started
        started = time.perf_counter()
        helpers = [self._thread("watcher", self._watcher)]
        helpers += [self._thread(f"tracer-{n}", self._tracer, workload) for n in range(workload.tracers)]
        lanes = [
            self._thread(lane, self._lane, workload, lane, index, self.losses[lane], steps)
            for index, lane in enumerate(self.lanes)
        ]
        self.watch(lanes, deadline=started + self.spec["seconds"])
        self._over.set()
        self.watch(helpers)
        self.seconds = time.perf_counter() - started

    def _thread(self, name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        thread.start()
        return thread

    def watch(self, threads: list[threading.Thread], deadline: float = float("inf")) -> None:
        """Waits for threads. When no lane has executed anything for ``stall`` seconds, it is a hang: write, leave."""
        last: object = None
        since, saved = time.perf_counter(), 0.0
        while any(thread.is_alive() for thread in threads):
            next(thread for thread in threads if thread.is_alive()).join(0.05)
            now = time.perf_counter()
            if now > deadline:
                self._over.set()
            if (now_at := (self.attempts.total(), self.context.compiles.total(), _places())) != last:
                last, since = now_at, now
            if now - since > self.spec["stall"]:
                self.seconds = now - since
                self.write(stacks=_stacks())
                os._exit(0)
            if now - saved > 1:
                saved = now
                self.write(finished=False)

    # --- what is found afterwards ---------------------------------------------------------------------------------
    def _process_state(self) -> dict[str, Any]:
        return {
            "nn.Module.__call__": torch.nn.Module.__call__,
            "nn.Module.__getattr__": torch.nn.Module.__getattr__,
            "CURRENT_PATCHER": getattr(torch.fx._symbolic_trace, "CURRENT_PATCHER", None),
            "is_compiling()": torch.compiler.is_compiling(),
            "is_fx_symbolic_tracing()": torch.fx._symbolic_trace.is_fx_symbolic_tracing(),
        }

    def leaks(self) -> dict[str, Any]:
        """State of one thread that another saw, or that nobody took back."""
        now = self._process_state()
        reads = max(1, self.watched["reads"])
        return {
            "reads": self.watched["reads"],
            "is_compiling_seen": self.watched["is_compiling"] / reads,
            "tracing_seen": self.watched["tracing"] / reads,
            "left_behind": [name for name, value in self._clean.items() if now[name] is not value],
        }

    def differences(self) -> dict[str, Any] | None:
        """Lanes whose losses are not bit for bit those they had alone; None when not compared."""
        if not self.alone:
            return None
        compared = {
            lane: [(a, b) for a, b in zip(self.alone[lane], self.losses[lane], strict=False) if None not in (a, b)]
            for lane in self.alone
        }
        gaps = [abs(a - b) for pairs in compared.values() for a, b in pairs]  # type: ignore[operator]
        return {
            "lanes": sum(any(a != b for a, b in pairs) for pairs in compared.values()),
            "steps": sum(map(len, compared.values())),
            "largest": max(gaps, default=0.0),
        }

    def write(self, *, stacks: dict[str, list[str]] | None = None, finished: bool = True) -> None:
        """Writes the result so far; the last writing wins."""
        with self._counting:
            compiles = dict(self.context.compiles)
            result = {
                "steps_planned": self.planned * len(self.lanes),
                "steps_done": sum(self.done[lane] for lane in self.lanes),
                "attempts": sum(self.attempts[lane] for lane in self.lanes),
                "traces": self.done["tracers"],
                "errors": dict(self.errors),
                "examples": self.examples,
                "leaks": self.leaks(),
                "differences": self.differences(),
                "compiles": sum(compiles.get(lane, 0) for lane in self.lanes),
                "compiles_by_thread": compiles,
                "first_step_seconds": dict(self.first_step),
                "seconds": self.seconds,
                "costs": self.costs,
                "stacks": stacks or {},
                "finished": finished and not stacks,
            }
        out = Path(self.spec["out"])
        out.with_suffix(".part").write_text(json.dumps({**self.spec["known"], **result}))
        out.with_suffix(".part").replace(out)


def _raise_limits() -> None:
    """In every thread, because settings do not reach threads (2.12 on): recompiling is what this race is about."""
    config: Any = torch._dynamo.config
    config.recompile_limit = 100_000
    config.accumulated_recompile_limit = 100_000


def _of_the_race(name: str) -> bool:
    return name.startswith(("drafter-", "alone-", "tracer-", "device-"))


def _places() -> dict[int | None, tuple[int, int]]:
    """Where each lane is, to the instruction: of a thread that waits for a lock, always the same."""
    frames = sys._current_frames()
    lanes = [thread.ident for thread in threading.enumerate() if thread.name.startswith(("drafter-", "alone-"))]
    return {ident: (id(frames[ident]), frames[ident].f_lasti) for ident in lanes if ident in frames}


def _stacks() -> dict[str, list[str]]:
    """The stacks of lanes, tracers and the device's thread, innermost last, as ``file:line function``."""
    names = {thread.ident: thread.name for thread in threading.enumerate() if _of_the_race(thread.name)}
    return {
        names[ident]: [
            f"{_short(found.filename)}:{found.lineno} {found.name}" for found in traceback.extract_stack(frame)
        ]
        for ident, frame in sorted(sys._current_frames().items(), key=lambda item: names.get(item[0], ""))
        if ident in names
    }


def _short(filename: str) -> str:
    """A path from its package on: ``torch/_dynamo/convert_frame.py``."""
    return filename.rpartition("site-packages/")[2] if "site-packages/" in filename else Path(filename).name


def main() -> int:
    """Runs the cell that the command line describes."""
    spec, out, stacks = json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    with stacks.open("w") as file:
        faulthandler.enable(file=file)
        faulthandler.dump_traceback_later(spec["timeout"], exit=True, file=file)
        sys.setswitchinterval(0.0005)  # finer turns between threads: the race shows in seconds instead of minutes
        torch.set_num_threads(1)
        spec["out"] = out
        spec["known"] = {"torch": torch.__version__, "features": features()}
        cell = Cell(spec)
        workload = race_workloads.build(spec["workload"], cell.context)
        if isinstance(cell.strategy, race_strategies.ModuleWrapper):
            cell.costs["reaches_the_tracer"] = cell.strategy.reaches_the_tracer()
        cell.run(workload)
        if isinstance(cell.strategy, race_strategies.MainThreadWarmup):
            compiles = cell.context.compiles
            cell.costs["compiles_in_main"] = compiles["MainThread"]
            cell.costs["lanes_that_compiled_again"] = sum(compiles[lane] > 0 for lane in cell.lanes)
            cell.costs["stays_in_main"] = cell.strategy.stays_in_main()
        cell.write()
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
