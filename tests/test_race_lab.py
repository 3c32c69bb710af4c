"""The race's laboratory: its words and pictures on made-up results, and real cells in real processes.

What an unprotected cell must show depends on torch: where a feature was detected that hides a fault, the test asks for
what that feature leaves (see docs/hazards.md), and never for nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_lib import race_lab
from dflash_lib.config import ConfigError
from dflash_lib.race_lab import Race, Result

ROOT = Path(__file__).parents[1]
GLOBAL = {
    "tracing_flag_is_global": True,
    "module_patches_are_global": True,
    "is_compiling_held_while_compiling": True,
    "settings_stay_in_their_thread": True,
    "backward_can_be_compiled_early": True,
}
CLEAN = {"reads": 100, "is_compiling_seen": 0.0, "tracing_seen": 0.0, "left_behind": []}
FLAG, TRACER = "RuntimeError: FX tracing flag", "NameError: entered a tracer"


def made_up(strategy: str = "none", workload: str = "make_fx", outcome: str = "ok", **values: object) -> Result:
    known = {
        "leaks": CLEAN,
        "features": GLOBAL,
        "torch": "2.13.0",
        "steps_planned": 60,
        "steps_done": 60,
        "attempts": 60,
    }
    return Result(strategy, workload, "cpu", 3, outcome, **{**known, **values})  # type: ignore[arg-type]


# Every real cell of this module, by a name of ours: they run two at a time, the long ones first.
CELLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # 4 lanes, a new length each step: 204 forward graphs are 200 recompiles, with as many backward graphs
    "soak": (
        "thread_local",
        "compile_storm",
        {"threads": 4, "steps": 51, "repeat": 1, "stall": 60.0, "seconds": 500.0},
    ),
    "soak inductor": (
        "thread_local",
        "compile_storm",
        {"threads": 4, "steps": 4, "repeat": 1, "backend": "inductor", "stall": 240.0, "seconds": 500.0},
    ),
    "storm none": ("none", "compile_storm", {}),
    "storm thread_local": ("thread_local", "compile_storm", {}),
    "trace none": ("none", "symbolic_trace", {"steps": 10}),
    "trace exec_lock": ("exec_lock", "symbolic_trace", {"steps": 10}),
    "trace warmup_lock": ("warmup_lock", "symbolic_trace", {"steps": 10}),
    "trace main_thread_warmup": ("main_thread_warmup", "symbolic_trace", {"steps": 10}),
    "trace module_wrapper": ("module_wrapper", "symbolic_trace", {"steps": 10}),
    "make_fx none": ("none", "make_fx", {"steps": 10}),
    "make_fx thread_local": ("thread_local", "make_fx", {"steps": 10}),
    "symbolic_trace thread_local": ("thread_local", "symbolic_trace", {"steps": 10}),
    "unpickle_graph_module thread_local": ("thread_local", "unpickle_graph_module", {"steps": 10}),
    "shared none": ("none", "shared_gpu_backward", {"steps": 20}),
    "shared warmup_lock": ("warmup_lock", "shared_gpu_backward", {"steps": 20}),
    "shared thread_local": ("thread_local", "shared_gpu_backward", {"stall": 30.0}),
    # the same hang, which the cell's own watcher is told to sit through. Its threads sleep: faulthandler reads frames
    # without the interpreter's lock, and those of a thread that runs can change under it
    "shared none, unwatched": ("none", "shared_gpu_backward", {"steps": 20, "stall": 1000.0, "timeout": 40.0}),
}


@pytest.fixture(scope="module")
def cell(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Result]]:
    """The result of a named cell. Cells that a chosen test does not need are not run."""
    chosen = {item.callspec.params.get("name") if hasattr(item, "callspec") else None for item in request.session.items}
    chosen |= {name for item in request.session.items for name in getattr(item.function, "cells", ())}
    sizes = {"steps": 6, "threads": 2, "seconds": 90.0, "stall": 4.0, "timeout": 550.0}
    with ThreadPoolExecutor(2) as pool:
        running = {
            name: pool.submit(race_lab.run, strategy, workload, **{**sizes, **options})
            for name, (strategy, workload, options) in CELLS.items()
            if name in chosen
        }
        yield lambda name: running[name].result()
        for future in running.values():
            future.cancel()


def needs(*names: str) -> Callable[[Any], Any]:
    """Says which cells a test looks at."""

    def mark(test: Any) -> Any:
        test.cells = names
        return test

    return mark


# --- words and pictures -------------------------------------------------------------------------------------------
def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'luck' is not in the laboratory: choose one of none, exec_lock"):
        race_lab.run("luck", "make_fx")
    with pytest.raises(ValueError, match="'tea' is not in the laboratory: choose one of compile_storm"):
        race_lab.run("none", "tea")


def test_the_notebooks_parameters_are_strict() -> None:
    race = Race.from_dict({"strategies": "none, thread_local", "steps": "4", "seconds": "1e1"})
    assert (race.strategies, race.steps, race.seconds) == (("none", "thread_local"), 4, 10.0)
    assert race.workloads == race_lab.WORKLOADS
    with pytest.raises(ConfigError, match="step: is no parameter; did you mean 'steps'"):
        Race.from_dict({"step": 4})
    with pytest.raises(ConfigError, match="strategies: "):
        Race.from_dict({"strategies": "none, luck"})
    with pytest.raises(ConfigError, match="threads: "):
        Race.from_dict({"threads": 1})


def test_no_torch_is_loaded_to_read_and_draw_results(tmp_path: Path) -> None:
    code = (
        "import sys; from dflash_lib import race_lab as lab; r = lab.Result('none', 'make_fx', 'cpu', 3, 'ok');"
        f"lab.table([r]); lab.explain(r); lab.draw([r], {str(tmp_path / 'a.svg')!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_a_table_has_a_line_a_cell_with_counts_by_kind() -> None:
    results = [
        made_up(outcome="errors", steps_done=40, errors={TRACER: 1, FLAG: 1019}),
        made_up("thread_local", "shared_gpu_backward"),
    ]
    lines = race_lab.table(results).splitlines()
    assert "40/60" in lines[2] and "1,019 RuntimeError: FX tracing flag, 1 NameError: entered a tracer" in lines[2]
    assert lines[3].startswith("shared_gpu_backward (imitated)  thread_local") and "none" in lines[3]
    folded = race_lab.table(results, folded=True).splitlines()
    assert folded[2].endswith("  1,019 RuntimeError: FX tracing flag") and "40/60" in folded[2]
    assert folded[3].strip() == "1 NameError: entered a tracer" and len(folded) == 5


@pytest.mark.parametrize("workload", race_lab.WORKLOADS)
@pytest.mark.parametrize("strategy", race_lab.STRATEGIES)
@pytest.mark.parametrize("outcome", race_lab.OUTCOMES)
def test_every_outcome_of_every_cell_is_one_paragraph(strategy: str, workload: str, outcome: str) -> None:
    text = race_lab.explain(made_up(strategy, workload, outcome))
    assert text.startswith(f"{strategy} under {workload}")
    assert text.endswith(".") and "\n" not in text and ".." not in text and "  " not in text


def test_an_explanation_names_only_causes_that_were_seen() -> None:
    flag = race_lab.explain(made_up(outcome="errors", errors={FLAG: 3}))
    assert "_is_fx_tracing_flag" in flag and "nn.Module" not in flag and "AdamW" not in flag
    tracer = race_lab.explain(made_up(workload="symbolic_trace", outcome="errors", errors={TRACER: 3}))
    assert "nn.Module.__call__" in tracer and "_is_fx_tracing_flag" not in tracer
    leaky = {**CLEAN, "is_compiling_seen": 0.91}
    silent = made_up(
        workload="compile_storm", outcome="leaks", leaks=leaky, differences={"lanes": 3, "steps": 90, "largest": 2e-6}
    )
    text = race_lab.explain(silent)
    assert "91% of 100 reads" in text and "3 of 3 lanes" in text and "2e-06" in text and "masks it" in text


def test_a_death_is_explained_where_its_cause_is_known() -> None:
    known = {**GLOBAL, "device_guard_dies_with_its_thread": True}
    dead = {"workload": "compile_storm", "outcome": "crash", "exit_code": -11}
    assert "CUDA device guard" in race_lab.explain(made_up(**dead, features=known))
    assert "CUDA device guard" not in race_lab.explain(made_up(**dead, features=GLOBAL))
    assert "CUDA device guard" not in race_lab.explain(made_up(**{**dead, "exit_code": -6}, features=known))


def test_a_survivor_is_explained_by_the_release_that_ran() -> None:
    per_thread = {**GLOBAL, "tracing_flag_is_global": False}
    assert "2.14 on the tracing flag is thread-local" in race_lab.explain(made_up(features=per_thread))
    assert "by luck" in race_lab.explain(made_up())
    raises = {**GLOBAL, "is_compiling_held_while_compiling": False}
    assert "raises; with more steps" in race_lab.explain(made_up(workload="compile_storm", features=raises))


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_holds_every_cell_and_the_units(tmp_path: Path, suffix: str) -> None:
    results = [
        made_up(strategy, workload, outcome)
        for workload in race_lab.WORKLOADS
        for strategy, outcome in zip(race_lab.STRATEGIES, [*race_lab.OUTCOMES, "ok"], strict=True)
    ]
    path = race_lab.draw(results[:-1], tmp_path / "deep" / f"race.{suffix}")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml") and len(content) > 20_000
    if suffix == "svg":
        assert b"wall time (s)" in content and b"(% of planned)" in content and b"main_thread_warmup" in content


# --- real cells ---------------------------------------------------------------------------------------------------
Cell = Callable[[str], Result]


@needs("storm none", "storm thread_local")
def test_threads_that_compile_change_each_other_and_isolated_ones_do_not(cell: Cell) -> None:
    free, isolated = cell("storm none"), cell("storm thread_local")
    if free.features["is_compiling_held_while_compiling"]:  # 2.13 on: silent
        assert free.outcome == "leaks" and free.leaks["is_compiling_seen"] > 0.3
        assert free.differences is not None and free.differences["lanes"] > 0
    else:
        assert free.errors[FLAG] > 0
    assert isolated.outcome == "ok", isolated
    assert isolated.steps_done == isolated.steps_planned == 12 and isolated.compiles == 6
    assert isolated.differences == {"lanes": 0, "steps": 12, "largest": 0.0}


@pytest.mark.parametrize(("name", "recompiles"), [("soak", 200), ("soak inductor", 12)])
def test_four_threads_that_recompile_have_the_losses_each_has_alone(cell: Cell, name: str, recompiles: int) -> None:
    """The small form of tests/soak: default AdamW, forward and backward, own code objects, every step a new length."""
    result = cell(name)
    assert result.outcome == "ok" and not result.errors, result
    assert result.steps_done == result.steps_planned == result.compiles == recompiles + 4
    assert result.differences == {"lanes": 0, "steps": recompiles + 4, "largest": 0.0}


@pytest.mark.parametrize(
    "name",
    ["trace none", "trace exec_lock", "trace warmup_lock", "trace main_thread_warmup", "trace module_wrapper"],
)
def test_no_lock_warm_up_or_stand_in_protects_from_a_trace(cell: Cell, name: str) -> None:
    result = cell(name)
    assert result.outcome == "errors", result
    assert result.errors[TRACER] > 0
    assert 0 < result.steps_done < result.steps_planned  # first steps went well: what was protected, was protected
    if result.strategy == "main_thread_warmup":
        assert result.costs["compiles_in_main"] == 1 and result.costs["lanes_that_compiled_again"] == 2
        assert {"autocast", "grad mode"} <= set(result.costs["stays_in_main"])
        assert ("recompile_limit" in result.costs["stays_in_main"]) == result.features["settings_stay_in_their_thread"]
    if result.strategy == "module_wrapper":
        assert result.costs["reaches_the_tracer"] is (False if result.features["tracing_flag_is_global"] else None)


@needs("make_fx none")
def test_a_tracing_thread_makes_compiled_calls_of_others_raise(cell: Cell) -> None:
    result = cell("make_fx none")
    if result.features["tracing_flag_is_global"]:
        assert result.errors[FLAG] > 0 and "dynamo-optimized function" in result.examples[FLAG]
    else:
        assert FLAG not in result.errors


@pytest.mark.parametrize(
    "name", ["make_fx thread_local", "symbolic_trace thread_local", "unpickle_graph_module thread_local"]
)
def test_isolated_threads_do_not_see_a_trace(cell: Cell, name: str) -> None:
    result = cell(name)
    assert result.outcome == "ok", result
    assert result.traces > 0 and result.steps_done == result.steps_planned == 400
    assert result.leaks["reads"] > 0 and not result.leaks["left_behind"]


@pytest.mark.parametrize("name", ["shared none", "shared warmup_lock"])
def test_threads_that_share_a_device_thread_hang_and_the_stacks_show_the_cycle(cell: Cell, name: str) -> None:
    result = cell(name)
    assert result.outcome == "hang" and result.imitated, result
    holder = [name for name, frames in result.stacks.items() if any("call_user_compiler" in f for f in frames)]
    assert holder and result.stacks[holder[0]][-1].endswith(" run")  # compiles, waits for the device's thread
    assert result.stacks["device-autograd"][-1].endswith(" compile_backward")  # which waits for compile_lock
    assert "compile_lock" in race_lab.explain(result)


@needs("shared thread_local")
def test_isolated_threads_that_share_a_device_thread_end(cell: Cell) -> None:
    result = cell("shared thread_local")
    assert result.outcome == "ok", result
    assert result.compiles == 6


def test_a_dying_process_is_a_result(tmp_path: Path) -> None:
    killer = "import os, signal, threading; threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGSEGV)).start()"
    (tmp_path / "sitecustomize.py").write_text(killer)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    result = race_lab.run("none", "compile_storm", steps=10_000, environment={"PYTHONPATH": paths})
    assert result.outcome == "crash" and result.exit_code == -11
    assert race_lab.explain(result).startswith("none under compile_storm: the process died")
    json.dumps(result.to_dict())


@needs("shared none, unwatched")
def test_the_last_watchdog_needs_nobody_to_be_awake(cell: Cell) -> None:
    result = cell("shared none, unwatched")
    assert result.outcome == "hang"
    assert any(frames[0].startswith("<frozen runpy>") for frames in result.stacks.values()), result.stacks  # main
    assert any("in compile_backward" in frame for frames in result.stacks.values() for frame in frames), result.stacks
