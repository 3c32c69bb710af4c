"""The event log: format, clock, threads, damage, attempts."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lib import events
from dflash_lib.events import EventLog

SCHEMA = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parent / "schemas" / "event.schema.json").read_text())
)


def lines(path: Path) -> list[dict[str, Any]]:
    """The file as any other program reads it: strict JSON, a line an object."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_bytes().splitlines()]


def test_lines_have_the_contract_s_form(tmp_path: Path) -> None:
    with EventLog(tmp_path / "deep" / "events.jsonl", node=2) as log:
        log.emit("run_started")
        with events.lane("drafter-1", "cuda:1"):
            log.emit("step", step=1, loss=2.5, tokens=10, rows=4, seconds=0.1, lr=1e-3, grad_norm=1.0, bucket=128)
        log.emit("alarm", alarm="drift", message="replicas differ", thread="drafter-0", device="cuda:0")
    written = lines(tmp_path / "deep" / "events.jsonl")
    for line in written:
        SCHEMA.validate(line)
    assert [line["seq"] for line in written] == [0, 1, 2]
    assert [line["thread"] for line in written] == ["main", "drafter-1", "drafter-0"]
    assert [line["device"] for line in written] == ["cpu", "cuda:1", "cuda:0"]
    assert all(line["node"] == 2 for line in written)


def test_what_json_cannot_say_is_null_and_named(tmp_path: Path) -> None:
    class Scalar:
        shape = ()

        def item(self) -> float:
            return 0.25

    with EventLog(tmp_path / "events.jsonl") as log:
        log.emit("step", step=1, loss=float("nan"), lr=float("inf"), grad_norm=Scalar(), path=tmp_path, more=(1, {2}))
    (line,) = lines(tmp_path / "events.jsonl")
    assert line["loss"] is None and line["lr"] is None and line["nonfinite"] == {"loss": "nan", "lr": "inf"}
    assert line["grad_norm"] == 0.25 and line["path"] == str(tmp_path) and line["more"] == [1, [2]]


def test_threads_write_whole_lines_and_one_sequence(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")

    def work(name: str) -> None:
        with events.lane(name, "cpu"):
            for step in range(1, 201):
                log.emit("step", step=step, loss=1.0, text="x" * 300)

    threads = [threading.Thread(target=work, args=(f"drafter-{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    written = lines(tmp_path / "events.jsonl")
    assert [line["seq"] for line in written] == list(range(1600))
    for i in range(8):
        assert [line["step"] for line in written if line["thread"] == f"drafter-{i}"] == list(range(1, 201))


def test_lanes_nest_and_belong_to_their_thread() -> None:
    seen: list[tuple[str, str]] = []
    with events.lane("drafter-0", "cuda:0"):
        with events.lane("inner", "cpu"):
            assert events.current_lane() == ("inner", "cpu")
        assert events.current_lane() == ("drafter-0", "cuda:0")
        thread = threading.Thread(target=lambda: seen.append(events.current_lane()), name="loader")
        thread.start()
        thread.join()
    assert seen == [("loader", "cpu")]
    assert events.current_lane() == ("main", "cpu") and not events.in_lane()


def test_the_clock_counts_from_the_origin_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, origin=time.monotonic() - 100) as log:
        assert 100 <= log.emit("state", state="running")["t"] < 101
    with EventLog(path, attempt=events.next_attempt(path)) as log:
        again = log.emit("state", state="running")
    assert again["attempt"] == 2 and again["seq"] == 1 and 100 <= again["t"] < 101


def test_a_line_that_a_dying_process_cut_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit("state", state="running")
    with path.open("ab") as file:
        file.write(b'{"v": 1, "seq": 1, "t": 3.0, "kind": "sta')
    with EventLog(path, attempt=2) as log:
        log.emit("state", state="finished")
    scan = events.scan(path)
    assert [e["state"] for e in scan.events] == ["running", "finished"] and scan.unreadable == 1
    # and where another writer did glue them together, the whole one is still found
    glued = path.read_bytes().replace(b'"sta\n', b'"sta')
    path.write_bytes(glued)
    assert [e["state"] for e in events.read_all(path)] == ["running", "finished"]


def test_read_keeps_the_last_attempt_of_each_step(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        for step in (1, 2, 3):
            log.emit("step", thread="drafter-0", step=step, loss=float(step))
        log.emit("compile", thread="drafter-0", step=3, cls="recompile")
        log.emit("warning", message="kept: it belongs to no step")
    with EventLog(path, attempt=2) as log:
        log.emit("step", thread="drafter-0", step=2, loss=20.0)
        log.emit("step", thread="drafter-1", step=3, loss=99.0)
        log.emit("step", thread="drafter-0", step=3, loss=30.0)
    losses = {(e["thread"], e["step"]): e["loss"] for e in events.read(path) if e["kind"] == "step"}
    assert losses == {("drafter-0", 1): 1.0, ("drafter-0", 2): 20.0, ("drafter-0", 3): 30.0, ("drafter-1", 3): 99.0}
    assert [e["kind"] for e in events.read(path)].count("warning") == 1
    assert not [e for e in events.read(path) if e["kind"] == "compile"]  # of the attempt that was redone
    assert len(events.read_all(path)) == 8


def test_foreign_lines_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + b'{"v": 1, "kind": "step", "t": 1, "step": 1, "loss": NaN}\r\n\r\n'
        + b'{"v": 9, "kind": "from_the_future", "t": 2.0, "glow": [1]}\n'
        + b'{"kind": "step", "t": "late"}\n[1, 2]\nnonsense\n\xff\xfe\n{"kind": 3, "t": 1}\n'
        + b'{"kind": "step", "t": 1'
        + b"0" * 400
        + b"}\n"  # an integer that no float holds
        + b'{"kind": "state", "t": 2.5, "detail": "half a pair: \\ud800"}\n'
        + b'{"kind": "step", "t": 3.0, "thread": 7, "step": "two", "attempt": null}'
    )
    scan = events.scan(path)
    assert [e["kind"] for e in scan.events] == ["step", "from_the_future", "state", "step"] and scan.unreadable == 6
    assert scan.events[1]["glow"] == [1]
    assert scan.events[3]["thread"] == "main" and scan.events[3]["step"] is None and scan.events[3]["attempt"] == 1


@settings(max_examples=60, deadline=None)
@given(
    messages=st.lists(st.text(st.characters(exclude_categories=()), max_size=8), min_size=1, max_size=8),
    share=st.floats(0, 1),
    order=st.randoms(use_true_random=False),
    garbage=st.binary(max_size=20),
)
def test_any_cut_or_shuffled_log_keeps_its_valid_lines(
    tmp_path_factory: pytest.TempPathFactory, messages: list[str], share: float, order: Random, garbage: bytes
) -> None:
    folder = tmp_path_factory.mktemp("log")  # messages hold anything, half surrogate pairs too
    with EventLog(folder / "whole.jsonl") as log:
        for i, message in enumerate(messages):
            log.emit("step", thread=f"drafter-{i % 3}", step=i // 3 + 1, t=float(i), message=message)
    whole = (folder / "whole.jsonl").read_bytes()
    cut = whole[: round(share * len(whole))]
    (folder / "cut.jsonl").write_bytes(cut)
    complete = cut.count(b"\n") + cut.endswith(b"}")  # a line that lacks only its end is whole
    assert [e["message"] for e in events.read_all(folder / "cut.jsonl")] == messages[:complete]
    mixed = whole.splitlines(keepends=True)
    order.shuffle(mixed)
    (folder / "mixed.jsonl").write_bytes(b"".join(mixed) + garbage.replace(b"\n", b" "))
    assert sorted(events.read_all(folder / "mixed.jsonl"), key=lambda e: e["seq"]) == log_events(whole)
    assert events.read(folder / "mixed.jsonl") == log_events(whole)


def log_events(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in raw.splitlines()]


def test_subscribers_are_called_in_the_emitting_thread_and_dropped_when_they_fail() -> None:
    log = EventLog(None)
    seen: list[tuple[str, str]] = []
    stop = log.subscribe(lambda e: seen.append((e["kind"], threading.current_thread().name)))

    def fails(event: dict[str, Any]) -> None:
        raise RuntimeError("view is gone")

    log.subscribe(fails)
    thread = threading.Thread(target=lambda: log.emit("state", state="running"), name="drafter-0")
    thread.start()
    thread.join()
    log.emit("state", state="paused")
    stop()
    log.emit("state", state="stopped")
    assert seen == [("state", "drafter-0"), ("warning", "drafter-0"), ("state", "MainThread")]
    assert "view is gone" in log.events[1]["message"] and len(log.events) == 4


def test_a_signals_handler_may_emit_in_the_middle_of_an_emit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    write = events._write

    def interrupted(file: int, line: bytes) -> None:
        monkeypatch.setattr(events, "_write", write)
        log.emit("state", state="stopping")  # what the handler of a SIGTERM does, between two steps of the interpreter
        write(file, line)

    monkeypatch.setattr(events, "_write", interrupted)
    thread = threading.Thread(target=lambda: log.emit("state", state="running"), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the thread waits for itself"
    assert sorted((line["seq"], line["state"]) for line in lines(log.path)) == [(0, "running"), (1, "stopping")]


def test_misuse_is_an_error_not_a_lost_event(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(ValueError, match="'seq' is a base key"):
        log.emit("state", seq=3)
    with pytest.raises(ValueError, match="not a finite number"):
        log.emit("state", t=float("nan"))
    log.close()
    log.close()
    with pytest.raises(ValueError, match="is closed"):
        log.emit("state", state="stopped")
    assert (tmp_path / "events.jsonl").read_bytes() == b""


def test_reading_and_drawing_load_no_torch() -> None:
    code = (
        "import sys, dflash_lib\n"
        "from dflash_lib import events, timeline, timeline_picture, timeline_html, timeline_perfetto, torch_trace\n"
        "from dflash_lib import timeline_compare_picture\n"
        "assert not any(name.split('.')[0] in ('torch', 'pydantic') for name in sys.modules), 'loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
