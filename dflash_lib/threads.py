"""The trainer: one thread per device, a plain loop in each, and control over all of them from outside.

One row's whole life is in :meth:`DrafterWorker.work` and :meth:`DrafterWorker.learn_from`. No lock stands around a
compiled call, a forward or a backward, and there is no warm-up: fx_patch isolates what torch.compile shares.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from . import checkpoint, collective, data, evaluate, events, fx_patch, prepare, run_folder
from .blocks import block_mask, context_positions, draw_anchors, make_blocks, visible_dense
from .collective import Channel, Team
from .compile_monitor import CompileMonitor
from .config import ConfigError, RunConfig
from .control import Control, Request, Wishes
from .drafter import Drafter
from .events import EventLog
from .features import AHEAD, Fed, TargetWorker
from .memory import gpu_gib
from .replica import Replica, entry_points
from .summary import summary
from .supervise import Run
from .target import Target
from .worker import Worker

__all__ = ["DrafterWorker", "Run", "TargetWorker", "Trainer", "summary"]


_numbers = itertools.count(1)


class DrafterWorker(Worker):
    """One drafter thread: its lane, its device, its replica, its share of every step's rows."""

    def __init__(self, trainer: Trainer, index: int, team: Team, rank: int, seed: int, stream: data.RowStream) -> None:
        lane, device, ready = trainer.lanes[index], trainer.devices[index], trainer.ready
        super().__init__(trainer, lane, device, trainer.lanes if team.size > 1 else [lane])
        self.control, self.team, self.rank, self.seed = trainer.control, team, rank, seed
        self.folder = trainer.run_dir if rank == index else trainer.run_dir / lane
        self.stream, self.place = stream, team.node * team.size + rank
        self.resumed = ready.resumed[index] if ready.resumed else None
        self.ends = ready.ends[device]
        self.channel = Channel(AHEAD)
        self.source = ready.source(self.config, device) or Fed(self.channel, lane, self.wait_for_target)
        self.saved = -1  # step of the last checkpoint

    # --- the loop -------------------------------------------------------------------------------------------------
    def work(self) -> None:
        """Trains until the last step, or until somebody asks it to stop."""
        replica, wishes = self.make_replica(), Wishes()
        while replica.step < self.config.steps:
            wishes = self.at_boundary(replica, wishes)
            if wishes.stop:
                break
            began = time.monotonic()
            events.mark_step(replica.step + 1)
            batches = self.batches(replica.step)
            for batch in batches:
                self.learn_from(batch, replica)
            self.team.sum_(self.rank, replica.sums, self.reporter.waiting)
            figures = replica.update()
            self.reporter.stepped(
                replica.step,
                figures,
                began,
                tokens=sum(batch.tokens for batch in batches),
                rows=sum(row_id >= 0 for batch in batches for row_id in batch.row_ids),
                lr=replica.lr,
                bucket=max(batch.bucket for batch in batches),
                memory_gib=gpu_gib(self.device),
            )
            self.watch_for_drift(replica)
        self.finish(replica, stopped=wishes.stop)

    def batches(self, step: int) -> list[data.RowBatch]:
        """This thread's share of a step (from 0), one batch a forward: a function of the seed and the step alone."""
        return self.stream.batches(step, self.place)

    def learn_from(self, batch: data.RowBatch, replica: Replica) -> None:
        """One batch, from token ids to gradients: features, anchors, blocks, mask, drafter, loss, backward."""
        config, ends, documents = self.config, self.ends, batch.document_ids
        seen = self.source.features(batch)
        anchors, keep = draw_anchors(
            batch.response_mask,
            config.anchors,
            seed=self.seed,
            epoch=batch.epoch,
            row_ids=batch.row_ids,
            document_ids=documents,
            per_document=config.anchors_per_document,
            fixed=config.anchor_sampling == "fixed",
        )
        blocks = make_blocks(
            batch.input_ids,
            batch.response_mask,
            anchors,
            keep,
            block_size=config.block_size,
            gamma=None if config.objective == "dpace" else config.decay,
            mask_token_id=ends.mask_token_id,
            document_ids=documents,
            row_lengths=batch.row_lengths,
        ).to(self.device)
        rows, length = batch.input_ids.shape
        on_device = None if documents is None else documents.to(self.device)
        form = block_mask if self.device.type == "cuda" else visible_dense
        replica.accumulate(
            seen.features,
            ends.embed(blocks.inputs),
            context_positions(on_device, length, rows, self.device),
            blocks,
            form(blocks.anchors, blocks.keep, length, config.block_size, on_device, config.sliding_window),
            ends.head,
            None if seen.last_hidden is None else blocks.predicting(seen.last_hidden),
        )

    # --- its beginning and its end --------------------------------------------------------------------------------
    def make_replica(self) -> Replica:
        """Drafter, optimizer and entry points of this thread alone; first weights are a function of the seed."""
        ready = self.trainer.ready
        mask = self.ends.embed(torch.tensor(self.ends.mask_token_id, device=self.device))
        drafter = Drafter(ready.drafter, seed=self.seed, mask_embedding=mask.float().cpu())
        if ready.warm is not None:
            drafter.load_state_dict(ready.warm, strict=False)
        name = self.lane if self.trainer.number == 1 else f"{self.lane}_run_{self.trainer.number}"
        compiled = entry_points(self.config, self.device, name, self.trainer.monitor.watch)
        replica = Replica(drafter, self.config, self.device, **compiled)
        if self.resumed is not None:
            replica.load_state(self.resumed["replica"])
            self.reporter.step = replica.step
        self.reporter.show("running")
        return replica

    def finish(self, replica: Replica, *, stopped: bool) -> None:
        self.reporter.flush()
        if self.rank == 0 and replica.step > 0:
            self.save(replica)
        self.reporter.show("stopped" if stopped else "finished")

    def leave(self) -> None:
        self.channel.close()

    def wait_for_target(self) -> None:
        self.reporter.show("waiting_others", "for features of a target thread")

    # --- step boundaries ------------------------------------------------------------------------------------------
    def at_boundary(self, replica: Replica, seen: Wishes) -> Wishes:
        """Between two steps: the team agrees on what is asked for; its first thread saves and evaluates."""
        config, step = self.config, replica.step
        save = bool(config.checkpoint_every) and step > 0 and step % config.checkpoint_every == 0
        look = bool(config.evaluate_every) and step > 0 and step % config.evaluate_every == 0
        while True:
            wishes = self.team.meet(self.rank, self.agreed_wishes, self.reporter.waiting)
            if self.rank == 0 and (save or wishes.checkpoints > seen.checkpoints):
                self.save(replica)
            if self.rank == 0 and (look or wishes.evaluations > seen.evaluations):
                self.evaluate(replica)
            if wishes.stop or not wishes.paused:
                self.reporter.show("running" if not wishes.stop else "stopping")
                return wishes
            save = look = False
            seen = wishes
            self.reporter.show("paused")
            self.control.wait_for_change(wishes, timeout=0.2 if self.team.nodes > 1 else 60.0)

    def agreed_wishes(self) -> Wishes:
        return Wishes.of(self.team.agree(self.control.wishes.numbers()))

    def save(self, replica: Replica) -> None:
        """A whole checkpoint, or none. The other threads go on meanwhile, until they need this one's gradients."""
        self.reporter.flush()
        if self.team.node > 0:
            return
        path = self.folder / "checkpoints" / f"step-{replica.step:06d}"
        if self.saved != replica.step:
            state = {"replica": replica.state(), "rows": self.stream.state(replica.step)}
            name = self.trainer.ready.target.name
            checkpoint.save(replica.drafter, path, step=replica.step, extra_state=state, target=name)
            checkpoint.prune(self.folder, self.config.keep_checkpoints)
            self.saved = replica.step
        self.log.emit("checkpoint", step=replica.step, path=str(path.relative_to(self.trainer.run_dir)))

    def evaluate(self, replica: Replica) -> None:
        """Real speculative decoding on held-out prompts, in this thread, with the weights as they are now."""
        self.reporter.flush()
        if self.team.node > 0:
            return
        target = self.trainer.ready.on_device.get(self.device)
        if target is None:
            message = f"no target on {self.device} to decode with; `python -m dflash_lib evaluate` decodes afterwards"
            self.log.emit("warning", step=replica.step, request="evaluate", message=message)
            return
        self.reporter.show("running", "evaluating")
        found = evaluate.evaluate(
            target,
            replica.drafter,
            {"heldout": self.trainer.ready.prompts},
            temperature=self.config.temperature,
            max_new_tokens=self.config.evaluate_tokens,
            graphs=False,  # nothing is captured while other threads launch
            step=replica.step,
        )
        names = ("name", "prompts", "tau_mean", "tau_pooled", "ci95", "speedup")
        sets = [{name: group[name] for name in names} for group in found["sets"]]
        self.log.emit("evaluation", step=replica.step, sets=sets)

    def watch_for_drift(self, replica: Replica) -> None:
        """Replicas must stay equal bit for bit; one that does not is an alarm."""
        every = self.config.drift_every
        if self.team.size * self.team.nodes == 1 or not every or replica.step % every:
            return
        strays = self.team.strays(self.rank, replica.fingerprint(), self.reporter.waiting)
        if strays and self.rank == 0:
            names = ", ".join(self.reporter.lanes[rank] for rank in strays)
            message = f"after step {replica.step} the weights of {names} differ from the others'"
            self.log.emit("alarm", step=replica.step, alarm="drift", message=message)


class Trainer:
    """Trains a drafter for a target with one thread per device.

    ::

        trainer = Trainer(RunConfig(steps=60))
        run = trainer.start()
        await run.wait()          # in a notebook; run.join() elsewhere

    Args:
        config: every choice of the run.
        target: a target that is loaded already; None: ``config.target``.
        dataset, heldout: rows that are made already; None: ``config.train_data``, ``config.heldout_data``.

    Attributes:
        run_dir: the run's folder. log: its events. lanes: names of its drafter threads. config: as given.
        state: "new", "running", "completed", "failed" or "stopped".

    Raises:
        ConfigError: a device or a backend that is not there, or a run folder that cannot be used.
        CheckpointError: nothing to resume.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        target: Target | None = None,
        dataset: data.Dataset | None = None,
        heldout: data.Dataset | None = None,
    ) -> None:
        self.config = config
        self.node, self.nodes = collective.join_nodes()
        self.number = next(_numbers)  # of this process's trainers: a second run must not inherit compile state
        self.devices = prepare.devices(config)
        self.target_devices = prepare.target_devices(config)
        self.all_devices = [*self.devices, *self.target_devices]
        self.lanes = [f"drafter-{index}" for index in range(len(self.devices))]
        if self.nodes > 1 and config.mode == "independent":
            raise ConfigError("mode: 'independent' trains in one process; start it without torchrun")
        if config.compile:
            prepare.check_backend(config.backend)
        self._states = prepare.resumed(config, len(self.devices), target)
        self.run_dir = prepare.shared_run_dir(config, self.number)
        log = self.run_dir / "events.jsonl"
        self.log = EventLog(log, attempt=events.next_attempt(log), node=self.node)
        self.monitor = CompileMonitor(self.log)
        self.control = Control()
        self.teams: list[Team] = []
        self.workers, self.feeders = list[DrafterWorker](), list[TargetWorker]()
        self.run: Run | None = None
        self.at_finish: list[Callable[[], Any]] = []
        self._given = (target, dataset, heldout)

    def on_finish(self, callback: Callable[[], Any]) -> None:
        """Has ``callback()`` called when the run has ended, before whoever waits for it goes on."""
        self.at_finish.append(callback)

    @property
    def state(self) -> str:
        return self.run.state if self.run else "new"

    def start(self, *, progress: bool = False) -> Run:
        """Loads what the threads share, starts them, and returns at once.

        Args:
            progress: a bar on the terminal.

        Raises:
            ConfigError, TargetError, DataError, CheckpointError: one line; the run folder's status says "failed".
            RuntimeError: it was started before.
        """
        if self.run is not None:
            raise RuntimeError("this trainer was started before; make another Trainer for another run")
        fx_patch.install()
        self.run = Run(self, progress=progress)
        with self.run.failing_early():
            self.ready = prepare.load(self.config, self.devices, self.target_devices, *self._given, states=self._states)
            self.teams = self._make_teams()
            self.workers = [DrafterWorker(self, *place) for place in self._places()]
            self.feeders = [
                TargetWorker(self, index, device, self.workers[index :: len(self.target_devices)])
                for index, device in enumerate(self.target_devices)
            ]
            shapes = len(self.ready.buckets) if self.config.bucket_lengths else None
            self.run.launch([*self.workers, *self.feeders], shapes)
        return self.run

    def _make_teams(self) -> list[Team]:
        if self.config.mode == "averaged":
            return [Team(self.devices)]
        return [Team([device], across_nodes=False) for device in self.devices]

    def _places(self) -> Iterator[tuple[int, Team, int, int, data.RowStream]]:
        """(lane, its team, its rank there, seed, rows): independent lane k is the run that seed + k has alone."""
        seed, stream = self.config.seed, None
        for index in range(len(self.devices)):
            if self.config.mode == "averaged":
                team, rank = self.teams[0], index
                stream = stream or self.ready.stream(self.config, team, 0, seed)
            else:
                team, rank, seed = self.teams[index], 0, self.config.seed + index
                stream = self.ready.stream(self.config, team, index, seed)
            yield index, team, rank, seed, stream

    # --- control --------------------------------------------------------------------------------------------------
    def pause(self) -> None:
        """Halts every thread at its next step boundary."""
        self._ask("pause")

    def resume(self) -> None:
        """Goes on after a pause."""
        self._ask("resume")

    def checkpoint(self) -> None:
        """Saves a checkpoint at the next step boundary."""
        self._ask("checkpoint")

    def evaluate(self) -> None:
        """Measures acceptance on held-out prompts at the next step boundary; an ``evaluation`` event has the result."""
        self._ask("evaluate")

    def stop(self) -> None:
        """Ends the run at the next step boundary, with a checkpoint; after ``stop_timeout`` seconds, hard."""
        self._ask("stop")
        if self.run is not None:
            self.run.stop_by(time.monotonic() + self.config.stop_timeout)

    def abort(self) -> None:
        """Ends the run now: threads that wait are let go, one that computes is no longer waited for."""
        self._let_go()
        if self.run is not None:
            self.run.stop_by(time.monotonic())

    def _let_go(self) -> None:
        self.control.ask("stop")
        for team in self.teams:
            team.abort()
        for worker in self.workers:
            worker.channel.close()

    def _ask(self, request: Request) -> None:
        """Writes the request down and acknowledges it in every lane at once, naming a compile that it waits for."""
        if self.state != "running":
            return
        self.control.ask(request)
        compiles = {flight["thread"]: flight for flight in self.monitor.in_flight()}
        for worker in self.workers:
            flight = compiles.get(worker.lane)
            when = "at the next step boundary"
            if flight:
                when = f"after the compile of {flight['frame']} ({flight['seconds']:.0f} s so far)"
            state = {"stop": "stopping", "resume": "running"}.get(request, worker.reporter.state)
            self.log.emit(
                "state",
                thread=worker.lane,
                device=str(worker.device),
                state=state,
                request=request,
                detail=f"{request} {when}",
            )

    def failed(self, lane: str, device: torch.device, error: BaseException) -> None:
        """A worker's error: keeps the first one, and ends the others."""
        if self.run is not None and self.run.record_failure(lane, error):
            what: dict[str, Any] = run_folder.error_record(error, lane)
            with suppress(OSError):  # a full disk
                self.log.emit("worker_failed", device=str(device), **what)
        self._let_go()
        if self.run is not None:
            self.run.stop_by(time.monotonic() + self.config.stop_timeout)
