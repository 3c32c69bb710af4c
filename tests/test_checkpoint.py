"""checkpoint.py, exchange.py, storage.py: what is saved comes back, and what is not sound is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_drafter, make_target
from transformers import Qwen3Config

from dflash_lib import checkpoint, exchange, storage
from dflash_lib.checkpoint import CheckpointError

HERE = Path(__file__).parent
CASES = HERE / "cases"
SCHEMAS = {"z-lab": "zlab_config", "speculators": "speculators_config"}


@pytest.fixture(scope="module")
def target():
    return make_target("llama", dtype=torch.float32)


@pytest.fixture
def drafter(target):
    return make_drafter(target)


@pytest.fixture
def saved(drafter, tmp_path):
    return checkpoint.save(drafter, tmp_path / "step-000007", step=7, target="tiny")


def same(one, two):
    left, right = one.state_dict(), two.state_dict()
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left)


# --- save and load -------------------------------------------------------------------------------------------------
def test_a_drafter_comes_back_bit_for_bit_with_its_configuration(saved, drafter):
    loaded = checkpoint.load(saved)
    assert same(loaded, drafter) and loaded.config == drafter.config
    assert checkpoint.describe(saved) == {"step": 7, "target": "tiny"}
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]


def test_a_checkpoint_has_exactly_the_tensors_of_dflash(saved, drafter):
    tensors = load_file(saved / "model.safetensors")
    assert len(tensors) == 11 * drafter.config.num_layers + 3
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.k_norm.weight"} <= tensors.keys()
    assert not [name for name in tensors if "embed" in name or "head" in name]
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == exchange.tensor_shapes(drafter.config)


def test_float32_masters_of_bfloat16_arithmetic_keep_both(target, tmp_path):
    drafter = make_drafter(target, dtype=torch.bfloat16)
    assert drafter.fc.weight.dtype == torch.float32
    loaded = checkpoint.load(checkpoint.save(drafter, tmp_path / "c", step=1))
    assert same(loaded, drafter) and loaded.config.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"sliding_window": 64},
        {"rope": {"rope_theta": 5e5, "rope_scaling": None, "partial_rotary_factor": 0.5}},
        {"rope": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}},
        {"target_layer_ids": (2, 0)},
    ],
)
@pytest.mark.parametrize("format", exchange.FORMATS)
def test_every_setting_survives_save_export_and_import(target, tmp_path, changes, format):
    drafter = make_drafter(target, **changes)
    folder = checkpoint.save(drafter, tmp_path / "c", step=1)
    out = checkpoint.export(folder, format=format, out=tmp_path / "out", target="tiny")
    back = checkpoint.import_(out)
    assert same(back, drafter) and back.config == drafter.config
    document = json.loads((out / "config.json").read_text())
    jsonschema.validate(document, json.loads((HERE / "schemas" / f"{SCHEMAS[format]}.schema.json").read_text()))


def test_a_save_replaces_an_older_one_and_leaves_nothing_else(saved, target):
    other = make_drafter(target, seed=9)
    checkpoint.save(other, saved, step=8)
    assert same(checkpoint.load(saved), other)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_a_save_that_fails_leaves_the_old_checkpoint_whole(saved, drafter, target, monkeypatch):
    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "write_json", fail)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(make_drafter(target, seed=9), saved, step=8)
    assert same(checkpoint.load(saved), drafter)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_a_compiled_drafter_is_saved_under_plain_names(drafter, tmp_path):
    compiled = torch.compile(drafter, backend="eager")
    assert same(checkpoint.load(checkpoint.save(compiled, tmp_path / "c", step=1)), drafter)


# --- training state ------------------------------------------------------------------------------------------------
def test_training_state_comes_back_with_types_and_the_optimizer_goes_on_as_if_nothing_happened(drafter, tmp_path):
    def optimizer_of(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(model, optimizer, value):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()

    optimizer = optimizer_of(drafter)
    step(drafter, optimizer, 0.5)
    state = {
        "optimizer": optimizer.state_dict(),
        "rows": {"epoch": 3, "position": 17},
        "betas": (0.9, 0.95),
        "list": [1, None, "x", torch.arange(3)],
        7: True,
    }
    folder = checkpoint.save(drafter, tmp_path / "c", step=1, extra_state=state)
    back = checkpoint.load_training(folder)
    assert back["step"] == 1 and back["rows"] == {"epoch": 3, "position": 17}
    assert back["betas"] == (0.9, 0.95) and back[7] is True
    assert back["list"][:3] == [1, None, "x"] and torch.equal(back["list"][3], torch.arange(3))
    resumed = checkpoint.load(folder)
    again = optimizer_of(resumed)
    again.load_state_dict(back["optimizer"])
    step(drafter, optimizer, -0.25)
    step(resumed, again, -0.25)
    assert same(drafter, resumed)


@pytest.mark.parametrize("file", ["training.safetensors", "model.safetensors"])
def test_files_of_two_saves_are_not_mixed(drafter, tmp_path, file):
    one = checkpoint.save(drafter, tmp_path / "one", step=1, extra_state={"a": torch.ones(2)})
    two = checkpoint.save(drafter, tmp_path / "two", step=2, extra_state={"a": torch.zeros(2)})
    (one / file).write_bytes((two / file).read_bytes())
    with pytest.raises(CheckpointError, match=rf"training\.json and {file} come from different saves"):
        checkpoint.load_training(one)


def test_parameters_in_the_training_state_are_kept_once(drafter, tmp_path):
    """A view of a parameter's memory is that parameter; an equal copy, or a part of one, is a tensor of its own."""
    weight = drafter.fc.weight.detach()
    state = {"own": {"fc.weight": weight}, "copy": weight.clone(), "part": weight[:2], "turned": weight.T}
    folder = checkpoint.save(drafter, tmp_path / "c", step=1, extra_state=state)
    back = checkpoint.load_training(folder)
    assert torch.equal(back["own"]["fc.weight"], weight) and torch.equal(back["copy"], weight)
    assert torch.equal(back["part"], weight[:2]) and torch.equal(back["turned"], weight.T)
    assert set(load_file(folder / "training.safetensors")) == {"state.copy", "state.part", "state.turned"}


def test_a_training_state_of_format_1_is_read(drafter, tmp_path):
    """It held the masters itself, and nothing tied the weights to it."""
    folder = checkpoint.save(drafter, tmp_path / "c", step=1)
    save_file({"state.a": torch.ones(2)}, folder / "training.safetensors", {"save": "s"})
    state = {"v": 1, "step": 1, "save": "s", "state": {"a": {"$tensor": "state.a"}}}
    (folder / "training.json").write_text(json.dumps(state))
    assert torch.equal(checkpoint.load_training(folder)["a"], torch.ones(2))


@pytest.mark.parametrize(
    "change", [{"v": 3}, {"v": None}, {"step": "1"}, {"step": None}, {"state": [1]}, {"state": None}]
)
def test_a_training_state_of_another_form_is_refused(drafter, tmp_path, change):
    folder = checkpoint.save(drafter, tmp_path / "c", step=1, extra_state={"a": 1})
    file = folder / "training.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=r"training\.json: (is of format .*|has no step and state)"):
        checkpoint.load_training(folder)


def test_what_cannot_be_saved_is_named(drafter, tmp_path):
    with pytest.raises(CheckpointError, match=r"state\.a\.b: a function"):
        checkpoint.save(drafter, tmp_path / "c", step=1, extra_state={"a": {"b": lambda: 0}})
    assert list(tmp_path.iterdir()) == []


# --- finding -------------------------------------------------------------------------------------------------------
def test_latest_passes_over_what_is_not_whole_and_prune_keeps_the_newest(drafter, tmp_path):
    for step in (5, 100, 20):
        checkpoint.save(drafter, tmp_path / "checkpoints" / f"step-{step:06d}", step=step)
    (tmp_path / "checkpoints" / "step-000200").mkdir()
    (tmp_path / "checkpoints" / ".step-000300.0123abcd.tmp").mkdir()
    assert checkpoint.latest(tmp_path).name == "step-000100"
    assert checkpoint.resolve(tmp_path).name == "step-000100"
    assert checkpoint.resolve(tmp_path / "checkpoints" / "step-000005" / "model.safetensors").name == "step-000005"
    removed = checkpoint.prune(tmp_path, keep=2)
    assert [path.name for path in removed] == ["step-000005"]
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))
    assert [path.name for path in checkpoint.all_steps(tmp_path)] == ["step-000020", "step-000100"]
    assert checkpoint.latest(tmp_path / "nowhere") is None


# --- damaged files -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("case", "fault"),
    [
        ("c01_cut_short", "is cut short: its header describes 336 bytes, the file has 276"),
        ("c03_wrapped_names", r"'_orig_mod\.fc\.weight' carries '_orig_mod\.', the mark of a wrapped module"),
        ("c04_impossible_header_length", "has an impossible header: it claims 1152921504606846976 bytes"),
        ("c06_zero_bytes", r"is empty \(zero bytes\)"),
    ],
)
def test_damaged_files_are_refused_by_name_and_fault(saved, case, fault):
    (saved / "model.safetensors").write_bytes((CASES / f"{case}.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=f"model.safetensors: .*{fault}") as caught:
        checkpoint.load(saved)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"\x05\x00", "is cut short"),
        (b"\x02" + bytes(7) + b"[]", "impossible header"),
        (b"\x02" + bytes(7) + b"{}extra", "belong to no tensor"),
        (b"PK\x03\x04rest-of-a-zip", "is a pickle"),
        (b"\x80\x02}q\x00.", "is a pickle"),
    ],
)
def test_other_files_are_refused_too(tmp_path, content, fault):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=fault):
        storage.read_tensors(path)


def test_a_cut_at_any_byte_is_refused(saved):
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    for length in [*range(64), *range(64, len(whole), 4999), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            storage.read_tensors(path)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            lambda t: t.update({"layers.9.mlp.up_proj.weight": t["norm.weight"].clone()}),
            "'layers.9.mlp.up_proj.weight' is unknown",
        ),
        (lambda t: t.update({"embed_tokens.weight": t["norm.weight"].clone()}), "'embed_tokens.weight' is unknown"),
        (lambda t: t.pop("hidden_norm.weight"), "'hidden_norm.weight' is missing"),
        (
            lambda t: t.update({"fc.weight": t["fc.weight"].t().contiguous()}),
            r"'fc.weight' has shape \[64, 32\], config.json asks for \[32, 64\]",
        ),
        (lambda t: t.update({"norm.weight": t["norm.weight"].long()}), "'norm.weight' is torch.int64"),
    ],
)
@pytest.mark.parametrize("format", exchange.FORMATS)
def test_unknown_missing_and_misshapen_tensors_are_refused_by_name(saved, tmp_path, change, fault, format):
    out = checkpoint.export(saved, format=format, out=tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(CheckpointError, match=fault):
        checkpoint.import_(out)


@pytest.mark.parametrize(
    ("format", "change", "fault"),
    [
        ("z-lab", lambda d: d.pop("dflash_config"), "no dflash_config; this is no DFlash drafter"),
        ("z-lab", lambda d: d.pop("hidden_size"), "has no 'hidden_size'"),
        ("z-lab", lambda d: d.pop("rope_theta"), "has no 'rope_theta'"),
        ("z-lab", lambda d: d["dflash_config"].update(causal=True), "causal = True is not supported"),
        (
            "z-lab",
            lambda d: d["dflash_config"].update(target_layer_ids=[0, 4]),
            "4 is outside the target's layers 0..3",
        ),
        ("z-lab", lambda d: d["dflash_config"].update(mask_token_id=40), "mask_token_id: 40 is outside"),
        ("z-lab", lambda d: d.update(num_hidden_layers="many"), "of the wrong kind"),
        ("speculators", lambda d: d.update(speculators_model_type="eagle3"), "is a 'eagle3' speculator"),
        ("speculators", lambda d: d.update(draft_vocab_size=8), "draft_vocab_size = 8 is not supported"),
        ("speculators", lambda d: d.update(sample_from_anchor=True), "sample_from_anchor = True is not supported"),
        ("speculators", lambda d: d.pop("mask_token_id"), "has no 'mask_token_id'"),
    ],
)
def test_configurations_that_mean_another_model_are_refused(saved, tmp_path, format, change, fault):
    out = checkpoint.export(saved, format=format, out=tmp_path / "out")
    document = json.loads((out / "config.json").read_text())
    change(document)
    (out / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=fault):
        checkpoint.import_(out)


# --- exports -------------------------------------------------------------------------------------------------------
def test_an_export_holds_weights_and_a_configuration_and_no_code(saved, tmp_path):
    out = checkpoint.export(saved, format="z-lab", out=tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    text = (out / "config.json").read_text()
    assert "auto_map" not in text and "dflash_workspace" not in text


def test_layer_ids_of_speculators_count_the_embedding(saved, tmp_path, drafter):
    out = checkpoint.export(saved, format="speculators", out=tmp_path / "out")
    document = json.loads((out / "config.json").read_text())
    assert document["aux_hidden_state_layer_ids"] == [layer + 1 for layer in drafter.config.target_layer_ids] == [1, 3]
    assert document["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert document["speculators_config"]["verifier"]["name_or_path"] == "tiny"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 123_456.0, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "partial_rotary_factor": 0.5},
    ],
)
def test_transformers_reads_the_exported_rope_settings(target, tmp_path, rope):
    """A file with only rope_parameters is read with wrong frequencies by 4.57; top-level settings by 4.57 and 5."""
    folder = checkpoint.save(make_drafter(target, rope=rope), tmp_path / "c", step=1)
    document = json.loads((folder / "config.json").read_text())
    assert document["rope_theta"] == rope["rope_theta"] and document["rope_scaling"] == rope["rope_scaling"]
    read = Qwen3Config.from_dict(document)
    settings = getattr(read, "rope_parameters", None) or {"rope_theta": read.rope_theta, **(read.rope_scaling or {})}
    assert settings["rope_theta"] == rope["rope_theta"]
    assert settings.get("factor") == (rope["rope_scaling"] or {}).get("factor")
    assert read.layer_types == ["full_attention"] * 2


def test_rope_parameters_of_transformers_5_are_understood(saved, drafter):
    document = json.loads((saved / "config.json").read_text())
    del document["rope_theta"], document["rope_scaling"]
    document["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e5}
    config = exchange.drafter_config(document, saved / "config.json")
    assert config.rope == {"rope_theta": 7e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}


def test_an_export_can_change_the_dtype(saved, tmp_path, drafter):
    out = checkpoint.export(saved, format="z-lab", out=tmp_path / "out", dtype="bfloat16")
    back = checkpoint.import_(out)
    assert back.config.dtype == back.fc.weight.dtype == torch.bfloat16
    assert torch.equal(back.fc.weight, drafter.fc.weight.bfloat16())


def test_export_refuses_what_it_does_not_know_and_folders_that_hold_other_things(saved, tmp_path):
    with pytest.raises(CheckpointError, match="format 'gguf' is unknown: use z-lab or speculators"):
        checkpoint.export(saved, format="gguf", out=tmp_path / "out")
    with pytest.raises(CheckpointError, match="dtype 'int8' is unknown"):
        checkpoint.export(saved, format="z-lab", out=tmp_path / "out", dtype="int8")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="is not empty and is no export"):
        checkpoint.export(saved, format="z-lab", out=tmp_path / "mine")
    checkpoint.export(saved, format="z-lab", out=tmp_path / "out")
    checkpoint.export(saved, format="speculators", out=tmp_path / "out")


# --- the right target ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"vocab_size": 39, "mask_token_id": 5}, "was trained for a vocabulary of 39 tokens, but llama has 40"),
        ({"num_target_layers": 5}, "a target of 5 layers, but llama has 4"),
        ({"target_hidden_size": 31}, "a target of width 31, but llama has 32"),
        ({"target_layer_ids": (0, 3)}, r"features of layers \[0, 3\], but llama has \[0, 2\]"),
    ],
)
def test_a_checkpoint_of_another_target_is_refused_in_one_line(target, tmp_path, change, fault):
    folder = checkpoint.save(make_drafter(target, **change), tmp_path / "c", step=1)
    with pytest.raises(CheckpointError, match=fault) as caught:
        checkpoint.load(folder, target=target)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
