"""The trainer: N threads equal one, neighbours change nothing, control, failure, resume."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jsonschema
import pytest
import torch
from safetensors.torch import load_file
from trainers import rows, tiny_config, tiny_target

from dflash_lib import checkpoint, events, fx_patch, prepare, runs, threads, timeline
from dflash_lib.config import ConfigError
from dflash_lib.threads import DrafterWorker, Trainer

fx_patch.install()
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """One core a worker (whatever the machine has), and pictures, which take seconds, only for tests that ask."""
    monkeypatch.setattr("dflash_lib.worker.intra_op_threads", lambda workers: 1)
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("dflash_lib.supervise.timeline.draw_all", lambda run_dir: [])
        monkeypatch.setattr("dflash_lib.supervise.summary.draw_losses", lambda run_dir: None)


@pytest.fixture
def pictures():
    """Asks for the pictures of a run."""


def train(run_dir, *, dtype=torch.float32, dataset=None, before=None, **changes):
    """A finished run on the tiny target; eager unless asked otherwise. Returns its trainer."""
    config = tiny_config(run_dir, **{"compile": False, **changes})
    trainer = Trainer(config, target=tiny_target(dtype), dataset=dataset or rows(), heldout=rows(2, seed=1))
    if before:
        before(trainer)
    trainer.start().join(120)
    assert trainer.state == "completed", trainer.state
    return trainer


def of_kind(run_dir, kind, thread=None):
    return [
        event
        for event in events.read(Path(run_dir) / "events.jsonl")
        if event["kind"] == kind and thread in (None, event["thread"])
    ]


def losses(run_dir, thread="drafter-0", field="loss_all"):
    return [event[field] for event in of_kind(run_dir, "step", thread)]


def masters(run_dir):
    """All weights of the last checkpoint, in full precision, as one tensor."""
    state = checkpoint.load_training(run_dir)["replica"]["masters"]
    return torch.cat([state[name].flatten() for name in sorted(state)])


def eventually(what, seconds=30.0):
    """Waits until ``what()`` is true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


# --- the same training, however many threads -------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_n_threads_of_b_rows_are_one_thread_of_n_times_b(tmp_path, dtype, tolerance):
    one = train(tmp_path / "one", dtype=dtype, devices=["cpu"], rows=6)
    three = train(tmp_path / "three", dtype=dtype, devices=["cpu"] * 3, rows=2)
    assert losses(three.run_dir) == pytest.approx(losses(one.run_dir), rel=tolerance)
    assert losses(three.run_dir)[0] != pytest.approx(losses(three.run_dir, field="loss")[0], rel=tolerance)
    torch.testing.assert_close(masters(three.run_dir), masters(one.run_dir), rtol=1e3 * tolerance, atol=tolerance)
    for step in range(1, 7):  # every thread reports the same step
        assert len({e["loss_all"] for e in of_kind(three.run_dir, "step") if e["step"] == step}) == 1


NODE = """
import sys; sys.path.insert(0, {tests!r})
from dflash_lib import fx_patch; fx_patch.install()
import torch; torch.set_num_threads(1)
from trainers import *
from dflash_lib.threads import Trainer
config = tiny_config({run_dir!r}, compile=False, devices=["cpu"], checkpoint_every=2)
Trainer(config, target=tiny_target(torch.float64), dataset=rows(), heldout=rows(2)).start().join()
"""


def test_two_processes_of_one_thread_are_two_threads_of_one_process(tmp_path):
    """Under torchrun: one folder, one checkpoint, the same steps; the nodes average through torch.distributed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    script = NODE.format(tests=str(Path(__file__).parent), run_dir=str(tmp_path / "nodes"))
    common = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": port, "WORLD_SIZE": "2"}
    nodes = [subprocess.Popen([sys.executable, "-c", script], env={**common, "RANK": rank}) for rank in "01"]
    together = train(tmp_path / "together", dtype=torch.float64)
    assert [node.wait(200) for node in nodes] == [0, 0]
    steps = of_kind(tmp_path / "nodes", "step")
    assert {(event["node"], event["step"]) for event in steps} == {(n, s) for n in (0, 1) for s in range(1, 7)}
    for node in (0, 1):
        found = [event["loss_all"] for event in steps if event["node"] == node]
        assert found == pytest.approx(losses(together.run_dir), rel=1e-11)
    torch.testing.assert_close(masters(tmp_path / "nodes"), masters(together.run_dir), rtol=1e-8, atol=1e-11)
    assert runs.read_status(tmp_path / "nodes")["state"] == "completed"
    assert not of_kind(tmp_path / "nodes", "alarm")


def test_accumulation_is_a_bigger_batch(tmp_path):
    whole = train(tmp_path / "whole", dtype=torch.float64, rows=4)
    parts = train(tmp_path / "parts", dtype=torch.float64, rows=2, accumulation=2)
    assert losses(parts.run_dir) == pytest.approx(losses(whole.run_dir), rel=1e-11)
    torch.testing.assert_close(masters(parts.run_dir), masters(whole.run_dir), rtol=1e-8, atol=1e-11)


def test_a_thread_beside_others_has_bit_for_bit_the_losses_it_has_alone(tmp_path):
    """Independent mode, compiled, lengths that change: the neighbours recompile at any moment."""
    choices = {"compile": True, "bucket_lengths": False, "fused_optimizer": False, "steps": 5, "rows": 1}
    beside = train(tmp_path / "beside", mode="independent", seed=5, **choices)
    for lane in range(2):
        alone = train(tmp_path / f"alone-{lane}", devices=["cpu"], seed=5 + lane, **choices)
        mine = losses(beside.run_dir, f"drafter-{lane}")
        assert mine == losses(alone.run_dir), f"drafter-{lane}"
        assert len(mine) == 5
    assert checkpoint.latest(beside.run_dir) and checkpoint.latest(beside.run_dir / "drafter-1")


def test_a_target_thread_changes_nothing(tmp_path):
    shared = train(tmp_path / "shared", objective="forward_kl")
    fed = train(tmp_path / "fed", objective="forward_kl", target_mode="dedicated", target_devices=["cpu"])
    assert losses(fed.run_dir) == losses(shared.run_dir)
    assert [e["state"] for e in of_kind(fed.run_dir, "state", "target-0")][-1] == "finished"


def test_an_evaluation_without_a_target_at_hand_is_said(tmp_path, monkeypatch):
    """A drafter's GPU may hold no target (target threads have their own): nothing is measured, and not in silence."""
    measure = DrafterWorker.evaluate

    def without(worker, replica):
        worker.trainer.ready.on_device.clear()
        measure(worker, replica)

    monkeypatch.setattr(DrafterWorker, "evaluate", without)
    train(tmp_path, evaluate_every=4)
    assert not of_kind(tmp_path, "evaluation")
    (said,) = [event for event in of_kind(tmp_path, "warning") if event.get("request") == "evaluate"]
    assert "no target on cpu" in said["message"] and said["step"] == 4


def test_a_backend_of_another_package_is_loaded_before_threads_ask_for_it(monkeypatch):
    """torch loads one of entry points at its first use, and fails where two threads use it first."""
    loaded = []

    class Point:
        def load(self):
            loaded.append(threading.current_thread())
            return lambda graph, inputs: graph.forward

    from torch._dynamo.backends import registry

    registry.list_backends(None)
    monkeypatch.setitem(registry._BACKENDS, "of_another_package", Point())
    prepare.check_backend("of_another_package")
    monkeypatch.delitem(registry._COMPILER_FNS, "of_another_package")
    assert loaded == [threading.main_thread()]


@pytest.mark.parametrize("mode", ["averaged", "independent"])
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path, mode):
    """Killed after step 6 with its last checkpoint at step 3: the folder goes on as attempt 2, bit for bit."""
    whole = train(tmp_path / "whole", mode=mode)
    part = train(tmp_path / "part", mode=mode, checkpoint_every=3)
    for folder in (part.run_dir, part.run_dir / "drafter-1"):  # as if the process had died before its last checkpoint
        shutil.rmtree(folder / "checkpoints" / "step-000006", ignore_errors=True)
    moments = load_file(checkpoint.latest(part.run_dir) / "training.safetensors")
    assert all(".exp_avg" in name for name in moments), "the masters are kept twice"
    config = tiny_config(tmp_path, compile=False, mode=mode, resume=str(part.run_dir))
    again = Trainer(
        config.model_copy(update={"run_dir": None}), target=tiny_target(), dataset=rows(), heldout=rows(2, seed=1)
    )
    assert again.run_dir == part.run_dir
    again.start().join(60)
    for lane in again.lanes:
        assert losses(again.run_dir, lane, "loss") == losses(whole.run_dir, lane, "loss")
    assert torch.equal(masters(again.run_dir), masters(whole.run_dir))
    attempts = {(e["step"], e["attempt"]) for e in of_kind(again.run_dir, "step")}
    assert attempts == {(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)}


def test_a_run_goes_on_with_another_number_of_threads(tmp_path):
    whole = train(tmp_path / "whole", dtype=torch.float64, devices=["cpu"] * 2, rows=3)
    train(tmp_path / "part", dtype=torch.float64, devices=["cpu"] * 2, rows=3, steps=6, checkpoint_every=3)
    middle = tmp_path / "part" / "checkpoints" / "step-000003"
    again = train(tmp_path / "again", dtype=torch.float64, devices=["cpu"] * 3, rows=2, resume=str(middle))
    assert losses(again.run_dir) == pytest.approx(losses(whole.run_dir)[3:], rel=1e-10)
    torch.testing.assert_close(masters(again.run_dir), masters(whole.run_dir), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("change", [{"drafter_layers": 2}, {"target_layers": [0, 2, 4]}, {"target_features": 2}])
def test_a_resume_that_would_make_another_drafter_is_refused(tmp_path, change):
    done = train(tmp_path, steps=1)
    config = tiny_config(tmp_path, steps=2, resume=str(tmp_path), **{"target_features": 3, **change})
    with pytest.raises(ConfigError, match=f"^{next(iter(change))}: .* a resume keeps them"):
        Trainer(config)
    assert runs.run_state(done.run_dir) == "completed"


def test_nothing_is_left_to_resume(tmp_path):
    done = train(tmp_path / "done", steps=2)
    with pytest.raises(ConfigError, match="at step 2 already"):
        train(tmp_path / "more", steps=2, resume=str(done.run_dir))
    before = (done.run_dir / "config.json").read_text()
    with pytest.raises(ConfigError, match="at step 2 already"):
        train(done.run_dir, steps=2, resume=str(done.run_dir))
    assert runs.run_state(done.run_dir) == "completed"  # the run stays what it was
    assert (done.run_dir / "config.json").read_text() == before
    assert not (tmp_path / "more").exists()


# --- compiles --------------------------------------------------------------------------------------------------------
def test_a_compile_belongs_to_the_thread_it_happened_in(tmp_path):
    """Lengths that change recompile; each event has the lane of the thread, its own entry point, and the reason."""
    trainer = train(tmp_path, compile=True, backend="eager", bucket_lengths=False, rows=1, steps=4)
    compiles = of_kind(trainer.run_dir, "compile")
    for lane in trainer.lanes:
        own = [event for event in compiles if event["thread"] == lane]
        (frame,) = {event["frame"] for event in own}
        assert frame.startswith(f"sdpa_attention_{lane.replace('-', '_')}")
        assert own[0]["cls"] == "first"
        again = [event for event in own if event["cls"] == "recompile"]
        assert again and "size mismatch" in again[0]["reason"], own
        assert {event["planned"] for event in own} == {None}
        lengths = [event["bucket"] for event in of_kind(tmp_path, "step", lane)]
        assert again[0]["step"] == 1 + next(at for at, length in enumerate(lengths) if length != lengths[0])
    assert not [event for event in compiles if event["cls"] in ("eager_fallback", "race_duplicate", "failed")]


def test_nothing_recompiles_after_each_buckets_first_step(tmp_path):
    dataset = rows(40, shortest=100, longest=250, seed=3)
    trainer = train(tmp_path, compile=True, backend="eager", rows=1, steps=16, dataset=dataset, buckets=[128, 256])
    seen: dict[str, set[int]] = {lane: set() for lane in trainer.lanes}
    first = {}
    for event in of_kind(tmp_path, "step"):
        if event["bucket"] not in seen[event["thread"]]:
            seen[event["thread"]].add(event["bucket"])
            first[event["thread"], event["step"]] = event["bucket"]
    assert set.union(*seen.values()) == {128, 256}
    for event in of_kind(tmp_path, "compile"):
        assert (event["thread"], event["step"]) in first, event
        assert event["planned"] == f"length {first[event['thread'], event['step']]}"
    assert timeline.fail_after_step(tmp_path, 0) == []  # what was planned is no waste, and no failure in a CI
    assert not of_kind(tmp_path, "alarm")


def test_settings_are_those_of_the_run_while_it_runs_and_the_callers_own_afterwards(tmp_path, monkeypatch):
    found = []
    make = DrafterWorker.make_replica

    def look(worker):
        found.append((torch._dynamo.config.recompile_limit, torch.get_num_threads(), threading.current_thread().name))
        return make(worker)

    monkeypatch.setattr(DrafterWorker, "make_replica", look)
    limit, intra_op = torch._dynamo.config.recompile_limit, torch.get_num_threads()
    train(tmp_path, steps=1, buckets=[128, 256, 384, 512, 640])
    wanted = max(limit, 12)
    assert sorted(found) == [(wanted, max(1, os.cpu_count() // 2), f"drafter-{lane}") for lane in range(2)]
    assert (torch._dynamo.config.recompile_limit, torch.get_num_threads()) == (limit, intra_op)


def test_the_training_path_has_no_lock_and_no_warm_up():
    for name in ("threads", "replica", "worker", "features", "drafter", "layer", "loss"):
        source = (ROOT / "dflash_lib" / f"{name}.py").read_text()
        code = re.sub(r'""".*?"""|#.*', "", source, flags=re.DOTALL)
        assert not re.search(r"\bR?Lock\(|\bSemaphore|warm_?up\(|warmup_lock|exec_lock", code), name


# --- control ---------------------------------------------------------------------------------------------------------
class Gate:
    """Holds every worker at its forward until told otherwise, so that a test can act in mid-step."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        self.waiting = threading.Semaphore(0)
        learn = DrafterWorker.learn_from

        def held(worker, batch, replica):
            if not self.open.is_set():
                self.waiting.release()
                self.open.wait(30)
            learn(worker, batch, replica)

        monkeypatch.setattr(DrafterWorker, "learn_from", held)

    def somebody_waits(self, count=2):
        for _ in range(count):
            assert self.waiting.acquire(timeout=30)


def started(run_dir, **changes):
    config = tiny_config(run_dir, **{"compile": False, "steps": 500, "checkpoint_every": 0, **changes})
    trainer = Trainer(config, target=tiny_target(), dataset=rows(), heldout=rows(2, seed=1))
    return trainer, trainer.start()


def test_stop_is_acknowledged_at_once_and_taken_at_the_next_boundary(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    trainer, run = started(tmp_path)
    gate.somebody_waits()
    trainer.stop()
    acknowledged = [e for e in of_kind(tmp_path, "state") if e.get("request") == "stop"]
    assert [(e["thread"], e["state"]) for e in acknowledged] == [(lane, "stopping") for lane in trainer.lanes]
    assert all("next step boundary" in e["detail"] for e in acknowledged)
    gate.open.set()
    assert run.join(30)
    assert run.state == "stopped"
    assert [e["step"] for e in of_kind(tmp_path, "step", "drafter-0")] == [1]
    assert checkpoint.latest(tmp_path).name == "step-000001"
    status = runs.read_status(tmp_path)
    assert (status["state"], status["step"], status["error"]) == ("stopped", 1, None)


def test_a_compile_that_a_stop_waits_for_is_named(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    trainer, run = started(tmp_path)
    gate.somebody_waits()
    flight = [{"thread": "drafter-1", "frame": "layer_forward_drafter_1", "seconds": 12.0}]
    monkeypatch.setattr(trainer.monitor, "in_flight", lambda: flight)
    trainer.stop()
    gate.open.set()
    run.join(30)
    details = {e["thread"]: e["detail"] for e in of_kind(tmp_path, "state") if e.get("request") == "stop"}
    assert "layer_forward_drafter_1" in details["drafter-1"] and "compile" in details["drafter-1"]
    assert "compile" not in details["drafter-0"]


def test_a_stop_becomes_hard_after_its_timeout(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    trainer, run = started(tmp_path, stop_timeout=0.5)
    gate.somebody_waits()
    began = time.monotonic()
    trainer.stop()
    assert run.join(20)
    assert 0.4 < time.monotonic() - began < 15
    assert runs.read_status(tmp_path)["state"] == "stopped"
    assert any("without drafter-0, drafter-1" in e["message"] for e in of_kind(tmp_path, "warning"))
    gate.open.set()  # lets the threads go


def test_pause_holds_resume_goes_on_checkpoint_and_stop_work_meanwhile(tmp_path):
    trainer, run = started(tmp_path)
    eventually(lambda: len(of_kind(tmp_path, "step", "drafter-0")) >= 2)
    trainer.pause()
    eventually(lambda: [w.reporter.state for w in trainer.workers] == ["paused", "paused"])
    time.sleep(0.2)
    at = [w.reporter.step for w in trainer.workers]
    assert at[0] == at[1]
    trainer.checkpoint()
    eventually(lambda: of_kind(tmp_path, "checkpoint"))
    assert of_kind(tmp_path, "checkpoint")[0]["step"] == at[0]
    assert checkpoint.latest(tmp_path).name == f"step-{at[0]:06d}"
    assert [w.reporter.step for w in trainer.workers] == at
    trainer.resume()
    eventually(lambda: trainer.workers[0].reporter.step > at[0] + 2)
    trainer.pause()
    eventually(lambda: trainer.workers[0].reporter.state == "paused")
    trainer.stop()
    assert run.join(20)
    assert run.state == "stopped"


def test_evaluation_at_a_boundary_is_an_event_and_changes_nothing(tmp_path):
    plain = train(tmp_path / "plain", steps=4)
    config = {"evaluate_every": 2, "evaluate_prompts": 2, "evaluate_tokens": 6}
    watched = train(tmp_path / "watched", steps=4, **config)
    (found,) = of_kind(watched.run_dir, "evaluation")
    jsonschema.validate(found, json.loads((ROOT / "tests" / "schemas" / "event.schema.json").read_text()))
    assert (found["step"], found["thread"]) == (2, "drafter-0")
    (group,) = found["sets"]
    assert group["name"] == "heldout" and group["prompts"] == 2 and 1.0 <= group["tau_mean"] <= 4.0
    assert losses(watched.run_dir) == losses(plain.run_dir)


def test_the_first_interrupt_stops_and_is_raised(tmp_path):
    trainer, run = started(tmp_path)

    async def cell():
        waiting = asyncio.ensure_future(run.wait())
        await asyncio.to_thread(eventually, lambda: of_kind(tmp_path, "step"))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(cell())
    assert trainer.state == "stopped"
    assert checkpoint.latest(tmp_path) is not None


def test_the_second_interrupt_aborts(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    _, run = started(tmp_path)
    gate.somebody_waits()

    async def cell():
        waiting = asyncio.ensure_future(run.wait())
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.sleep(0.1)
        assert not waiting.done()  # the first one waits for a boundary
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(asyncio.wait_for(cell(), 20))
    gate.open.set()
    assert run.join(20)
    assert runs.read_status(tmp_path)["state"] == "stopped"
    assert checkpoint.latest(tmp_path) is None


SCRIPT = """
import signal, sys; sys.path.insert(0, {tests!r})
from dflash_lib import __main__ as shell, fx_patch; fx_patch.install()
if {from_shell}: signal.signal(signal.SIGTERM, shell._terminate)
from trainers import *
from dflash_lib.threads import Trainer
config = tiny_config({run_dir!r}, compile=False, steps=100000)
Trainer(config, target=tiny_target(), dataset=rows(), heldout=rows(2)).start().join()
"""


@pytest.mark.parametrize("from_shell", [False, True])
def test_a_termination_stops_the_run_in_good_order(tmp_path, from_shell):
    """Sent twice, as ``timeout`` does: to the process, then to its group."""
    script = SCRIPT.format(tests=str(Path(__file__).parent), run_dir=str(tmp_path), from_shell=from_shell)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: (tmp_path / "events.jsonl").exists() and of_kind(tmp_path, "step"), 120)
        process.terminate()
        time.sleep(0.003)
        process.terminate()
        assert process.wait(60) == 143
    finally:
        process.kill()
    assert runs.read_status(tmp_path)["state"] == "stopped"
    assert checkpoint.latest(tmp_path) is not None


@pytest.mark.parametrize("to", ["process", "other thread"])
def test_ctrl_c_in_join_stops_and_is_raised(tmp_path, to):
    _, run = started(tmp_path)

    def press():
        eventually(lambda: of_kind(tmp_path, "step"))
        if to == "process":
            os.kill(os.getpid(), signal.SIGINT)
        else:  # the main thread sleeps on
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run.join()
    assert runs.read_status(tmp_path)["state"] == "stopped"
    assert checkpoint.latest(tmp_path) is not None


def test_an_interrupt_while_loading_is_a_stop_and_no_failure(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_lib.threads.prepare.load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Trainer(tiny_config(tmp_path)).start()
    status = runs.read_status(tmp_path)
    assert (status["state"], status["error"]) == ("stopped", None)


# --- failure ---------------------------------------------------------------------------------------------------------
def failing(monkeypatch, lane="drafter-1", step=4):
    learn = DrafterWorker.learn_from

    def fail(worker, batch, replica):
        if worker.lane == lane and replica.step == step - 1:
            raise ZeroDivisionError("in the fourth step")
        learn(worker, batch, replica)

    monkeypatch.setattr(DrafterWorker, "learn_from", fail)


@pytest.mark.parametrize("wait", ["join", "wait"])
def test_a_workers_error_ends_the_others_and_is_raised(tmp_path, monkeypatch, wait, pictures):
    failing(monkeypatch)
    trainer, run = started(tmp_path, checkpoint_every=2)
    with pytest.raises(ZeroDivisionError) as raised:
        run.join(60) if wait == "join" else asyncio.run(run.wait())
    assert any("drafter-1" in note for note in raised.value.__notes__)
    assert any(entry.name == "fail" for entry in raised.traceback)  # the worker's own frames
    status = runs.read_status(tmp_path)
    assert (status["state"], status["step"]) == ("failed", 3)
    assert (status["error"]["thread"], status["error"]["type"]) == ("drafter-1", "ZeroDivisionError")
    assert "in the fourth step" in status["error"]["traceback"]
    (event,) = of_kind(tmp_path, "worker_failed")
    assert (event["thread"], event["device"], event["type"]) == ("drafter-1", "cpu", "ZeroDivisionError")
    last = {lane: of_kind(tmp_path, "state", lane)[-1]["state"] for lane in trainer.lanes}
    assert last == {"drafter-0": "stopped", "drafter-1": "failed"}
    assert checkpoint.latest(tmp_path).name == "step-000002"
    assert checkpoint.load_training(tmp_path)["step"] == 2
    assert (tmp_path / "timeline.png").exists() and (tmp_path / "loss.png").exists()


def test_an_error_in_a_target_thread_ends_the_run_too(tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError("no room for features")

    monkeypatch.setattr("dflash_lib.features.run_target", fail)
    _, run = started(tmp_path, target_mode="dedicated", target_devices=["cpu"])
    with pytest.raises(MemoryError):
        run.join(30)
    assert runs.read_status(tmp_path)["error"]["thread"] == "target-0"


@pytest.mark.parametrize("what", ["events", "everything"])
def test_a_full_disk_is_a_failure_and_nobody_waits_for_ever(tmp_path, monkeypatch, what):
    full = threading.Event()

    def write(*given):
        if full.is_set():
            raise OSError(28, "No space left on device")
        return given and write_line(*given)

    write_line, write_status = events._write, runs.write_status
    monkeypatch.setattr("dflash_lib.events._write", write)
    monkeypatch.setattr("dflash_lib.supervise.STATUS_EVERY", 0.0)
    if what == "everything":
        monkeypatch.setattr("dflash_lib.supervise.runs.write_status", lambda *a, **k: write() or write_status(*a, **k))
    _, run = started(tmp_path, steps=100_000)
    eventually(lambda: of_kind(tmp_path, "step"))
    full.set()
    with pytest.raises(OSError, match="No space left"):
        assert run.join(30)
    assert run.state == "failed"
    assert runs.read_status(tmp_path)["state"] == ("failed" if what == "events" else "running")


def test_replicas_that_drift_apart_raise_an_alarm(tmp_path, monkeypatch):
    learn = DrafterWorker.learn_from

    def damage(worker, batch, replica):
        if worker.lane == "drafter-1" and replica.step == 2:
            with torch.no_grad():
                replica.masters[5] += 1e-3
        learn(worker, batch, replica)

    monkeypatch.setattr(DrafterWorker, "learn_from", damage)
    train(tmp_path, devices=["cpu"] * 3, drift_every=2)
    alarms = of_kind(tmp_path, "alarm")
    assert [event["step"] for event in alarms] == [4, 6]
    assert all(event["alarm"] == "drift" and "drafter-1" in event["message"] for event in alarms)


def test_rows_without_an_answer_are_loss_zero_and_a_warning(tmp_path):
    dataset = rows(4)
    for row in dataset.rows:
        row.mask[:] = False
    train(tmp_path, steps=2, dataset=dataset)
    assert losses(tmp_path) == [0.0, 0.0]
    assert any("no position" in event["message"] for event in of_kind(tmp_path, "warning"))


def test_a_backend_that_torch_does_not_know_is_refused_before_there_is_a_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"backend: .* no 'inducter'; use inductor, aot_eager"):
        Trainer(tiny_config(tmp_path / "runs", compile=True, backend="inducter"))
    assert not (tmp_path / "runs").exists()


def test_devices_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cuda:63 does not exist"):
        Trainer(tiny_config(tmp_path, devices=["cuda:63"]))
    with pytest.raises(ConfigError, match="mixes"):
        threads.prepare.check_devices("devices", ["cpu", "cuda:0"], count=1)


def test_a_trainer_starts_once(tmp_path):
    trainer = train(tmp_path, steps=1)
    with pytest.raises(RuntimeError, match="another Trainer"):
        trainer.start()


# --- what it leaves --------------------------------------------------------------------------------------------------
def test_a_run_folder_is_whole(tmp_path, pictures):
    trainer = train(tmp_path, steps=3, checkpoint_every=1, keep_checkpoints=2)
    names = {path.name for path in tmp_path.iterdir()}
    expected = "config.json environment.json status.json events.jsonl checkpoints timeline.png timeline.svg loss.png"
    assert set(expected.split()) <= names
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "completed"
    for event in of_kind(tmp_path, "step"):
        assert {"loss", "tokens", "rows", "seconds", "lr", "grad_norm", "bucket"} <= event.keys()
    kinds = [event["kind"] for event in events.read_all(tmp_path / "events.jsonl")]
    assert (kinds[0], kinds.count("run_finished")) == ("run_started", 1)
    assert not list(tmp_path.glob("**/*.tmp"))
    with pytest.raises(ValueError, match="is closed"):  # flushed to the disk, and its file given back
        trainer.log.emit("state", state="running")


# --- on the real target ----------------------------------------------------------------------------------------------
def test_losses_fall_on_the_real_target(tmp_path, smollm2):
    """SmolLM2, two threads, ten steps on a few answers: what it has seen again and again it learns."""
    answers = {
        "What is the capital of France?": "The capital of France is Paris. It lies on the river Seine.",
        "Name three colours.": "Three colours are red, green and blue. Many more can be mixed from them.",
        "How do I boil an egg?": "Put the egg in boiling water. Wait eight minutes, then cool and peel it.",
        "Why is the sky blue?": "Air scatters blue light more than red light, so the sky looks blue during the day.",
    }
    lines = [
        json.dumps({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]})
        for asked, answer in answers.items()
    ]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines) + "\n")
    config = tiny_config(
        tmp_path / "run",
        train_data=[str(tmp_path / "answers.jsonl")],
        heldout_data=[str(tmp_path / "answers.jsonl")],
        steps=10,
        anchors=8,
        rows=1,
        bucket_lengths=False,
        target_dtype="float32",
        compile=False,
        warmup=0.0,
    )
    trainer = Trainer(config, target=smollm2)
    trainer.start().join(300)
    found = losses(trainer.run_dir)
    assert len(found) == 10
    assert sum(found[-2:]) / 2 < 0.6 * found[0], found
