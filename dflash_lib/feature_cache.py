"""Feature cache: the target's features of every row on disk, made once, so that training runs no target at all.

A folder of safetensors shards, each with some rows' ``[S, K*H]`` (and ``[S, H]`` last hidden states where the
objective needs them), and ``cache.json``, which says of what they are: target, layers, dtype and rows. A shard is
whole or not there, so an interrupted cache is gone on with. Training reads by memory map, in each drafter thread.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from .atomic import remove_leftovers, write_json
from .config import ConfigError, RunConfig
from .data import Row, RowBatch, RowStream
from .run_folder import runs_root
from .storage import CheckpointError, read_json, sound_header, write_tensors
from .target import Features, Target
from .worker import on_device

SHARD_BYTES = 2**27  # 128 MiB: small enough to share among writers and to lose, large enough to be few
OPEN_SHARDS = 256  # that one thread keeps mapped
SAMPLES = 64  # values of each parameter that tell one target's weights from another's
COMPARED = {  # what a cache is of, and what to call it when it differs
    "v": "format",
    "weights": "weights or rotary settings of the target",
    "layers": "target layers",
    "dtype": "target dtype",
    "last_hidden": "last hidden states",
    "rows": "training rows",
}


@dataclass(frozen=True)
class FeatureCache:
    """Where the features are, and of what.

    Attributes:
        folder: with ``cache.json`` and the shards.
        identity: what ``cache.json`` holds.
        shards: row ids of each shard, consecutive.
    """

    folder: Path
    identity: dict[str, Any]
    shards: list[range]

    @property
    def bytes(self) -> int:
        """Of all features; the files are larger by their headers."""
        return int(self.identity["tokens"]) * _token_bytes(self.identity)

    def path(self, shard: int) -> Path:
        return self.folder / f"features-{shard:06d}.safetensors"

    def whole(self, shard: int, rows: Sequence[Row]) -> bool:
        """Whether a shard is there. It is renamed into place, so one that is cut short was damaged since."""
        try:
            header = sound_header(self.path(shard))
        except CheckpointError:
            return False
        width, marks = self.identity["width"], header.get("__metadata__") or {}
        return marks.get("of") == digest_of(self.identity) and all(
            header.get(str(row), {}).get("shape") == [len(rows[row]), width] for row in self.shards[shard]
        )


class Cached:
    """Features from the cache, for one thread: what :class:`~dflash_lib.features.Own` gives, without a target."""

    def __init__(self, cache: FeatureCache, device: torch.device) -> None:
        self.cache, self.device = cache, device
        self._shard_of = {row: shard for shard, ids in enumerate(cache.shards) for row in ids}
        self._open: OrderedDict[int, Any] = OrderedDict()

    def features(self, batch: RowBatch) -> Features:
        """``[R, S, K*H]`` on the device, zero where there is padding: no block sees it."""
        names = ["", ".last"] if self.cache.identity["last_hidden"] else [""]
        found = [self._batch(batch, name).to(self.device, non_blocking=True) for name in names]
        return Features(found[0], found[1] if len(found) > 1 else None)

    def _batch(self, batch: RowBatch, name: str) -> Tensor:
        width = self.cache.identity["hidden" if name else "width"]
        dtype = getattr(torch, self.cache.identity["dtype"])
        pinned = self.device.type == "cuda"
        result = torch.zeros(*batch.input_ids.shape, width, dtype=dtype, pin_memory=pinned)
        for place, rows in enumerate(batch.parts):
            begin = 0
            for row in rows:
                values = self._shard(self._shard_of[row]).get_tensor(f"{row}{name}")  # a view of the mapped file
                result[place, begin : begin + len(values)] = values
                begin += len(values)
        return result

    def _shard(self, index: int) -> Any:
        """A mapped shard; the ones used last stay open."""
        if index not in self._open:
            if len(self._open) >= OPEN_SHARDS:
                self._open.popitem(last=False)
            self._open[index] = safe_open(self.cache.path(index), framework="pt")
        self._open.move_to_end(index)
        return self._open[index]


def prepare(
    config: RunConfig, target: Target, stream: RowStream, places: list[torch.device], last: bool
) -> FeatureCache:
    """The cache of a run, complete: says how large it is, then has the target make what is not there yet.

    Args:
        stream: the run's rows.
        places: devices of the drafter threads: as many writers, each where a drafter will be.
        last: last hidden states too.

    Raises:
        ConfigError: the folder holds features of something else, cannot be written, or is on too small a disk.
    """
    rows = stream.rows
    identity = _identity(target, rows, last)
    named = Path(config.feature_cache).expanduser().absolute() if config.feature_cache else None
    folder = named or runs_root(config.runs_dir) / "feature_cache" / digest_of(identity)
    cache = FeatureCache(folder, identity, list(_shards([len(row) for row in rows], _token_bytes(identity))))
    _claim(cache)
    todo = [shard for shard in range(len(cache.shards)) if not cache.whole(shard, rows)]
    needed = sum(len(rows[row]) for shard in todo for row in cache.shards[shard]) * _token_bytes(identity)
    free = shutil.disk_usage(folder).free
    print(
        f"feature cache {folder}: {identity['tokens']:,} tokens of {len(rows):,} rows, {len(target.layer_ids)} layers"
        f"{' and the last hidden states' if last else ''}, {identity['dtype']}: {cache.bytes / 2**30:.2f} GiB, "
        f"of which {needed / 2**30:.2f} GiB are to be made ({free / 2**30:.1f} GiB free)",
        flush=True,
    )
    if needed > free:
        raise ConfigError(
            f"feature_cache: {folder} needs {needed / 2**30:.1f} GiB more, its disk has {free / 2**30:.1f}; "
            "name a folder on a larger disk, or use target_mode 'shared'"
        )
    if todo:
        try:
            _make(cache, todo, stream, target, places)
        except OSError as error:
            raise ConfigError(f"feature_cache: {folder} cannot be written ({error.strerror or error})") from None
    return cache


def digest_of(identity: dict[str, Any]) -> str:
    """Of what features are; each shard carries it: ``cache.json`` may be deleted, or written by two runs at once."""
    return hashlib.blake2b(repr([identity[key] for key in COMPARED]).encode(), digest_size=6).hexdigest()


def _identity(target: Target, rows: Sequence[Row], last: bool) -> dict[str, Any]:
    """What the features are of, for ``cache.json``."""
    texts = hashlib.blake2b(digest_size=16)
    for row in rows:
        texts.update(len(row).to_bytes(8, "little") + row.ids.tobytes())
    weights = hashlib.blake2b(digest_size=16)
    kept = target.model.state_dict()
    for name, values in {**dict(target.model.named_buffers()), **kept}.items():
        some = values.flatten()[:: max(1, values.numel() // SAMPLES)].float().cpu()
        if name not in kept:  # rotary frequencies follow from the settings; another machine rounds them otherwise
            some = some.bfloat16().float()
        weights.update(f"{name} {tuple(values.shape)}".encode() + some.numpy().tobytes())
    return {
        "v": 1,
        "target": target.name,
        "weights": weights.hexdigest(),
        "layers": list(target.layer_ids),
        "dtype": str(target.dtype).removeprefix("torch."),
        "width": len(target.layer_ids) * target.hidden_size,
        "hidden": target.hidden_size,
        "last_hidden": last,
        "rows": texts.hexdigest(),
        "tokens": sum(map(len, rows)),
    }


def _token_bytes(identity: dict[str, Any]) -> int:
    values = identity["width"] + (identity["hidden"] if identity["last_hidden"] else 0)
    return int(values) * torch.empty(0, dtype=getattr(torch, identity["dtype"])).element_size()


def _shards(lengths: Sequence[int], token_bytes: int) -> Iterator[range]:
    """Consecutive rows; about 16 shards or more, so that writers share the work evenly and progress is seen."""
    most = min(SHARD_BYTES, sum(lengths) * token_bytes // 16)
    begin = size = 0
    for row, length in enumerate(lengths):
        if size and size + length * token_bytes > most:
            yield range(begin, row)
            begin, size = row, 0
        size += length * token_bytes
    yield range(begin, len(lengths))


def _claim(cache: FeatureCache) -> None:
    """Writes ``cache.json``, or finds there that the folder is a cache of the very same features.

    Raises:
        ConfigError: it is not, or nothing can be written there.
    """
    about = cache.folder / "cache.json"
    try:
        cache.folder.mkdir(parents=True, exist_ok=True)
        if not about.exists():
            write_json(about, cache.identity)
            return
        there = read_json(about)
    except OSError as error:
        raise ConfigError(f"feature_cache: {cache.folder} cannot be written ({error.strerror or error})") from None
    except CheckpointError as error:
        raise ConfigError(f"feature_cache: {error}; delete the folder or name another") from None
    wrong = [what for key, what in COMPARED.items() if there.get(key) != cache.identity[key]]
    if wrong:
        raise ConfigError(
            f"feature_cache: {cache.folder} holds features of target {there.get('target')!r} that are not this run's "
            f"(other {', '.join(wrong)}); name another folder"
        )


def _make(
    cache: FeatureCache, todo: Sequence[int], stream: RowStream, target: Target, places: list[torch.device]
) -> None:
    """One writer thread a place takes shard after shard; an error or an interrupt ends all after their shard."""
    remove_leftovers(cache.folder, older=3600.0)  # of writers that were killed: nobody takes an hour for a shard
    queue = deque(todo)
    queue.rotate(-_first(len(queue)))
    targets = {place: target.to(place) for place in dict.fromkeys(places)}
    finished: list[int] = []  # rows of each shard that is done
    total = sum(len(cache.shards[shard]) for shard in todo)
    with tqdm(total=total, desc="feature cache", unit="row", file=sys.stdout) as bar:

        def take() -> int | None:
            """The next shard; only taking tells whether one is left, for other threads take too."""
            try:
                return queue.popleft()
            except IndexError:
                return None

        def write(place: torch.device) -> None:
            with on_device(place, places):
                while (shard := take()) is not None:
                    if not cache.whole(shard, stream.rows):  # another process may have made it meanwhile
                        tensors = _of_rows(cache.shards[shard], targets[place], stream, cache.identity["last_hidden"])
                        write_tensors(tensors, cache.path(shard), {"of": digest_of(cache.identity)})
                    finished.append(len(cache.shards[shard]))

        with ThreadPoolExecutor(len(places), thread_name_prefix="feature-cache") as pool:
            running = {pool.submit(write, place) for place in places}
            try:
                while running:
                    done, running = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
                    bar.update(sum(finished) - bar.n)
                    for writer in done:
                        writer.result()
            finally:
                queue.clear()


def _first(count: int) -> int:
    """Where this process begins: processes that share a folder meet only at the end, and leave out what is there."""
    nodes = torch.distributed
    if not (nodes.is_available() and nodes.is_initialized()):
        return 0
    return nodes.get_rank() * count // nodes.get_world_size()


def _of_rows(ids: Sequence[int], target: Target, stream: RowStream, last: bool) -> dict[str, Tensor]:
    """A shard's tensors, made in the shapes of training's own batches, so that they are rounded as there."""
    rows, tensors = stream.rows, dict[str, Tensor]()
    ids = sorted(ids, key=lambda row: len(rows[row]))
    for first in range(0, len(ids), stream.rows_per_lane):
        some = ids[first : first + stream.rows_per_lane]
        width = max(stream.bucket_of[row] if stream.bucket_lengths else len(rows[row]) for row in some)
        batch = torch.full((stream.rows_per_lane, width), stream.pad_id, dtype=torch.long)
        for place, row in enumerate(some):
            batch[place, : len(rows[row])] = torch.from_numpy(rows[row].ids)
        found = target.features(batch, last_hidden=last)
        for place, row in enumerate(some):
            tensors[str(row)] = found.features[place, : len(rows[row])].cpu().clone()
            if found.last_hidden is not None:
                tensors[f"{row}.last"] = found.last_hidden[place, : len(rows[row])].cpu().clone()
    return tensors
