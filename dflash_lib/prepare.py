"""What a run needs before its threads start, made once in the main thread: devices, target, rows, weights, settings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import checkpoint, collective, data, feature_cache, runs
from . import target as targets
from .collective import Team
from .config import ConfigError, RunConfig
from .drafter import DrafterConfig
from .feature_cache import Cached, FeatureCache
from .features import Ends, Own
from .loss import needs_target
from .target import Target


def devices(config: RunConfig) -> list[torch.device]:
    """One device a drafter thread. ``"auto"``: all GPUs (under torchrun this process's share), else two CPU workers.

    Raises:
        ConfigError: a device that is not there.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.devices == "auto":
        if count and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:  # torchrun with several processes a node
            return [torch.device("cuda", int(os.environ["LOCAL_RANK"]) % count)]
        return [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")] * 2
    return check_devices("devices", config.devices, count)


def check_devices(field_name: str, names: list[str] | str, count: int | None = None) -> list[torch.device]:
    """Names as devices that exist.

    Raises:
        ConfigError: a GPU that is not there, or CPU and GPUs together.
    """
    count = (torch.cuda.device_count() if torch.cuda.is_available() else 0) if count is None else count
    found = []
    for name in names if isinstance(names, list) else [names]:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", 0)
        if device.type == "cuda" and (device.index or 0) >= count:
            have = f"there are {count} GPUs" if count else "there is no GPU"
            raise ConfigError(f"{field_name}: {name} does not exist ({have}); use 'auto' or one of those that do")
        found.append(device)
    if len({device.type for device in found}) > 1:
        raise ConfigError(f"{field_name}: mixes CPU and GPU threads; use one kind")
    return found


def target_devices(config: RunConfig) -> list[torch.device]:
    """Devices of dedicated target threads; none in the other modes.

    Raises:
        ConfigError: a device that is not there.
    """
    return check_devices("target_devices", config.target_devices) if config.target_devices else []


def demo_devices(lanes: int = 3) -> list[str] | str:
    """Devices of the demo: at least ``lanes`` threads on the GPUs that are there, else ``"auto"``, two on the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"cuda:{i % count}" for i in range(max(lanes, count))] if count else "auto"


def check_backend(name: str) -> None:
    """Loads a backend of torch.compile, so that threads find it loaded: torch fails where two of them load it at once.

    Raises:
        ConfigError: torch.compile knows no such backend.
    """
    from torch._dynamo import list_backends, lookup_backend

    known = list_backends(None)
    if name not in known:
        usual = ", ".join(backend for backend in ("inductor", "aot_eager", "eager") if backend in known)
        raise ConfigError(f"backend: torch.compile has no {name!r}; use {usual}")
    lookup_backend(name)


@dataclass
class Ready:
    """Everything the threads share: read-only from here on."""

    target: Target
    on_device: dict[torch.device, Target]  # where whole targets are
    ends: dict[torch.device, Ends]  # embedding and head, on every drafter's device
    dataset: data.Dataset
    buckets: list[int]
    drafter: DrafterConfig
    prompts: list[list[int]]
    warm: dict[str, torch.Tensor] | None = None
    resumed: list[dict[str, Any]] = field(default_factory=list)  # of each worker; empty: a new run
    cache: FeatureCache | None = None

    @property
    def first_step(self) -> int:
        """Optimizer steps finished before this run goes on."""
        return int(self.resumed[0]["replica"]["step"]) if self.resumed else 0

    def source(self, config: RunConfig, device: torch.device) -> Own | Cached | None:
        """Where one drafter thread's features come from; None: from a target thread."""
        if self.cache is not None:
            return Cached(self.cache, device)
        if config.target_mode == "shared":
            return Own(self.on_device[device], needs_target(config.objective, config.label_source))
        return None

    def stream(self, config: RunConfig, team: Team, index: int, seed: int) -> data.RowStream:
        """The rows of every step of a team; a function of the step, so its threads share one.

        A resumed run goes on where the state of worker ``index`` says, with any number of threads.
        """
        return data.RowStream(
            self.dataset,
            lanes=team.nodes * team.size,
            rows_per_lane=config.rows,
            accumulation=config.accumulation,
            seed=seed,
            bucket_lengths=config.bucket_lengths,
            lengths=self.buckets,
            packing=config.packing,
            state=self.resumed[index]["rows"] if self.resumed else None,
            first_step=self.first_step,
        )


def load(
    config: RunConfig,
    places: list[torch.device],
    target_places: list[torch.device],
    target: Target | None = None,
    dataset: data.Dataset | None = None,
    heldout: data.Dataset | None = None,
    *,
    states: list[dict[str, Any]] | None = None,
) -> Ready:
    """Loads target, data and, for a warm run, weights; checks what can be checked before a thread starts.

    ``states`` are those of :func:`resumed`.

    Raises:
        ConfigError, TargetError, DataError, CheckpointError: one line each.
    """
    if target is None:
        target = targets.load(
            config.target,
            dtype=config.target_dtype,
            target_layers=config.target_layers,
            target_features=config.target_features,
            mask_token=config.mask_token,
            trust_remote_code=config.trust_remote_code,
        )
    if heldout is None:
        heldout = data.load(
            config.heldout_data, target, split="heldout", max_length=config.max_length, thinking=config.thinking
        )
    if dataset is None:
        dataset = data.load(
            config.train_data,
            target,
            split="train",
            max_length=config.max_length,
            thinking=config.thinking,
            heldout=heldout,
        )
    running = target_places or places
    if config.target_mode == "cached":  # only what evaluates needs a whole target; on a CPU it is there already
        running = places[:1] if config.evaluate_every or places[0] == target.device else []
    on_device = {place: target.to(place) for place in dict.fromkeys(running)}
    for place in on_device:
        if place.type == "cuda":
            torch.cuda.synchronize(place)  # threads read the weights on streams of their own
    drafter = DrafterConfig.from_target(target, config, places[0])
    if target.dtype == torch.float64:  # proofs run in double precision from end to end
        drafter = dataclasses.replace(drafter, dtype=torch.float64)
    ready = Ready(
        target=target,
        on_device=on_device,
        ends={place: Ends.of(on_device.get(place, target), place) for place in dict.fromkeys(places)},
        dataset=dataset,
        buckets=config.buckets or data.buckets([len(row) for row in dataset.rows]),
        drafter=drafter,
        prompts=[row.prompt for row in heldout.rows[: config.evaluate_prompts]],
        resumed=states or [],
    )
    if config.warm_start:
        loaded = checkpoint.load(config.warm_start, target=target)
        ready.warm = {name: tensor.detach() for name, tensor in loaded.named_parameters()}
    if config.target_mode == "cached":
        ready.cache = _cache(config, ready, places)
    return ready


def _cache(config: RunConfig, ready: Ready, places: list[torch.device]) -> FeatureCache:
    stream = data.RowStream(
        ready.dataset, rows_per_lane=config.rows, bucket_lengths=config.bucket_lengths, lengths=ready.buckets
    )
    return feature_cache.prepare(
        config, ready.target, stream, places, needs_target(config.objective, config.label_source)
    )


def resumed(config: RunConfig, workers: int, target: Target | None = None) -> list[dict[str, Any]]:
    """The training state of every worker; in independent mode each has its own checkpoint. Empty for a new run.

    Looked at before the run folder is touched: a run that cannot go on stays what it was.

    Raises:
        ConfigError: nothing is left to do. CheckpointError: there is no such checkpoint.
    """
    if not config.resume:
        return []
    folder = checkpoint.resolve(config.resume).absolute()
    state = checkpoint.load_training(folder)
    if state["step"] >= config.steps:
        raise ConfigError(f"steps: {folder} is at step {state['step']} already; ask for more than that")
    _check_same_drafter(config, folder, target)
    if config.mode == "averaged":
        return [state] * workers
    others = [folder.parent.parent / f"drafter-{index}" / "checkpoints" / folder.name for index in range(1, workers)]
    return [state, *map(checkpoint.load_training, others)]


def shared_run_dir(config: RunConfig, number: int) -> Path:
    """:func:`run_dir`, made by the first node and known to all; ``number`` tells a process's trainers apart."""
    return Path(collective.from_first_node(f"dflash/run_dir/{number}", lambda: str(run_dir(config))))


def _check_same_drafter(config: RunConfig, folder: Path, target: Target | None) -> None:
    """A resumed drafter keeps its layers and the target layers that it reads; other choices of a run may change.

    Raises:
        ConfigError: it would become another drafter.
    """
    theirs = checkpoint.read_json(folder / checkpoint.CONFIG)
    layers, ids = theirs.get("num_hidden_layers"), (theirs.get("dflash_config") or {}).get("target_layer_ids")
    if layers != config.drafter_layers:
        raise ConfigError(f"drafter_layers: {folder} has {layers}, not {config.drafter_layers}; a resume keeps them")
    wanted = config.target_layers if target is None else list(target.layer_ids)
    if not ids or (wanted or ids) != ids or (wanted is None and len(ids) != config.target_features):
        name = "target_layers" if wanted else "target_features"
        raise ConfigError(f"{name}: {folder} was trained for features of layers {ids}; a resume keeps them")


def run_dir(config: RunConfig) -> Path:
    """The run's folder; a resumed run goes on in the folder that its checkpoint lies in, unless told otherwise.

    Raises:
        ConfigError, CheckpointError: a folder or a checkpoint that cannot be used.
    """
    if config.resume and not config.run_dir:
        folder = checkpoint.resolve(config.resume).absolute()
        if folder.parent.name == "checkpoints":
            config = config.model_copy(update={"run_dir": str(folder.parent.parent)})
    return runs.new_run_dir(config)


@contextmanager
def torch_settings(config: RunConfig, shapes: int | None) -> Iterator[None]:
    """torch's compile settings for the time of a run, fixed before its threads start: each gets a copy of them.

    Args:
        shapes: how many row lengths there will be; None: unknown, the recompile limit stays what it is.
    """
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    intra_op = torch.get_num_threads()
    with ExitStack() as stack:
        # The workers set it for themselves, so that the caller's own thread keeps all its cores.
        stack.callback(torch.set_num_threads, intra_op)
        if shapes is not None:
            # Each lane's entry point has an entry a shape, with and without gradients, and some in reserve.
            limit = max(torch._dynamo.config.recompile_limit, 2 * shapes + 2)
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=limit))
        if not config.compile_caches:
            stack.enter_context(torch._inductor.config.patch(force_disable_caches=True))
            stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        yield
