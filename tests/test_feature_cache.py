"""Features on disk: training from them is training with the target; whole or not there; never somebody else's."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from trainers import rows, tiny_config, tiny_target

from dflash_lib import checkpoint, events, feature_cache
from dflash_lib.config import ConfigError
from dflash_lib.feature_cache import Cached, FeatureCache
from dflash_lib.target import Target
from dflash_lib.threads import Trainer


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("dflash_lib.worker.intra_op_threads", lambda workers: 1)
    monkeypatch.setattr("dflash_lib.supervise.timeline.draw_all", lambda run_dir: [])
    monkeypatch.setattr("dflash_lib.supervise.summary.draw_losses", lambda run_dir: None)
    monkeypatch.setattr(feature_cache, "SHARD_BYTES", 2**17)  # some rows each, so that there are several


def trained(run_dir: Path, target: Target | None = None, dataset=None, **changes) -> Trainer:
    config = tiny_config(run_dir, **{"compile": False, "steps": 8, **changes})
    trainer = Trainer(config, target=target or tiny_target(), dataset=dataset or rows(), heldout=rows(2, seed=1))
    trainer.start().join(120)
    return trainer


def cached(folder: Path, run_dir: Path, **changes) -> Trainer:
    return trained(run_dir, target_mode="cached", feature_cache=str(folder), **changes)


def curve(trainer: Trainer) -> list[tuple]:
    log = events.read(trainer.run_dir / "events.jsonl")
    return sorted((e["thread"], e["step"], e["loss"], e["grad_norm"]) for e in log if e["kind"] == "step")


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.latest(trainer.run_dir) / checkpoint.MODEL)


def stretched(target: Target) -> Target:
    """The same weights with other positions: what a changed ``rope_scaling`` in config.json makes."""
    target.model.model.rotary_emb.inv_freq.div_(4)
    return target


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("changes", [{}, {"objective": "forward_kl"}])
def test_training_from_the_cache_is_training_with_the_target_bit_for_bit(tmp_path, changes, monkeypatch):
    """Float32, two threads, more than an epoch of six steps; then once more, with a target that cannot run."""
    shared = trained(tmp_path / "shared", **changes)
    first = cached(tmp_path / "cache", tmp_path / "first", **changes)
    target = tiny_target()

    def runs(*_, **__):
        raise AssertionError("the target ran")

    target.model.forward = target.decoder.forward = runs
    again = cached(tmp_path / "cache", tmp_path / "again", target=target, **changes)
    assert len(shards(tmp_path / "cache")) > 2
    for other in (first, again):
        assert curve(other) == curve(shared) and len(curve(other)) == 16
        theirs = weights(shared)
        assert all(torch.equal(values, theirs[name]) for name, values in weights(other).items())


@pytest.mark.parametrize("changes", [{"packing": True, "buckets": [256]}, {"bucket_lengths": False}])
def test_rows_of_other_shapes_are_put_together_from_the_cache(tmp_path, changes):
    """Packed, or beside a longer row, a conversation is rounded differently: equal in double precision, to 1e-9."""
    double = {"target": tiny_target(torch.float64), **changes}
    shared = trained(tmp_path / "shared", **double)
    other = cached(tmp_path / "cache", tmp_path / "cached", **double)
    losses = [[step[2] for step in curve(one)] for one in (shared, other)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    assert losses[0][0] != losses[0][-1]


def test_each_tensor_is_the_targets_own(tmp_path):
    trainer = cached(tmp_path / "cache", tmp_path / "run", objective="tv", steps=1)
    found = {name: values for path in shards(tmp_path / "cache") for name, values in load_file(path).items()}
    target, texts = tiny_target(), rows().rows
    assert set(found) == {f"{row.id}{kind}" for row in texts for kind in ("", ".last")}
    for row in (texts[0], texts[-1]):
        own = target.features(torch.tensor([row.input_ids]), last_hidden=True)
        torch.testing.assert_close(found[str(row.id)], own.features[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[f"{row.id}.last"], own.last_hidden[0], rtol=1e-5, atol=1e-6)
    cache = trainer.ready.cache
    assert isinstance(cache, FeatureCache) and cache.bytes == sum(values.nbytes for values in found.values())


def test_the_size_is_said_first_and_a_disk_that_is_too_small_is_refused(tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ConfigError, match=r"feature_cache: .* needs .* GiB more, its disk has 0\.0; name a folder"):
        cached(tmp_path / "cache", tmp_path / "refused")
    tokens = sum(map(len, rows().rows))
    size = tokens * 3 * 32 * 4 / 2**30
    assert f"{tokens:,} tokens of 24 rows, 3 layers, float32: {size:.2f} GiB" in capsys.readouterr().out
    assert not shards(tmp_path / "cache")


def test_an_interrupted_cache_goes_on_and_damage_is_mended(tmp_path, capsys):
    target, calls = tiny_target(), []
    forward = target.decoder.forward

    def fails_once(*given, **named):
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("no more memory")
        return forward(*given, **named)

    target.decoder.forward = fails_once
    folder = tmp_path / "cache"
    with pytest.raises(RuntimeError, match="no more memory"):
        cached(folder, tmp_path / "broken", target=target)
    kept = {path: path.stat().st_mtime_ns for path in shards(folder)}
    assert 0 < len(kept) < 8 and not list(folder.glob(".*"))
    cached(folder, tmp_path / "whole", steps=1)
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    one, two, *others = shards(folder)
    two.write_bytes(two.read_bytes()[:-100])
    one.unlink()
    kept = {path: path.stat().st_mtime_ns for path in others}
    mended = cached(folder, tmp_path / "mended")
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    assert curve(mended) == curve(trained(tmp_path / "shared"))


def test_shards_of_something_else_are_made_again_whoever_put_them_there(tmp_path):
    """Same rows, so same shapes: without cache.json, or where two runs begin at once, only the shards can tell."""
    folder, other = tmp_path / "cache", tiny_target(seed=1)
    cached(folder, tmp_path / "first", steps=1)
    (folder / "cache.json").unlink()
    second = cached(folder, tmp_path / "second", target=other)
    assert curve(second) == curve(trained(tmp_path / "shared", tiny_target(seed=1)))


@pytest.mark.parametrize("error", [OSError(30, "Read-only file system"), SafetensorError("No space left on device")])
def test_a_shard_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, error):
    def fails(*_):
        raise error

    monkeypatch.setattr("dflash_lib.storage.save_file", fails)
    with pytest.raises(ConfigError, match=r"feature_cache: .* cannot be written \(.*(Read-only|No space).*\)"):
        cached(tmp_path / "cache", tmp_path / "run")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["cache.json"]


def test_no_error_of_the_target_is_taken_for_the_end(tmp_path):
    """An id beyond the vocabulary is an IndexError on a CPU, and so is taking from a queue that has become empty."""
    target = tiny_target()

    def fails(*_, **__):
        raise IndexError("index out of range in self")

    target.decoder.forward = fails
    with pytest.raises(IndexError, match="out of range"):
        cached(tmp_path / "cache", tmp_path / "run", target=target)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"target": lambda: tiny_target(seed=1)}, "weights or rotary settings of the target"),
        ({"target": lambda: tiny_target(torch.bfloat16)}, "weights or rotary settings of the target, target dtype"),
        ({"target": lambda: stretched(tiny_target())}, "weights or rotary settings of the target"),
        ({"dataset": lambda: rows(seed=3)}, "training rows"),
        ({"objective": lambda: "tv"}, "last hidden states"),
    ],
)
def test_a_cache_of_something_else_is_refused_in_one_line(tmp_path, changed, named):
    cached(tmp_path / "cache", tmp_path / "run", steps=1)
    with pytest.raises(ConfigError) as error:
        cached(tmp_path / "cache", tmp_path / "other", **{name: value() for name, value in changed.items()})
    line = (
        rf"feature_cache: .* features of target 'tiny' that are not this run's \(other {named}\); name another folder"
    )
    assert re.fullmatch(line, str(error.value))


def test_without_a_folder_each_kind_of_features_has_its_own(tmp_path):
    for seed in (0, 1, 0):
        trained(tmp_path / f"run-{seed}", tiny_target(seed=seed), target_mode="cached", steps=1, runs_dir=str(tmp_path))
        shutil.rmtree(tmp_path / f"run-{seed}")
    assert len(list((tmp_path / "feature_cache").iterdir())) == 2


def test_few_shards_stay_open(tmp_path, monkeypatch):
    trainer = cached(tmp_path / "cache", tmp_path / "run", steps=1)
    monkeypatch.setattr(feature_cache, "OPEN_SHARDS", 2)
    source = Cached(trainer.ready.cache, torch.device("cpu"))
    stream = trainer.workers[0].stream
    for step in range(6):
        for batch in stream.batches(step, 0):
            source.features(batch)
    assert len(source._open) == 2


def test_a_folder_without_a_mode_that_reads_it_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="feature_cache: only target_mode 'cached' reads it"):
        tiny_config(tmp_path, feature_cache="somewhere")
