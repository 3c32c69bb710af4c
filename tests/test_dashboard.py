"""The dashboard: events folded into lanes, how they look, who sets the widgets, what is left in the notebook."""

from __future__ import annotations

import base64
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import little_notebooks
import nbformat
import pytest
from fake_trainer import FakeTrainer
from hypothesis import given, settings
from hypothesis import strategies as st
from little_notebooks import ROOT

from dflash_lib import dashboard as live
from dflash_lib import dashboard_view as view
from dflash_lib import runs, summary
from dflash_lib.atomic import write_text
from dflash_lib.config import RunConfig
from dflash_lib.dashboard import Dashboard
from dflash_lib.dashboard_picture import png
from dflash_lib.dashboard_state import Board, Compile, Series
from dflash_lib.errors import UserError
from dflash_lib.events import EventLog
from dflash_lib.run_folder import write_status


def event(kind: str, thread: str = "drafter-0", t: float = 0.0, **fields: Any) -> dict[str, Any]:
    base = {"v": 1, "seq": 0, "t": t, "attempt": 1, "node": 0, "device": "cpu", "step": None}
    return {**base, "kind": kind, "thread": thread, **fields}


def step(number: int, loss: float | None = 1.0, thread: str = "drafter-0", **fields: Any) -> dict[str, Any]:
    return event(
        "step", thread, **{"t": float(number), "step": number, "loss": loss, "tokens": 100, "seconds": 0.5, **fields}
    )


def board(*events: dict[str, Any], steps: int | None = 100) -> Board:
    result = Board({"steps": steps} if steps else {})
    for one in events:
        result.apply(one)
    return result


# --- curves ---------------------------------------------------------------------------------------------------------
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=600), st.integers(4, 40))
def test_a_curve_stays_short_and_keeps_its_mean(values: list[float], limit: int) -> None:
    series = Series(limit)
    for x, y in enumerate(values):
        series.add(x, y)
    points = series.points()
    assert len(points) <= limit
    assert [x for x, _ in points] == sorted({x for x, _ in points})
    assert points[-1][0] == len(values) - 1
    assert all(min(values) - 1e-6 <= y <= max(values) + 1e-6 for _, y in points)


def test_a_resumed_run_replaces_the_steps_it_takes_again() -> None:
    series = Series()
    for x in range(10):
        series.add(x, 0.0)
    series.add(4, 9.0)
    assert series.points() == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 9)]


# --- folding --------------------------------------------------------------------------------------------------------
def test_a_lane_shows_what_its_events_say() -> None:
    compiled = event("compile", t=4.0, start=1.0, seconds=3.0, wait_seconds=0.5, cls="first", frame="attention")
    again = event("compile", t=9.0, start=7.0, seconds=2.0, cls="recompile", frame="attention", reason="size of q",
                  expected="128", actual="256")  # fmt: skip
    hit = event("compile", t=9.5, start=9.4, seconds=0.1, cls="cache_hit", frame="attention")
    b = board(compiled, step(1, 8.0), step(2, 6.0), again, hit, event("state", state="running", t=10.0))
    lane = b.lanes["drafter-0"]
    assert (lane.step, lane.loss, lane.device, lane.words) == (2, 6.0, "cpu", "running")
    assert lane.losses.points() == [(1, 8.0), (2, 6.0)]
    assert lane.tokens_per_second == 200
    assert (lane.compiles, lane.recompiles, lane.compile_seconds, lane.wait_seconds) == (3, 1, 5.1, 0.5)
    assert lane.last_reason == "size of q (128 → 256)"
    assert (b.step, b.now, len(b.compiles)) == (2, 10.0, 3)


def test_a_planned_compile_is_no_recompile_here_either() -> None:
    fields = {"t": 9.0, "start": 7.0, "seconds": 2.0, "frame": "attention", "reason": "size of q"}
    b = board(
        event("compile", cls="recompile", planned="length 256", **fields), event("compile", cls="recompile", **fields)
    )
    assert [c.cls for c in b.compiles] == ["planned", "recompile"]
    assert (b.lanes["drafter-0"].compiles, b.lanes["drafter-0"].recompiles) == (2, 1)
    assert ">planned<" in view.page(b, "run")


def test_a_resumed_runs_picture_is_drawn_again(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.emit("step", thread="drafter-0", step=1, loss=3.0, seconds=0.1)
    summary.draw_losses(tmp_path)
    first = (tmp_path / "loss.png").read_bytes()
    os.utime(tmp_path / "loss.png", (2.0**40, 2.0**40))
    (tmp_path / "loss.png").write_bytes(b"kept")
    summary.draw_losses(tmp_path)
    assert (tmp_path / "loss.png").read_bytes() == b"kept"  # it is of all of the log
    os.utime(tmp_path / "loss.png", (1.0, 1.0))
    summary.draw_losses(tmp_path)
    assert (tmp_path / "loss.png").read_bytes()[:4] == first[:4] == b"\x89PNG"


def test_the_run_is_as_far_as_its_slowest_lane_and_the_time_left_follows_the_pace() -> None:
    begun = event("run_started", "main", lanes=["drafter-0", "drafter-1"], devices=["cuda:0", "cuda:1"])
    b = board(begun, *(step(n, thread=f"drafter-{i}", t=2.0 * n + i) for n in range(1, 11) for i in (0, 1)))
    b.apply(step(11, thread="drafter-0", t=22.0))
    assert b.step == 10
    assert b.seconds_left() == pytest.approx(90 * 2.0)


@pytest.mark.parametrize(
    ("what", "meanwhile", "then"),
    [
        ("pause", event("state", state="running"), event("state", state="paused")),
        ("resume", event("state", state="paused"), event("state", state="running")),
        ("stop", event("state", state="stopping"), event("state", state="stopped")),
        ("checkpoint", event("state", state="paused"), event("checkpoint", "main", path="checkpoints/step-000002")),
        ("evaluate", event("state", state="running"), event("evaluation", "main", tau_mean=1.5)),
    ],
)
def test_a_request_is_shown_until_it_takes_effect(what: str, meanwhile: dict, then: dict) -> None:
    b = board(step(1))
    b.request(what)
    assert b.lanes["drafter-0"].note == f"{what} asked for: at the next step"
    b.apply(meanwhile)
    assert b.lanes["drafter-0"].note is not None
    b.apply(then)
    assert b.lanes["drafter-0"].note is None


def test_a_request_during_a_compile_names_what_it_waits_for() -> None:
    b = board(
        event("state", state="compiling", detail="attention"), event("state", "drafter-1", state="waiting_compile")
    )
    # as the trainer's own acknowledgement says it
    for name in ("drafter-0", "drafter-1"):
        b.apply(event("state", name, state="running", request="pause", detail="pause after the compile"))
    assert b.lanes["drafter-0"].words == "compiling: attention"
    assert b.lanes["drafter-0"].note == "pause asked for: waits for the compile of attention"
    assert b.lanes["drafter-1"].note == "pause asked for: waits for another lane's compile"


def test_a_run_is_paused_when_every_lane_that_trains_is() -> None:
    b = board(
        event("run_started", "main"), event("state", "target-0", state="running"), step(1), step(1, thread="drafter-1")
    )
    for lane, said in (("drafter-0", "running"), ("drafter-1", "paused")):
        b.apply(event("state", lane, state="paused"))
        assert f">{said}</span>" in view.header(b, "run")


def test_only_lanes_that_train_take_requests() -> None:
    b = board(event("state", "target-0", state="running"), step(1))
    b.request("pause")
    assert [(name, lane.note) for name, lane in b.lanes.items()] == [
        ("target-0", None),
        ("drafter-0", "pause asked for: at the next step"),
    ]


@pytest.mark.parametrize(("mode", "left"), [("averaged", []), ("independent", ["drafter-1"])])
def test_one_lane_measures_for_those_it_is_averaged_with(mode: str, left: list[str]) -> None:
    """An evaluation that has begun is no longer asked for; independent lanes measure each for itself."""
    b = Board({"mode": mode})
    b.apply(step(1)), b.apply(step(1, thread="drafter-1"))
    b.request("evaluate")
    b.apply(event("state", "drafter-0", state="running", detail="evaluating"))
    assert [name for name, lane in b.lanes.items() if lane.request] == left
    assert b.lanes["drafter-0"].words == "running: evaluating"


def test_a_request_that_cannot_be_done_is_taken_back_and_said() -> None:
    b = board(step(1))
    b.request("evaluate")
    b.apply(event("warning", request="evaluate", message="no target on cuda:1 to decode with"))
    assert b.lanes["drafter-0"].request is None
    assert "no target on cuda:1" in view.findings(b)


def test_a_frame_is_named_without_its_lanes_suffix() -> None:
    """The trainer gives each lane a code object of its own name; people know the function's."""
    b = board(
        event("state", state="compiling", detail="attention_drafter_0 (backward)"),
        event("compile", seconds=1.0, frame="attention_drafter_0"),
        event("compile", seconds=1.0, frame="attention_drafter_0_run_2"),  # of a second trainer in this kernel
    )
    assert b.lanes["drafter-0"].words == "compiling: attention (backward)"
    assert [c.frame for c in b.compiles] == ["attention", "attention"]


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=12))
def test_the_estimated_acceptance_length_is_that_of_independent_slots(accuracy: list[list[float]]) -> None:
    b = board(*(step(n, accuracy=slots) for n, slots in enumerate(accuracy, 1)))
    a, b_, c = (sum(slots) / len(slots) for slots in zip(*accuracy[-8:], strict=True))
    # every outcome of three slots, each with its probability and the length that it commits
    outcomes = [(1, 1 - a), (2, a * (1 - b_)), (3, a * b_ * (1 - c)), (4, a * b_ * c)]
    expected = sum(length * probability for length, probability in outcomes)
    assert b.lanes["drafter-0"].estimated_tau == pytest.approx(expected)


def test_a_failed_worker_and_a_new_attempt() -> None:
    failed = event("worker_failed", type="ValueError", message="bad row")
    b = board(step(1), step(2), failed, event("run_finished", "main", state="failed"))
    assert (b.state, b.error, b.ended) == ("failed", "drafter-0: ValueError: bad row", True)
    assert (b.lanes["drafter-0"].state, b.lanes["drafter-0"].error) == ("failed", "ValueError: bad row")
    b.apply({**step(2, 0.5), "attempt": 2})
    assert (b.state, b.error, b.ended, b.attempt) == ("running", None, False, 2)
    assert b.lanes["drafter-0"].losses.points() == [(1, 1.0), (2, 0.5)]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
kinds = st.sampled_from(
    [
        "step",
        "compile",
        "state",
        "alarm",
        "warning",
        "checkpoint",
        "evaluation",
        "run_started",
        "run_finished",
        "worker_failed",
        "?",
    ]
)
names = st.sampled_from(
    ["thread", "t", "step", "loss", "seconds", "tokens", "start", "cls", "state", "detail", "reason", "sets", "config",
     "attempt", "request", "message", "tau_mean", "expected", "actual", "steps", "device", "lanes", "devices"]
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(kinds, st.dictionaries(names, anything, max_size=8)), max_size=8))
def test_any_log_is_shown_without_an_error(log: list[tuple[str, dict[str, Any]]]) -> None:
    b = board(*({"kind": kind, **fields} for kind, fields in log))
    html = view.page(b, "any")
    html.encode("utf-8")
    assert "\0" not in html
    assert html.count("<svg") == html.count("</svg>")


# --- looks ----------------------------------------------------------------------------------------------------------
def test_text_from_outside_cannot_become_markup() -> None:
    bad = '<script>alert("x")</script>\ud800\0'
    b = board(
        event("state", bad, state=bad),
        event("alarm", message=bad),
        event("compile", reason=bad, frame=bad, seconds=1.0),
    )
    html = view.page(b, bad)
    assert "<script" not in html
    html.encode("utf-8")
    assert png(b, bad + " $\\frac{")[:4] == b"\x89PNG"


def test_words_for_times_and_amounts() -> None:
    assert [view.duration(s) for s in (None, 0.25, 9.96, 61, 7509)] == ["–", "0.2 s", "10.0 s", "1:01", "2:05:09"]
    assert [view.amount(v) for v in (None, 0, 987, 999.6, 12345, 4.56e6)] == ["–", "0", "987", "1k", "12.3k", "4.56M"]


@given(st.floats(-1e5, 1e5), st.floats(1e-3, 1e5))
def test_ticks_are_round_and_inside(low: float, span: float) -> None:
    ticks = view.ticks(low, low + span)
    assert 1 <= len(ticks) <= 11
    assert all(low - span * 1e-6 <= tick <= low + span * (1 + 1e-6) for tick in ticks)


spans = st.tuples(st.floats(0, 100), st.floats(0, 5), st.sampled_from("ab"), st.sampled_from(["first", "recompile"]))


@given(st.lists(spans, max_size=60), st.floats(0.01, 2))
def test_drawing_close_compiles_as_one_loses_none(found: list[tuple[float, float, str, str]], gap: float) -> None:
    compiles = [Compile(thread, start, seconds, cls, "f") for start, seconds, thread, cls in found]
    groups = view.merged(compiles, gap)
    assert sum(count for *_, count in groups) == len(compiles)
    for c in compiles:
        drawn = [(g.start, end) for g, end, _ in groups if (g.thread, g.cls) == (c.thread, c.cls)]
        assert any(start <= c.start and c.start + (c.seconds or 0) <= end + 1e-9 for start, end in drawn)


def test_what_was_waited_is_drawn_once() -> None:
    spans = [(10.0, 2.0), (10.5, 2.5), (20.0, 5.0), (30.0, 0.0)]  # start, wait
    compiles = [Compile("a", start, 1.0, "first", "f", wait=wait) for start, wait in spans]
    assert view.waiting([*compiles, Compile("b", 10.0, 1.0, "first", "f", wait=3.0)], 0.1) == [
        ("a", 8.0, 10.5),
        ("a", 15.0, 20.0),
        ("b", 7.0, 10.0),
    ]


def test_a_loss_that_starts_high_leaves_room_for_the_rest() -> None:
    """The axis turns logarithmic: the last of these losses is drawn well above the axis' lower end."""
    b = board(*(step(n, loss) for n, loss in enumerate([64.0, 20.0, 8.0, *[6.0, 7.0] * 10], 1)))
    assert view.log_ticks(6.0, 64.0) == [10.0, 20.0, 50.0]
    assert all(f">{mark}</text>" in view.losses(b) for mark in (10, 20, 50))
    assert "nats a token (log)" in view.losses(b)
    assert png(b, "high")[:4] == b"\x89PNG"


def test_the_page_of_a_big_run_stays_small() -> None:
    b = Board({"steps": 400})
    for n in range(1, 401):
        for i in range(64):
            b.apply(step(n, math.sin(n), thread=f"drafter-{i}", t=n + i / 64))
            if n % 4 == 1:
                b.apply(
                    event(
                        "compile",
                        f"drafter-{i}",
                        t=n + i / 64,
                        seconds=0.01,
                        start=n + i / 64,
                        cls="recompile",
                        reason="r" * 90,
                    )
                )
    assert len(view.page(b, "big")) < 2_000_000


# --- live -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., FakeTrainer]]:
    made: list[FakeTrainer] = []

    def trainer(steps: int = 12, name: str = "live", **options: Any) -> FakeTrainer:
        made.append(FakeTrainer(RunConfig(steps=steps, name=name, runs_dir=str(tmp_path)), **options))
        return made[-1]

    yield trainer
    for one in made:
        one.stop()


def shown(dashboard: Dashboard) -> str:
    return "".join(html.value for html in dashboard.panel._html.values())


def until(condition: Callable[[], Any], seconds: float = 5.0) -> float:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, "not in time"
        time.sleep(0.01)
    return time.monotonic() - begun


def test_one_thread_sets_every_widget_and_not_often(make: Callable[..., FakeTrainer]) -> None:
    trainer = make(steps=40, threads=3, seconds=0.03, compile_seconds=0.2)
    dashboard = Dashboard(trainer)
    setters, sets = set(), []
    for name, html in dashboard.panel._html.items():
        html.observe(
            lambda change, name=name: (setters.add(threading.current_thread().name), sets.append(name)), "value"
        )
    begun = time.monotonic()
    trainer.start()
    trainer.join()
    seconds = time.monotonic() - begun
    assert setters == {"dashboard"}
    assert dashboard.redraws <= seconds / live.INTERVAL + 3
    # the last state is shown before whoever waited for the run goes on
    assert dashboard.board.step == 40
    assert "step 40 of 40" in shown(dashboard)
    assert shown(dashboard).count(">finished<") >= 3
    assert not dashboard._publisher.is_alive()
    assert all(button.disabled for button in dashboard.panel._buttons.values())


def test_the_run_folder_keeps_the_picture_and_the_page(make: Callable[..., FakeTrainer]) -> None:
    trainer = make(compile_seconds=0.05, seconds=0.01)
    Dashboard(trainer)
    trainer.start().join()
    assert (trainer.run_dir / "loss.png").read_bytes()[:4] == b"\x89PNG"
    page = (trainer.run_dir / "dashboard.html").read_text()
    assert "drafter-1" in page
    assert page.count("optimizer step") == 1 and "<img" not in page, "each plot once, in the page's own theme"
    assert "http" not in page.replace("http://www.w3.org", "")


def test_buttons_are_acknowledged_at_once_and_reach_the_trainer(make: Callable[..., FakeTrainer]) -> None:
    trainer = make(steps=2000, seconds=0.05, compile_seconds=0.05)
    dashboard = Dashboard(trainer)
    buttons = dashboard.panel._buttons

    def lanes() -> str:
        return dashboard.panel._html["lanes"].value

    trainer.start()
    until(lambda: not buttons["pause"].disabled)
    for what, effect in (("pause", ">paused<"), ("checkpoint", None), ("resume", ">running<")):
        buttons[what].click()
        assert until(lambda what=what, effect=effect: lanes().count(f"{what} asked for") == 2
                     or (effect and lanes().count(effect) == 2)) < 2  # fmt: skip
        until(lambda effect=effect: effect is None or lanes().count(effect) == 2)
    buttons["stop"].click()
    trainer.join()
    assert [what for what, _ in trainer.asked] == ["pause", "checkpoint", "resume", "stop"]
    assert shown(dashboard).count(">stopped<") >= 2


def test_a_dashboard_that_comes_late_shows_what_it_missed(make: Callable[..., FakeTrainer]) -> None:
    trainer = make(steps=2000, seconds=0.01, compile_seconds=0.05)
    trainer.start()
    until(lambda: trainer.log._seq > 60)
    dashboard = Dashboard(trainer)
    trainer.stop()
    trainer.join()
    for lane in dashboard.board.lanes.values():
        assert [x for x, _ in lane.losses.points()] == list(range(1, lane.step + 1))
        assert lane.compiles == 1


def test_a_refused_request_says_why(make: Callable[..., FakeTrainer]) -> None:
    trainer = make(steps=2000)

    def refuse() -> None:
        raise RuntimeError("no prompts to evaluate")

    trainer.evaluate = refuse  # type: ignore[method-assign]
    dashboard = Dashboard(trainer)
    trainer.start()
    until(lambda: not dashboard.panel._buttons["evaluate"].disabled)
    dashboard.panel._buttons["evaluate"].click()
    assert dashboard.flush()
    assert "no prompts to evaluate" in shown(dashboard)
    assert "evaluate asked for" not in shown(dashboard)
    trainer.stop()
    trainer.join()


def test_each_lane_shows_the_memory_of_its_own_gpu(
    make: Callable[..., FakeTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's twin of what a GPU shows: the device's own number where it says one, a dash where it does not."""
    held = {"cuda:0": 3 * 2**30, "cuda:1": 5 * 2**29}

    def allocated(device: Any) -> int:
        if str(device) not in held:
            raise RuntimeError("no NVML, no such device")
        return held[str(device)]

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.memory_allocated", allocated)
    trainer = make(steps=2000, threads=4, devices=["cuda:0", "cuda:1", "cuda:7", "cpu"])
    dashboard = Dashboard(trainer)
    trainer.start()
    until(lambda: all(lane.step for lane in dashboard.board.lanes.values()))
    assert dashboard.flush()
    assert [lane.memory_gib for lane in dashboard.board.lanes.values()] == [3.0, 2.5, None, None]
    rows = dashboard.panel._html["lanes"].value.split("<tr data-lane=")[1:]
    memory = [row.split('<td class="n">')[4].split("<")[0] for row in rows]
    assert memory == ["3.00", "2.50", "–", "–"]
    assert "GPU memory,<br>GiB" in dashboard.panel._html["lanes"].value
    held["cuda:0"] = 2**30
    assert dashboard.flush()
    assert dashboard.board.lanes["drafter-0"].memory_gib == 1.0, "also between steps, as in a long compile"
    assert dashboard._publisher.is_alive()
    assert "of host memory" in dashboard.panel._html["header"].value
    trainer.stop()
    trainer.join()


def test_a_dear_redraw_comes_less_often(make: Callable[..., FakeTrainer]) -> None:
    trainer = make(steps=2000)
    dashboard = Dashboard(trainer)

    def dear(*_: Any, **__: Any) -> None:
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass

    dashboard.panel.show = dear  # type: ignore[method-assign]
    assert dashboard.flush()
    assert dashboard.flush()
    assert dashboard._interval >= 0.03 / live.SHARE
    dashboard.close()


def test_a_headless_notebook_keeps_a_picture_and_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    notebook = little_notebooks.write(
        tmp_path / "a.ipynb",
        "steps = 9",
        "from fake_trainer import FakeTrainer\nfrom dflash_lib import Dashboard, RunConfig\n"
        "trainer = FakeTrainer(RunConfig(steps=steps), seconds=0.02, compile_seconds=0.1)\nDashboard(trainer)",
        "run = trainer.start()\nawait run.wait()",
    )
    book = nbformat.read(runs.execute(notebook, {"steps": 12}, tmp_path / "run", progress=False), 4)
    data = [output["data"] for cell in book.cells for output in cell.get("outputs", ()) if "data" in output]
    [picture] = [base64.b64decode(one["image/png"]) for one in data if "image/png" in one]
    assert picture == (tmp_path / "run" / "loss.png").read_bytes()
    [page] = [one["text/html"] for one in data if "text/html" in one]
    assert "step 12 of 12" in page
    assert page.count(">finished<") == 3
    assert "<script" not in page
    assert not [o for cell in book.cells for o in cell.get("outputs", ()) if o.output_type in ("error", "stream")]


# --- attaching ------------------------------------------------------------------------------------------------------
def test_attach_to_a_finished_run_shows_it_as_it_ended(make: Callable[..., FakeTrainer]) -> None:
    trainer = make(compile_seconds=0.05, seconds=0.01)
    trainer.start().join()
    dashboard = Dashboard.attach(trainer.run_dir)
    assert "step 12 of 12" in shown(dashboard)
    assert dashboard._picture is not None
    assert (dashboard.board.state, dashboard.board.lanes["drafter-1"].compiles) == ("finished", 1)
    assert all(button.disabled for button in dashboard.panel._buttons.values())
    assert not (trainer.run_dir / "dashboard.html").exists(), "a run that is only looked at is not written to"


def test_attach_follows_a_run_of_another_process(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    write_text(tmp_path / "config.json", RunConfig(steps=5).to_json())
    write_status(tmp_path, "running")
    log.emit("step", thread="drafter-0", step=1, loss=3.0, tokens=1, seconds=1.0)
    dashboard = Dashboard.attach(tmp_path)
    assert dashboard.board.step == 1
    log.emit("step", thread="drafter-0", step=2, loss=2.0, tokens=1, seconds=1.0)
    until(lambda: "step 2 of 5" in shown(dashboard))
    assert dashboard.board.lanes["drafter-0"].losses.points() == [(1, 3.0), (2, 2.0)], "no line counts twice"
    assert all(button.disabled for button in dashboard.panel._buttons.values())
    write_status(tmp_path, "stopped", step=2)
    until(lambda: dashboard._picture is not None)
    assert dashboard.board.state == "stopped"


def test_attach_says_when_the_process_died(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", f"from dflash_lib.runs import write_status; write_status({str(tmp_path)!r}, 'running')"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    child.wait()
    dashboard = Dashboard.attach(tmp_path)
    assert dashboard.board.state == "failed"
    assert f"process {child.pid} died" in shown(dashboard)


def test_attach_in_the_trainers_own_kernel_gives_the_buttons_back(make: Callable[..., FakeTrainer]) -> None:
    trainer = make(steps=2000)
    first = Dashboard(trainer)
    trainer.start()
    first.flush()
    second = Dashboard.attach(trainer.run_dir)
    until(lambda: not second.panel._buttons["stop"].disabled)
    second.panel._buttons["stop"].click()
    trainer.join()
    assert shown(first).count(">stopped<") == shown(second).count(">stopped<") >= 2
    compiles = {name: lane.compiles for name, lane in first.board.lanes.items()}
    assert {name: lane.compiles for name, lane in second.board.lanes.items()} == compiles, "no event counts twice"


def test_attach_to_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        Dashboard.attach(tmp_path)
