"""RunConfig: what is safe is coerced, the rest is refused, one line each."""

from __future__ import annotations

import json
import math

import pytest

from dflash_lib.config import ConfigError, RunConfig


def refused(**values: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(values)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("given", "field", "expected"),
    [
        ("60", "steps", 60),
        ("1e-4", "lr", 1e-4),
        (1, "lr", 1.0),
        ("false", "bucket_lengths", False),
        ("True", "bucket_lengths", True),
        ("cuda:0,cuda:1", "devices", ["cuda:0", "cuda:1"]),
        ("cpu", "devices", ["cpu"]),
        (("cpu", "cpu"), "devices", ["cpu", "cpu"]),
        ("[128, 256]", "buckets", [128, 256]),
        ("128", "buckets", [128]),
        ("none", "gamma", None),
        ("none", "mask_token", None),
        ("none", "thinking", None),
        ("0.8,0.99", "betas", [0.8, 0.99]),
    ],
)
def test_safe_values_are_coerced(given: object, field: str, expected: object) -> None:
    assert getattr(RunConfig.from_dict({field: given}), field) == expected


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("lr", None),  # what `-y '{lr:1e-4}'` gives, without the space
        ("lr", "fast"),
        ("lr", math.nan),
        ("lr", "nan"),
        ("steps", 0),
        ("seed", 2**64),  # torch takes 63 bits
        ("steps", True),
        ("steps", "007"),
        ("steps", 1.5),
        ("bucket_lengths", "no"),
        ("bucket_lengths", 1),
        ("devices", "gpu"),
        ("devices", "cuda:x"),
        ("devices", []),
        ("buckets", [100]),
        ("buckets", [128] * 7),
        ("name", "../up"),
        ("objective", "mse"),
        ("target_layers", [1, 1]),
        ("betas", "0.9,1"),
        ("betas", [0.9, math.nan]),
        ("thinking", "maybe"),
        ("target_mode", "dedicated"),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, given: object) -> None:
    lines = refused(**{field: given})
    assert len(lines) == 1
    assert lines[0].startswith(("target_devices", field))


def test_every_fault_has_its_line_and_unknown_names_a_suggestion() -> None:
    lines = refused(stepz=3, lr="fast", rows=0)
    assert len(lines) == 3
    assert "did you mean 'steps'" in lines[0]


def test_namespace_takes_new_names_only() -> None:
    namespace = {"__name__": "x", "old": 1, "json": json}
    before = set(namespace)
    namespace |= {"before": before, "steps": 7, "_scratch": 2, "math": math, "RunConfig": RunConfig, "sqrt": math.sqrt}
    config = RunConfig.from_namespace(namespace, before)
    assert config.steps == 7
    with pytest.raises(ConfigError, match="unknown_name: is no parameter"):
        RunConfig.from_namespace(namespace | {"unknown_name": 1}, before)


def test_file_round_trip_and_faults(tmp_path) -> None:
    config = RunConfig.from_dict({"steps": 9, "devices": "cpu,cpu"})
    file = tmp_path / "config.json"
    file.write_text(config.to_json())
    assert RunConfig.from_file(file) == config
    assert RunConfig.from_file(file, steps=10).steps == 10
    (tmp_path / "bad.json").write_text('{"steps": 1,,}')
    (tmp_path / "bad.yaml").write_text("steps: [1\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "wrong.yaml").write_text("steps: many\n")
    (tmp_path / "number.yaml").write_text("1: 2\n")
    for name in ("bad.json", "bad.yaml", "list.yaml", "wrong.yaml", "number.yaml", "absent.yaml"):
        with pytest.raises(ConfigError) as caught:
            RunConfig.from_file(tmp_path / name)
        assert name in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


def test_decay_is_the_papers() -> None:
    sizes = {16: 7.0, 10: 5.0, 8: 4.0}
    assert {size: RunConfig.from_dict({"block_size": size}).decay for size in sizes} == sizes
    assert RunConfig.from_dict({"gamma": 3.5}).decay == 3.5
