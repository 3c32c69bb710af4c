"""The race's laboratory: its words and pictures on made-up results, and real cells in real processes.

What an unprotected cell must show depends on torch: where a feature was detected that hides a fault, the test asks for
what that feature leaves (see docs/hazards.md), and never for nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

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


def run(strategy: str, workload: str, **options: object) -> Result:
    """A small real cell."""
    sizes = {"steps": 6, "threads": 2, "seconds": 60.0, "stall": 4.0}
    return race_lab.run(strategy, workload, **{**sizes, **options})  # type: ignore[arg-type]


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
    lines = race_lab.table(
        [
            made_up(outcome="errors", steps_done=40, errors={TRACER: 1, FLAG: 1019}),
            made_up("thread_local", "shared_gpu_backward"),
        ]
    ).splitlines()
    assert "40/60" in lines[2] and "1,019 RuntimeError: FX tracing flag, 1 NameError: entered a tracer" in lines[2]
    assert lines[3].startswith("shared_gpu_backward (imitated)  thread_local") and "none" in lines[3]


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
def test_threads_that_compile_change_each_other_and_isolated_ones_do_not() -> None:
    free, isolated = run("none", "compile_storm"), run("thread_local", "compile_storm")
    if free.features["is_compiling_held_while_compiling"]:  # 2.13 on: silent
        assert free.outcome == "leaks" and free.leaks["is_compiling_seen"] > 0.3
        assert free.differences is not None and free.differences["lanes"] > 0
    else:
        assert free.errors[FLAG] > 0
    assert isolated.outcome == "ok", isolated
    assert isolated.steps_done == isolated.steps_planned == 12 and isolated.compiles == 6
    assert isolated.differences == {"lanes": 0, "steps": 12, "largest": 0.0}


@pytest.mark.parametrize("strategy", ["none", "exec_lock", "warmup_lock", "main_thread_warmup", "module_wrapper"])
def test_no_lock_warm_up_or_stand_in_protects_from_a_trace(strategy: str) -> None:
    result = run(strategy, "symbolic_trace", steps=10)
    assert result.outcome == "errors", result
    assert result.errors[TRACER] > 0
    assert 0 < result.steps_done < result.steps_planned  # first steps went well: what was protected, was protected
    if strategy == "main_thread_warmup":
        assert result.costs["compiles_in_main"] == 1 and result.costs["lanes_that_compiled_again"] == 2
        assert {"autocast", "grad mode"} <= set(result.costs["stays_in_main"])
        assert ("recompile_limit" in result.costs["stays_in_main"]) == result.features["settings_stay_in_their_thread"]
    if strategy == "module_wrapper":
        assert result.costs["reaches_the_tracer"] is (False if result.features["tracing_flag_is_global"] else None)


def test_a_tracing_thread_makes_compiled_calls_of_others_raise() -> None:
    result = run("none", "make_fx", steps=10)
    if result.features["tracing_flag_is_global"]:
        assert result.errors[FLAG] > 0 and "dynamo-optimized function" in result.examples[FLAG]
    else:
        assert FLAG not in result.errors


@pytest.mark.parametrize("workload", ["make_fx", "symbolic_trace", "unpickle_graph_module"])
def test_isolated_threads_do_not_see_a_trace(workload: str) -> None:
    result = run("thread_local", workload, steps=10)
    assert result.outcome == "ok", result
    assert result.traces > 0 and result.steps_done == result.steps_planned == 400
    assert result.leaks["reads"] > 0 and not result.leaks["left_behind"]


@pytest.mark.parametrize("strategy", ["none", "warmup_lock"])
def test_threads_that_share_a_device_thread_hang_and_the_stacks_show_the_cycle(strategy: str) -> None:
    result = run(strategy, "shared_gpu_backward", steps=20)
    assert result.outcome == "hang" and result.imitated, result
    holder = [name for name, frames in result.stacks.items() if any("call_user_compiler" in f for f in frames)]
    assert holder and result.stacks[holder[0]][-1].endswith(" run")  # compiles, waits for the device's thread
    assert result.stacks["device-autograd"][-1].endswith(" compile_backward")  # which waits for compile_lock
    assert "compile_lock" in race_lab.explain(result)


def test_isolated_threads_that_share_a_device_thread_end() -> None:
    result = run("thread_local", "shared_gpu_backward", stall=30.0)
    assert result.outcome == "ok", result
    assert result.compiles == 6


def test_a_dying_process_is_a_result(tmp_path: Path) -> None:
    killer = "import os, signal, threading; threading.Timer(4, lambda: os.kill(os.getpid(), signal.SIGSEGV)).start()"
    (tmp_path / "sitecustomize.py").write_text(killer)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    result = run("none", "compile_storm", steps=10_000, environment={"PYTHONPATH": paths})
    assert result.outcome == "crash" and result.exit_code == -11
    assert result.stacks and race_lab.explain(result).startswith("none under compile_storm: the process died")
    json.dumps(result.to_dict())


def test_the_last_watchdog_needs_nobody_to_be_awake() -> None:
    result = run("none", "compile_storm", steps=10_000, stall=1000.0, timeout=8.0)
    assert result.outcome == "hang"
    assert any("race_cell.py" in frame for frames in result.stacks.values() for frame in frames)


def test_no_thread_of_ours_is_left() -> None:
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("drafter-")] == []
