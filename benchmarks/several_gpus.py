"""Several GPUs of one host, one thread a GPU, one process: correctness, scaling, memory, lanes.

    python benchmarks/several_gpus.py --out results.json                  # everything that is there; under 10 minutes
    python benchmarks/several_gpus.py --device cpu --tiny --out r.json    # the same script on two CPU workers

Parts, each in a process of its own with a watchdog, so that a hang is a result:

storm      drafter threads with lengths that never repeat for long and no compile caches: recompiles at any moment
equal      N threads with B rows take the same steps as one thread with N*B rows
scaling    tokens per second of 1, 2, 4, ... threads and of as many processes (DistributedDataParallel), same shapes
dedicated  a target on a device of its own feeds the drafter threads
lab        every strategy of the race laboratory, lanes spread over the GPUs
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from dflash_lib import fx_patch

fx_patch.install()

import synthetic  # noqa: E402

from dflash_lib import events  # noqa: E402
from dflash_lib.config import RunConfig  # noqa: E402
from dflash_lib.threads import Trainer  # noqa: E402

BEGAN = time.monotonic()
WARM_UP = 8  # steps not counted


def gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def patience(options: argparse.Namespace) -> int:
    """Limits are those of a GPU; CPU cores may be shared with anything."""
    return 1 if options.device == "cuda" else 4


def devices(options: argparse.Namespace, count: int) -> list[str]:
    """``count`` lanes over what is there."""
    return [f"cuda:{i % gpus()}" for i in range(count)] if options.device == "cuda" else ["cpu"] * count


def train(options: argparse.Namespace, sizes: str, lanes: list[str], **changes: Any) -> dict[str, Any]:
    """One run of the trainer on a random target; what its events say of it."""
    shape = synthetic.SIZES[sizes]
    label = f"{sizes}-x{len(lanes)}-{changes.get('target_mode', 'shared')}"
    if gpus():
        torch.cuda.init()
    for index in range(gpus()):
        torch.cuda.reset_peak_memory_stats(index)
    folder = Path(changes.pop("run_dir", None) or tempfile.mkdtemp(prefix="several-"))
    data = changes.pop("data", None) or synthetic.rows(sizes, 64)
    dtype = changes.pop("dtype", torch.bfloat16 if options.device == "cuda" else torch.float32)
    first = changes.get("target_devices", lanes)[0]
    config = RunConfig.from_dict(
        {
            "run_dir": str(folder),
            "devices": lanes,
            "rows": shape.rows,
            "anchors": shape.anchors,
            "block_size": shape.block_size,
            "drafter_layers": shape.drafter_layers,
            "max_length": max(512, shape.length),
            "drift_every": 10,
            "backend": "inductor" if options.device == "cuda" else "aot_eager",
            **changes,
        }
    )
    trainer = Trainer(config, target=synthetic.target(sizes, first, dtype), dataset=data, heldout=data)
    host: dict[str, list[float]] = {}
    began = time.monotonic()

    def see(event: dict[str, Any]) -> None:
        """Called in the thread that emits: notes the thread's own processor time, step by step."""
        if event["kind"] == "step":
            host.setdefault(event["thread"], []).append(time.thread_time())
            if event["step"] in (1, config.steps):
                say(f"{label}: {event['thread']} step {event['step']} after {time.monotonic() - began:.0f} s")

    trainer.log.subscribe(see)
    say(f"{label}: {config.steps} steps on {', '.join(lanes)}, target ready")
    run = trainer.start()
    run.join()
    if options.keep:
        keep_picture(folder, Path(options.keep), label)
    steps = [event for event in events.read(folder / "events.jsonl") if event["kind"] == "step"]
    compiles = [event for event in events.read_all(folder / "events.jsonl") if event["kind"] == "compile"]
    alarms = [event for event in events.read_all(folder / "events.jsonl") if event["kind"] == "alarm"]
    result = {
        "lanes": len(lanes),
        "steps": min((sum(s["thread"] == lane for s in steps) for lane in trainer.lanes), default=0),
        "seconds": round(time.monotonic() - began, 1),
        "compiles": {c: sum(e["cls"] == c for e in compiles) for c in sorted({e["cls"] for e in compiles})},
        "alarms": sorted({event["alarm"] for event in alarms}),
        "losses": [step["loss"] for step in steps if step["thread"] == trainer.lanes[0]],
        "peak_gib": [round(torch.cuda.max_memory_allocated(i) / 2**30, 2) for i in range(gpus())],
        "run_dir": str(folder),
    }
    counted = [step for step in steps if step["step"] > WARM_UP]
    if counted and max(step["step"] for step in counted) > WARM_UP + 1:
        began_at = max(s["t"] for s in steps if s["step"] == WARM_UP)
        wall = max(s["t"] for s in counted) - began_at
        number = max(s["step"] for s in counted) - WARM_UP
        # Processor time of the drafter threads' Python and launches: at most this share of the wall holds the GIL.
        spent = [times[-1] - times[WARM_UP - 1] for times in host.values() if len(times) > WARM_UP]
        result |= {
            "tokens_per_s": round(sum(s["tokens"] for s in counted) / wall),
            "step_ms": round(1000 * wall / number, 2),
            "host_ms": round(1000 * statistics.fmean(spent) / number, 2),
            "gil_share_at_most": round(min(1.0, sum(spent) / wall), 3),
        }
    return result


def say(text: str) -> None:
    """A line with the time since this process began, at once."""
    print(f"  {time.monotonic() - BEGAN:5.0f} s  {text}", flush=True)


def keep_picture(run_dir: Path, folder: Path, label: str) -> None:
    """The run's timeline (one lane a thread) and its events, as two small files."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("timeline.png", "events.jsonl"):
        if (run_dir / file).exists():  # without matplotlib there is no picture
            shutil.copyfile(run_dir / file, folder / f"{label}-{file}")


# --- parts ----------------------------------------------------------------------------------------------------------
def storm(options: argparse.Namespace) -> dict[str, Any]:
    """Changing lengths, no buckets, no caches: threads recompile while others train."""
    size = "tiny" if options.tiny else "smollm2"
    lanes = devices(options, 2 if options.device == "cpu" else max(3, gpus()))
    shortest = synthetic.SIZES[size].length // 4
    result = train(
        options,
        size,
        lanes,
        data=synthetic.rows(size, 256, shortest=shortest),
        steps=options.steps,
        rows=1 if options.tiny else 2,
        bucket_lengths=False,
        compile_caches=False,
        mode="independent",
    )
    return result | {"ok": result["steps"] == options.steps}


def equal(options: argparse.Namespace) -> dict[str, Any]:
    """Averaged over N devices, against one device with all the rows; float32 from end to end."""
    size = "tiny" if options.tiny else "smollm2"
    lanes = devices(options, 2 if options.device == "cpu" else gpus())
    shared = {"steps": 10, "precision": "float32", "dtype": torch.float32, "drift_every": 1, "warmup": 0.0}
    per_lane = 2
    found = {}
    for label, these, rows in (("many", lanes, per_lane), ("one", lanes[:1], per_lane * len(lanes))):
        result = train(options, size, these, rows=rows, **shared)
        weights = _weights(Path(result["run_dir"]))
        found[label] = (result, weights)
    many, one = found["many"][1], found["one"][1]
    worst = max(float((many[name] - one[name]).norm() / one[name].norm()) for name in one)
    return {
        "lanes": len(lanes),
        "worst_weight_difference": worst,
        "drift_alarms": found["many"][0]["alarms"],
        "ok": worst < 2e-3 and not found["many"][0]["alarms"],
    }


def _weights(run_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (folder,) = sorted((run_dir / "checkpoints").iterdir())[-1:]
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def scaling(options: argparse.Namespace) -> dict[str, Any]:
    """1, 2, 4, ... threads against as many processes; the ends first, and what is measured is on disk at once."""
    most = 2 if options.device == "cpu" else gpus()
    there = (count for count in options.counts if count <= most)
    counts = sorted(there, key=lambda count: (1 < count < most, count))
    found: dict[str, Any] = {"ok": False}
    for size in ["tiny"] if options.tiny else ["smollm2", "qwen3-4b"]:
        for count in counts:
            steps = WARM_UP + (12 if options.tiny else 40 if size == "smollm2" else 25)
            for way in ("threads", "processes"):
                result = _workers(options, way, size, count, steps)
                found[f"{size} x{count} {way}"] = result
                say(f"scaling {size} x{count} {way}: {json.dumps(result)}")
                options.out.write_text(json.dumps(found))
    return found | {"ok": not any("error" in result for result in found.values() if isinstance(result, dict))}


def threads(options: argparse.Namespace) -> dict[str, Any]:
    """One process with a thread a device."""
    found = train(options, options.sizes, devices(options, options.count), steps=options.steps, drift_every=0)
    keys = ("tokens_per_s", "step_ms", "host_ms", "gil_share_at_most", "peak_gib", "alarms")
    return {key: found.get(key) for key in keys}


def _workers(options: argparse.Namespace, way: str, size: str, count: int, steps: int) -> dict[str, Any]:
    """One measurement in fresh processes: ``count`` threads of one, or ``count`` of them with a device each."""
    port = 29_500 + os.getpid() % 2000
    out = tempfile.mkdtemp(prefix="workers-")
    part = "threads" if way == "threads" else "ddp"
    command = [sys.executable, "-u", __file__, "--part", part, "--device", options.device, "--sizes", size]
    command += ["--steps", str(steps), "--count", str(count), "--out", f"{out}/result.json"]
    limit = 150 * patience(options)
    command += ["--limit", str(limit)]
    command += ["--keep", options.keep] if options.keep and way == "threads" and count > 1 else []
    workers = []
    for rank in range(1 if way == "threads" else count):
        environment = dict(os.environ)
        if way == "processes":
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
            environment |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
        workers.append(subprocess.Popen(command, env=environment))
    try:
        codes = [worker.wait(timeout=limit + 10) for worker in workers]
    except subprocess.TimeoutExpired:
        codes = [None]
    finally:
        for worker in workers:
            worker.kill()
    if any(code != 0 for code in codes):
        return {"error": f"exit codes {codes}"}
    return json.loads(Path(out, "result.json").read_text())


def ddp(options: argparse.Namespace) -> NoReturn:
    """One process of the baseline: the drafter in DistributedDataParallel, everything else as in the trainer."""
    import torch.distributed as dist

    from dflash_lib import blocks, layer, loss
    from dflash_lib.drafter import Drafter, DrafterConfig

    # Dynamo would cut the compiled layer at DistributedDataParallel's buckets (1 MiB the first): a layer is the piece
    # whose gradients are averaged while the next one's are made, and graphs with flex_attention are not cut well.
    torch._dynamo.config.optimize_ddp = False
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    sizes = synthetic.SIZES[options.sizes]
    target = synthetic.target(options.sizes, str(device), torch.bfloat16 if cuda else torch.float32)
    config = RunConfig.from_dict({"drafter_layers": sizes.drafter_layers, "block_size": sizes.block_size})
    drafter = Drafter(DrafterConfig.from_target(target, config), seed=0).to(device)
    backend = "inductor" if cuda else "aot_eager"
    compiled = torch.compile(layer.layer_forward, backend=backend, dynamic=False)
    chunk = torch.compile(loss.loss_chunk, backend=backend, dynamic=False) if cuda else None

    class Step(torch.nn.Module):
        """Forward and loss, so that DistributedDataParallel sees one call."""

        def __init__(self) -> None:
            super().__init__()
            self.drafter = drafter

        def forward(self, features: Any, batch: Any, mask: Any, positions: Any) -> Any:
            embedded = target.embed(batch.inputs)
            hidden = self.drafter(features, embedded, positions, batch.positions, mask, layer=compiled)
            found = loss.drafter_loss(
                hidden, target.head, batch.labels, batch.weights, block_size=sizes.block_size, chunk=chunk
            )
            return found.loss_sum / found.weight_sum

    step = torch.nn.parallel.DistributedDataParallel(
        Step(), device_ids=[rank] if cuda else None, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(step.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    rows = synthetic.rows(options.sizes, 64).rows
    length = sizes.length
    began = host = 0.0
    for number in range(options.steps):
        if number == WARM_UP:
            if cuda:
                torch.cuda.synchronize()
            dist.barrier()
            began, host = time.monotonic(), time.thread_time()
        first = (number * world + rank) * sizes.rows
        picked = [rows[i % len(rows)] for i in range(first, first + sizes.rows)]
        ids = torch.stack([torch.from_numpy(row.ids).long() for row in picked])
        mask = torch.stack([torch.from_numpy(row.mask) for row in picked])
        anchors, keep = blocks.draw_anchors(
            mask, sizes.anchors, seed=0, epoch=number, row_ids=[row.id for row in picked]
        )
        batch = blocks.make_blocks(
            ids, mask, anchors, keep, block_size=sizes.block_size, gamma=7.0, mask_token_id=target.mask_token_id
        ).to(device)
        features = target.features(ids).features
        form = blocks.block_mask if cuda else blocks.visible_dense
        visible = form(batch.anchors, batch.keep, length, sizes.block_size)
        positions = blocks.context_positions(None, length, len(picked), device)
        with torch.autograd.set_multithreading_enabled(False):  # so that this thread's time is the host's, as in a lane
            step(features, batch, visible, positions).backward()
        if rank == 0 and number in (0, options.steps - 1):
            say(f"{options.sizes} process 1 of {world}: step {number + 1} launched")
        torch.nn.utils.clip_grad_norm_(step.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if cuda:
        torch.cuda.synchronize()
    dist.barrier()
    wall, host = time.monotonic() - began, time.thread_time() - host
    counted = options.steps - WARM_UP
    peaks: list[Any] = [None] * world
    dist.all_gather_object(peaks, round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None)
    result = {
        "tokens_per_s": round(counted * world * sizes.rows * length / wall),
        "step_ms": round(1000 * wall / counted, 2),
        "host_ms": round(1000 * host / counted, 2),
        "peak_gib": peaks,
    }
    if rank == 0:
        options.out.write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # a process group that is taken down can keep a finished process waiting


def dedicated(options: argparse.Namespace) -> dict[str, Any]:
    """The last device holds the target and feeds the drafters on the others; against every device doing both."""
    lanes = devices(options, 2) if options.device == "cpu" else devices(options, gpus())
    alone = len(set(lanes)) > 1  # on one device, one lane beside the target thread
    split = {"devices": lanes[:-1] if alone else lanes[:1], "target_devices": lanes[-1:], "target_mode": "dedicated"}
    keys = ("steps", "tokens_per_s", "step_ms", "host_ms", "peak_gib")
    found: dict[str, Any] = {"ok": True}
    for size in ["tiny"] if options.tiny else ["smollm2", "qwen3-4b"]:
        steps = WARM_UP + (12 if options.tiny else 40 if size == "smollm2" else 25)
        for way, changes in (("dedicated", split), ("shared", {})):
            result = train(options, size, changes.get("devices", lanes), **{**changes, "steps": steps})
            found[f"{size} {way}"] = {key: result.get(key) for key in keys}
            found["ok"] &= result["steps"] == steps
            options.out.write_text(json.dumps(found))
    return found


def lab(options: argparse.Namespace) -> dict[str, Any]:
    """Every strategy on the compile storm, lanes spread over the devices."""
    from dflash_lib import race_lab

    found = {}
    threads = 2 if options.tiny else max(3, gpus())
    for strategy in race_lab.STRATEGIES:
        result = race_lab.run(
            strategy,
            "compile_storm",
            steps=6 if options.tiny else 12,
            threads=threads,
            device=options.device,
            timeout=60 if options.tiny else 90,
        )
        found[strategy] = {
            "outcome": result.outcome,
            "steps": result.steps_done,
            "errors": result.errors,
            "leaks": result.leaks,
        }
        print(f"lab {strategy}: {found[strategy]}", flush=True)
    return found | {"ok": found["thread_local"]["outcome"] == "ok"}


PARTS = {"storm": storm, "equal": equal, "lab": lab, "scaling": scaling, "dedicated": dedicated}
WORKERS = {"threads": threads, "ddp": ddp}  # of scaling
# Nothing is timed in these: on GPUs they wait for compilers most of the time, so they run beside each other.
CORRECTNESS = ("storm", "equal", "lab")
SECONDS = {"storm": 300, "equal": 200, "lab": 300, "scaling": 460, "dedicated": 150}


def main() -> int:
    """Runs the parts, each in its own process; prints one short line for each last, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if gpus() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small enough for a test on two cores")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--steps", type=int, default=None, help="steps of the storm (200)")
    parser.add_argument("--out", type=Path, default=Path("several_gpus.json"))
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8], help="threads and processes of scaling")
    parser.add_argument("--keep", help="folder for the runs' timeline pictures and events")
    parser.add_argument("--seconds", type=float, default=560, help="for everything")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", default="tiny", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=300, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = options.steps or (12 if options.tiny else 200)
    if options.part:
        faulthandler.dump_traceback_later(options.limit, exit=True)
        say(f"{options.part}: begins")
        options.out.write_text(json.dumps({**PARTS, **WORKERS}[options.part](options)))
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the part that runs, too
    results: dict[str, Any] = {"torch": torch.__version__, "device": options.device, "gpus": gpus(), "parts": {}}
    if gpus():
        results["gpu"] = torch.cuda.get_device_name(0)
    end = time.monotonic() + options.seconds * patience(options)
    say(f"several_gpus: {', '.join(options.parts)} on {gpus() or 'no'} GPUs, at most {options.seconds:.0f} s")

    def measure(part: str) -> None:
        seconds = min(SECONDS[part] * patience(options), end - time.monotonic())
        results["parts"][part] = (
            run_part(__file__, options, part, seconds) if seconds > 20 else {"error": "no time left"}
        )
        options.out.write_text(json.dumps(results, indent=1))

    together = [part for part in options.parts if part in CORRECTNESS]
    with ThreadPoolExecutor(max_workers=len(together) if options.device == "cuda" and together else 1) as pool:
        list(pool.map(measure, together))
    for part in options.parts:
        if part not in together:
            measure(part)
    for part, result in results["parts"].items():
        short = {key: value for key, value in result.items() if key not in ("losses", "run_dir")}
        print(f"{part}: {json.dumps(short)}"[:1500], flush=True)
    return 0 if all(result.get("ok") for result in results["parts"].values()) else 1


def run_part(script: str, options: argparse.Namespace, part: str, seconds: float) -> dict[str, Any]:
    """One part of a script, in processes of its own that are ended after ``seconds``; its result so far, and what went
    wrong. The part writes its stacks and leaves ten seconds earlier."""
    out = Path(tempfile.mkdtemp(prefix="part-")) / "result.json"
    command = [sys.executable, "-u", script, "--part", part, "--device", options.device, "--out", str(out)]
    command += ["--limit", str(max(5.0, seconds - 10))] + ["--tiny"] * options.tiny
    for name in ("steps", "keep"):
        command += [f"--{name}", str(getattr(options, name))] if getattr(options, name, None) else []
    command += ["--counts", *map(str, options.counts)] if getattr(options, "counts", None) else []
    began = time.monotonic()
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):  # also what a part that died has left running
                os.killpg(process.pid, signal.SIGKILL)
    result = json.loads(out.read_text()) if out.exists() else {}
    if code != 0:
        result |= {"ok": False, "error": f"exit code {code}" if code is not None else f"ended after {seconds:.0f} s"}
    shutil.rmtree(out.parent, ignore_errors=True)
    return result | {"part_seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    sys.exit(main())
