"""The compile monitor: each class provoked, in the right thread, with the right reason; torch left as it was."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import torch._dynamo.convert_frame as convert_frame
import torch._dynamo.utils as dynamo_utils

from dflash_lib import events, timeline
from dflash_lib.compile_hooks import hub
from dflash_lib.compile_metrics import COMPILE_KEYS
from dflash_lib.compile_monitor import CompileMonitor, Recording, in_flight, record_compiles
from dflash_lib.events import EventLog

HERE = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
SCHEMA = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parent / "schemas" / "event.schema.json").read_text())
)
NAMES = (
    (convert_frame, "compile_lock"),
    (dynamo_utils, "log_compilation_event"),
    (convert_frame, "get_and_maybe_log_recompilation_reasons"),
)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    before = [getattr(module, name) for module, name in NAMES]
    torch._dynamo.reset()
    yield
    assert [getattr(module, name) for module, name in NAMES] == before, "torch is not as it was"
    assert not hub.flights and not hub.listeners
    torch._dynamo.reset()


@pytest.fixture
def log() -> Iterator[EventLog]:
    log = EventLog(None)
    with CompileMonitor(log):
        yield log
    for event in log.events:
        SCHEMA.validate(event)
    assert not of(log, "warning")


def of(log: EventLog, kind: str = "compile") -> list[dict[str, Any]]:
    return [event for event in log.events if event["kind"] == kind]


def function(source: str = "x * 2", backend: Any = "eager", **options: Any) -> Callable[..., Any]:
    """A compiled function with a code object of its own, as a notebook cell makes one."""
    space: dict[str, Any] = {"torch": torch}
    exec(f"def f(x, k=1):\n    return {source}\n", space)
    return torch.compile(space["f"], backend=backend, **{"dynamic": False, **options})


def in_threads(*work: Callable[[], Any]) -> None:
    failed: list[BaseException] = []

    def run(one: Callable[[], Any]) -> None:
        try:
            one()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


# --- classes ---------------------------------------------------------------------------------------------------------
def test_first_backward_and_recompile_with_their_reason(log: EventLog) -> None:
    f = function("(x * 2).sum()", "aot_eager")
    for length in (4, 5):
        f(torch.ones(length, requires_grad=True)).backward()
    first, back, again, back_again = of(log)
    assert [e["cls"] for e in (first, back, again, back_again)] == ["first", "backward", "recompile", "backward"]
    assert set(COMPILE_KEYS) <= set(first) and first["reason"] is None and first["frame"] == "f"
    assert (back["frame"], back["compile_id"]) == ("f", first["compile_id"])
    assert (again["expected"], again["actual"]) == ("4", "5") and "size mismatch at index 0" in again["reason"]
    assert back_again["reason"] == again["reason"]
    assert (first["cache_size"], again["cache_size"], again["limit"]) == (1, 2, torch._dynamo.config.recompile_limit)
    for event in (first, back, again):
        assert sum(event["parts"].values()) == pytest.approx(event["seconds"])
        assert 0 <= event["start"] <= event["start"] + event["seconds"] <= event["t"] + 1e-3
    assert first["parts"]["aot"] > 0 and back["parts"]["dynamo"] == 0


@pytest.mark.parametrize(
    ("calls", "kind", "expected", "actual"),
    [
        ([(torch.ones(3), 2), (torch.ones(3), 3)], "constant", "2", "3"),
        ([(torch.ones(3),), (torch.ones(3).double(),)], "dtype", "Float", "Double"),
        ([(torch.ones(3),), (torch.ones(3, 1),)], "rank", "1", "2"),
        ([(torch.ones(2, 3),), (torch.ones(3, 2).t(),)], "stride", "3", "1"),
    ],
)
def test_reasons_name_what_was_expected_and_what_came(
    log: EventLog, calls: list[tuple[Any, ...]], kind: str, expected: str, actual: str
) -> None:
    f = function("x * k")
    for arguments in calls:
        f(*arguments)
    _, again = of(log)
    assert (again["cls"], again["reason_kind"]) == ("recompile", kind)
    assert (again["expected"], again["actual"]) == (expected, actual)


SWITCH, COUNT = False, 0  # what the sins below flip


def sin_of_a_global_flag() -> None:
    global SWITCH

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if SWITCH else x * 3

    f = compiled(step)
    for SWITCH in (False, True):  # noqa: B007 - the global is what is tested
        f(torch.ones(2))


def sin_of_a_global_count() -> None:
    global COUNT

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * COUNT

    f = compiled(step)
    for COUNT in (3, 4):  # noqa: B007
        f(torch.ones(2))


def sin_of_a_float() -> None:
    f = compiled(lambda x, scale: x * scale)
    for scale in (0.5, 0.25):
        f(torch.ones(2), scale)


def sin_of_a_word() -> None:
    f = compiled(lambda x, how: x.mean() if how == "mean" else x.sum())
    for how in ("mean", "sum"):
        f(torch.ones(2), how)


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 2
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x) * self.calls


def sin_of_an_attribute() -> None:
    model = Counting()
    f = compiled(model)
    for model.calls in (2, 3):
        f(torch.ones(2))


def sin_of_eval() -> None:
    model = Counting()
    f = compiled(model)
    f(torch.ones(2))
    model.eval()
    f(torch.ones(2))


def sin_of_an_item() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.sum()
        torch._dynamo.graph_break()
        return x * loss.item()

    f = compiled(step)
    for value in (1.0, 2.0):
        f(torch.full((2,), value))


def sin_of_autocast() -> None:
    f = compiled(lambda x: x @ x)
    for on in (False, True):
        with torch.autocast("cpu", enabled=on):
            f(torch.ones(2, 2))


def sin_of_a_setting() -> None:
    f = compiled(lambda x: x + 1)
    try:
        for on in (False, True):
            torch.use_deterministic_algorithms(on)
            f(torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(False)


def sin_of_no_grad() -> None:
    f = compiled(lambda x: x + 1)
    for on in (True, False):
        with torch.set_grad_enabled(on):
            f(torch.ones(2))


def sin_of_none() -> None:
    f = compiled(lambda x, mask: x if mask is None else x * mask)
    for mask in (torch.ones(2), None):
        f(torch.ones(2), mask)


def sin_of_a_growing_dict() -> None:
    f = compiled(lambda d: sum(d.values()))
    for names in ("a", "ab"):
        f({name: torch.ones(2) for name in names})


def sin_of_a_shape() -> None:
    f = compiled(lambda batch: batch * 2)
    for length in (3, 4):
        f(torch.ones(2, length))


def compiled(work: Any) -> Callable[..., Any]:
    return torch.compile(work, backend="eager", dynamic=False)


@pytest.mark.parametrize(
    ("sin", "kind", "change", "advice"),
    [
        (sin_of_a_shape, "size", "batch: size[1]: 3 -> 4", "mark_dynamic(batch, 1)"),
        (sin_of_a_float, "constant", "scale: 0.5 -> 0.25", "pass it as a tensor"),
        (sin_of_a_word, "flag", "how: 'mean' -> 'sum'", "a graph for each value"),
        (sin_of_a_global_flag, "global", "global SWITCH: False -> True", "pass it as an argument"),
        (sin_of_a_global_count, "global", "global COUNT: 3 -> 4", "pass it as an argument"),
        (sin_of_an_attribute, "attribute", "self.calls: 2 -> 3", "register_buffer"),
        (sin_of_eval, "train_mode", "self._modules['dropout'].training: True -> False", "two compiles are normal"),
        (sin_of_an_item, "item", None, "keep it a tensor"),
        (sin_of_autocast, "autocast", "autocast(cpu)_enabled: False -> True", "around every call"),
        (sin_of_a_setting, "global_state", "deterministic_algorithms: False -> True", "set it once"),
        (sin_of_no_grad, "grad_mode", "grad_mode: True -> False", "compile evaluation apart"),
        (sin_of_none, "type", "type(mask): Tensor -> NoneType", "entry point for each"),
        (sin_of_a_growing_dict, "structure", "len(d): 1 -> 2", "keep its structure fixed"),
    ],
)
def test_typical_sins_are_named_with_advice_that_fits(
    log: EventLog, sin: Callable[[], None], kind: str, change: str | None, advice: str
) -> None:
    sin()
    (offender,) = timeline.from_events(log.events).offenders()
    assert (offender.kind, offender.count) == (kind, 1), offender
    assert change in (None, offender.changes[0]) and advice in offender.advice
    assert (offender.where and "test_compile_monitor.py" in offender.where) or kind == "item"


def test_a_planned_length_is_planned_once_in_a_thread() -> None:
    """In a process of its own: it depends on every compile being this test's."""
    code = "import test_compile_monitor; test_compile_monitor.plan_lengths()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, env=HERE, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def plan_lengths() -> None:
    f = function("(x * 2).sum()", "aot_eager")

    def work() -> None:
        for length in (4, 5, 4, 5):
            with events.planned(f"length {length}"):
                f(torch.ones(length, requires_grad=True)).backward()
        with events.planned("length 5"):
            f(torch.ones(5, requires_grad=True).double())  # nobody planned another dtype
        f(torch.ones(6))

    log = EventLog(None)
    with CompileMonitor(log):
        in_threads(work)
    found = [(e["cls"], e["planned"]) for e in of(log)]
    assert found == [
        ("first", "length 4"), ("backward", "length 4"), ("recompile", "length 5"), ("backward", "length 5"),
        ("recompile", None), ("recompile", None),
    ], found  # fmt: skip
    assert events.current_plan() is None
    assert sum(o.count for o in timeline.from_events(log.events).offenders()) == 2


def test_race_duplicates_are_told_from_recompiles(log: EventLog) -> None:
    f = function()
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        f(torch.ones(3))
        start.wait()
        f(torch.ones(4))

    in_threads(*[work] * 4)
    found = of(log)
    # Each length is compiled once for good; whoever compiled it as well did so because it had looked too early.
    by_length = {"first": 0, "recompile": 0, "race_duplicate": 0}
    for event in found:
        by_length[event["cls"]] += 1
    assert (by_length["first"], by_length["recompile"]) == (1, 1)
    assert by_length["race_duplicate"] == len(found) - 2 >= 1
    assert all(e["wait_seconds"] > 0 for e in found if e["cls"] == "race_duplicate")
    assert [e["cache_size"] for e in found] == list(range(1, len(found) + 1))


@pytest.mark.parametrize(("length", "cls"), [(3, "race_duplicate"), (4, "recompile")])
def test_the_second_of_two_first_compiles_is_told_by_a_second_look(log: EventLog, length: int, cls: str) -> None:
    """torch looked when there was no entry yet, and says nothing; the entry that is there by now does."""
    first_done, second_compiles = threading.Event(), threading.Event()

    def backend(graph: Any, inputs: Any) -> Any:
        if threading.current_thread().name == "second":
            second_compiles.set()
            assert first_done.wait(30)
        else:
            second.start()
            while not any(one["thread"] == "second" for one in in_flight()):
                time.sleep(0.005)  # until it has looked, and waits for the lock
        return graph.forward

    f = function(backend=backend)

    def between_lock_and_cache(event: dict[str, Any]) -> None:
        """The first thread stores its entry only after this; by then the second has looked, and found none."""
        if event["kind"] == "compile" and event["thread"] == "first":
            assert second_compiles.wait(30)

    stop = log.subscribe(between_lock_and_cache)
    first = threading.Thread(target=lambda: (f(torch.ones(3)), first_done.set()), name="first")
    second = threading.Thread(target=lambda: f(torch.ones(length)), name="second")
    first.start()
    first.join()
    second.join()
    stop()
    found = {e["thread"]: e for e in of(log)}
    assert found["first"]["cls"] == "first" and found["first"]["cache_size"] == 1
    assert (found["second"]["cls"], found["second"]["cache_size"]) == (cls, 2)
    if cls == "recompile":
        assert (found["second"]["expected"], found["second"]["actual"]) == ("3", "4")


def test_past_the_limit_is_an_eager_fallback_and_an_alarm(log: EventLog) -> None:
    with torch._dynamo.config.patch(recompile_limit=3):
        f = function()
        for length in range(2, 8):
            assert f(torch.ones(length)).sum() == 2 * length
    assert [e["cls"] for e in of(log)] == ["first", "recompile", "recompile", "eager_fallback"]
    last = of(log)[-1]
    assert (last["frame"], last["cache_size"], last["limit"], last["reason_kind"]) == ("f", 3, 3, "limit")
    assert [a["alarm"] for a in of(log, "alarm")] == ["limit_near", "limit_hit"]
    assert "runs eagerly" in of(log, "alarm")[-1]["message"]


def test_a_failure_that_reaches_the_caller_is_failed_one_that_does_not_is_a_fallback(log: EventLog) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("no such kernel")

    with pytest.raises(Exception, match="no such kernel"):
        function("x + 1", broken)(torch.ones(2))
    with torch._dynamo.config.patch(suppress_errors=True):
        assert function("x + 3", broken)(torch.ones(2)).sum() == 8
    broken_graph = "x + torch._dynamo.graph_break()"
    with pytest.raises(torch._dynamo.exc.Unsupported):
        function(broken_graph, fullgraph=True)(torch.ones(2))
    assert [e["cls"] for e in of(log)] == ["failed", "eager_fallback", "failed"]
    assert "no such kernel" in of(log)[0]["reason"]
    assert [a["alarm"] for a in of(log, "alarm")] == ["eager_fallback"]


def test_what_the_cache_on_disk_had_is_a_cache_hit(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        function("x @ x", "inductor")(torch.ones(4, 4))  # one library call: nothing to build
    assert [e["cls"] for e in of(log)] == ["first", "cache_hit"]
    assert of(log)[0]["parts"]["inductor"] > 0


# --- threads ---------------------------------------------------------------------------------------------------------
def test_compiles_are_in_their_own_lane_and_waiting_is_measured(log: EventLog) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow(graph: Any, inputs: Any) -> Any:
        entered.set()
        assert go_on.wait(30)
        return graph.forward

    def first() -> None:
        with events.lane("drafter-0", "cuda:0"):
            events.mark_step(7)
            function("x + 1", slow)(torch.ones(2))

    def second() -> None:
        assert entered.wait(30)
        with events.lane("drafter-1", "cuda:1"):
            log.emit("step", step=3, loss=1.0, tokens=1, rows=1, seconds=0.1, lr=None, grad_norm=None, bucket=None)
            function("x + 2")(torch.ones(2))

    def watcher() -> None:
        assert entered.wait(30)
        until = time.monotonic() + 20
        while len(seen) < 2 and time.monotonic() < until:
            seen.update({one["thread"]: one for one in in_flight()})
            time.sleep(0.01)
        time.sleep(0.3)
        go_on.set()

    seen: dict[str, dict[str, Any]] = {}
    in_threads(first, second, watcher)
    assert {name: one["state"] for name, one in seen.items()} == {
        "drafter-0": "compiling",
        "drafter-1": "waiting_compile",
    }
    assert seen["drafter-0"]["frame"] == "f" and seen["drafter-0"]["seconds"] >= 0
    slow_one, quick_one = of(log)
    assert (slow_one["thread"], slow_one["device"], slow_one["step"]) == ("drafter-0", "cuda:0", 7)
    assert (quick_one["thread"], quick_one["device"], quick_one["step"]) == ("drafter-1", "cuda:1", 4)
    assert slow_one["wait_seconds"] == 0 and quick_one["wait_seconds"] > 0.3
    assert quick_one["start"] >= slow_one["start"] + slow_one["seconds"] - 0.01
    states = [(e["thread"], e["state"]) for e in of(log, "state")]
    assert states[0] == ("drafter-0", "compiling") and ("drafter-1", "waiting_compile") in states
    assert states[-1][1] == "running" and in_flight() == []


def test_a_backward_in_autograd_s_own_thread_belongs_to_the_forward_s_lane(log: EventLog) -> None:
    """On a GPU, autograd runs in a thread of the device; a thread that Python did not start stands in for it here."""
    import _thread

    f = function("(x * 2).sum()", "aot_eager")
    done = threading.Event()
    with events.lane("drafter-0", "cuda:0"):
        result = f(torch.ones(3, requires_grad=True))

    def foreign() -> None:
        try:
            result.backward()
        finally:
            done.set()

    _thread.start_new_thread(foreign, ())
    assert done.wait(60)
    time.sleep(0.05)
    assert [(e["cls"], e["thread"], e["device"]) for e in of(log)] == [
        ("first", "drafter-0", "cuda:0"),
        ("backward", "drafter-0", "cuda:0"),
    ]


def test_watch_names_the_entry_point(log: EventLog) -> None:
    monitor = CompileMonitor(EventLog(None))
    f = monitor.watch(function())
    assert f.__name__ == "f" and f(torch.ones(2)).sum() == 4
    assert of(log)[0]["entry"] == "f" and hub.here.entry is None


# --- counts that do not mislead --------------------------------------------------------------------------------------
def test_a_cell_run_again_and_a_deleted_model_are_first_compiles_again(log: EventLog) -> None:
    cell = "def f(x):\n    return x + 1\ng = torch.compile(f, backend='eager', dynamic=False)\n"
    for _ in range(3):
        space: dict[str, Any] = {"torch": torch}
        exec(cell, space)
        space["g"](torch.ones(2))
    assert [(e["cls"], e["cache_size"]) for e in of(log)] == [("first", 1)] * 3

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + 1

    seen = len(of(log))
    for _ in range(2):
        model = Model()
        model.compile(backend="eager", dynamic=False)
        model(torch.ones(1, 2))
        del model
        gc.collect()
        torch._dynamo.reset_code(Model.forward.__code__)  # what makes the entries vanish for certain
    assert [(e["cls"], e["cache_size"]) for e in of(log)[seen:]] == [("first", 1)] * 2
    assert not timeline.from_events(log.events).offenders()


# --- the monitor itself ----------------------------------------------------------------------------------------------
def test_monitors_nest_and_each_has_every_compile() -> None:
    outer, inner = EventLog(None), EventLog(None)
    with CompileMonitor(outer):
        function("x + 1")(torch.ones(2))
        with CompileMonitor(inner) as monitor:
            monitor.install()  # twice is once
            function("x + 2")(torch.ones(2))
        function("x + 3")(torch.ones(2))
    function("x + 4")(torch.ones(2))
    assert len(of(outer)) == 3 and len(of(inner)) == 1


def test_our_own_errors_become_warnings_and_never_reach_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(None)
    with CompileMonitor(log):
        with monkeypatch.context() as patch:
            patch.setattr("dflash_lib.compile_metrics.read", lambda *_, **__: 1 / 0)
            assert function()(torch.ones(2)).sum() == 4
        assert "ZeroDivisionError" in of(log, "warning")[0]["message"]
        function("x + 1")(torch.ones(2))
        log.close()
        assert function("x + 5")(torch.ones(2)).sum() == 12  # a closed log: Python's own log has it
    assert len(of(log)) == 1


def test_a_torch_without_the_hook_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(None)
    with monkeypatch.context() as patch:
        patch.delattr(dynamo_utils, "log_compilation_event")
        with CompileMonitor(log):
            pass
    assert "log_compilation_event" in of(log, "warning")[0]["message"]
    assert torch.__version__ in of(log, "warning")[0]["message"]


def test_steps_are_counted_by_thread_though_idents_are_used_again() -> None:
    recording = Recording(EventLog(None))
    for _ in range(3):  # one after the other: the system gives them the same ident
        in_threads(lambda: [recording.step() for _ in range(2)])
    assert [event["step"] for event in recording.log.events] == [1, 2] * 3
    assert all(event["seconds"] == 0.0 for event in recording.log.events[::2])


def test_record_compiles_records_anybody_s_threads_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    shared = function()

    def work(length: int) -> None:
        shared(torch.ones(length))

    with record_compiles(path) as recording:
        for step, lengths in enumerate(((2,), (2,), (3, 4)), start=1):
            in_threads(*[lambda n=n: work(n) for n in lengths])
            recording.step(loss=1.0 / step)
    run = timeline.load(path)
    assert sorted(c.cls for c in run.compiles) == ["first", "recompile", "recompile"]
    assert [e["loss"] for e in events.read(path) if e["kind"] == "step"] == [1.0, 0.5, 1 / 3]
    for event in events.read_all(path):
        SCHEMA.validate(event)
    assert events.read(path)[-1]["kind"] == "run_finished"

    with record_compiles(path):  # the cell run again: its counts replace the earlier ones
        function("x + 1")(torch.ones(2))
    assert [c.cls for c in timeline.load(path).compiles] == ["first"]
    with pytest.raises(RuntimeError, match="mine"), record_compiles(path, append=True), record_compiles(path):
        function("x + 2")(torch.ones(2))
        raise RuntimeError("mine")
    assert len(timeline.load(path).compiles) == 2  # appended, and once though two recordings share the file
    assert events.read(path)[-1]["error"] == "RuntimeError('mine')"
