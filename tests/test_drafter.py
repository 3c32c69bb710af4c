"""The drafter against transformers' own Qwen3 parts, block by block in float64, and its cache against its full pass."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from dflash_lib import blocks, layer, packaged
from dflash_lib.config import ConfigError, RunConfig
from dflash_lib.drafter import Drafter, DrafterConfig, quiet_norm
from dflash_lib.head import Head
from dflash_lib.loss import drafter_loss
from dflash_lib.rope import rope_at, rotary_frequencies, rotate, settings_of

CONFIG = DrafterConfig(
    hidden_size=48,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=101,
    target_layer_ids=(1, 3, 4),
    num_target_layers=6,
    target_hidden_size=40,
    mask_token_id=100,
    block_size=8,
    rope={"rope_theta": 10_000.0},
    dtype=torch.float64,
)
ROWS, LENGTH, ANCHORS = 2, 60, 6
RANDOM = torch.Generator().manual_seed(0)


def random(*size: int) -> Tensor:
    return torch.randn(*size, generator=RANDOM, dtype=torch.float64)


@dataclasses.dataclass
class Inputs:
    features: Tensor
    embeddings: Tensor
    context_positions: Tensor
    blocks: blocks.Blocks
    documents: Tensor | None

    def masks(self, window: int | None = None) -> tuple:
        made = self.blocks
        return (made.anchors, made.keep, LENGTH, made.block_size, self.documents, window)

    def arguments(self, mask: Any) -> tuple:
        return self.features, self.embeddings, self.context_positions, self.blocks.positions, mask


def inputs(packed: bool = False, config: DrafterConfig = CONFIG) -> Inputs:
    """Random rows; the second has absent blocks."""
    documents = (torch.arange(LENGTH) // 25).expand(ROWS, LENGTH).contiguous() if packed else None
    ids = torch.randint(0, 90, (ROWS, LENGTH), generator=RANDOM)
    response = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    response[1, 5:] = False
    anchors, keep = blocks.draw_anchors(response, ANCHORS, seed=0, epoch=0, row_ids=[1, 2], document_ids=documents)
    made = blocks.make_blocks(
        ids, response, anchors, keep, block_size=config.block_size, gamma=4.0, mask_token_id=100, document_ids=documents
    )
    features = random(ROWS, LENGTH, len(config.target_layer_ids) * config.target_hidden_size)
    embeddings = random(config.vocab_size, config.hidden_size)[made.inputs]
    return Inputs(features, embeddings, blocks.context_positions(documents, LENGTH, ROWS), made, documents)


def perturbed(config: DrafterConfig = CONFIG) -> Drafter:
    """A drafter whose norms are not all ones."""
    model = Drafter(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * random(*parameter.shape)
            else:
                parameter *= 4
    return model


def reference_block(model: Drafter, context_states: Tensor, places: Tensor, states: Tensor, slots: Tensor) -> Tensor:
    """One block by itself, with transformers' Qwen3 parts: no mask, only the keys that it may see.

    ``context_states [T, K*H]`` at positions ``places``; block embeddings ``states [B, H]`` at ``slots``.
    """
    config, weights = model.config, {name: value.double() for name, value in model.state_dict().items()}
    theirs = transformers.Qwen3Config(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=10_000.0,
    )
    rotary = qwen3.Qwen3RotaryEmbedding(theirs)

    def norm(values: Tensor, name: str) -> Tensor:
        return values / (values.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[name]

    def heads(values: Tensor) -> Tensor:
        return values.view(1, len(values), -1, config.head_dim).transpose(1, 2)

    context = norm(context_states @ weights["fc.weight"].T, "hidden_norm.weight")
    for index in range(config.num_layers):
        at = f"layers.{index}."
        inside = norm(states, at + "input_layernorm.weight")
        both = torch.cat((context, inside))
        query = norm(heads(inside @ weights[at + "self_attn.q_proj.weight"].T), at + "self_attn.q_norm.weight")
        key = norm(heads(both @ weights[at + "self_attn.k_proj.weight"].T), at + "self_attn.k_norm.weight")
        value = heads(both @ weights[at + "self_attn.v_proj.weight"].T)
        cos, sin = rotary(both[None].float(), torch.cat((places, slots))[None])
        cos, sin = cos.double(), sin.double()
        _, key = qwen3.apply_rotary_pos_emb(key, key, cos, sin)
        _, query = qwen3.apply_rotary_pos_emb(query, query, cos[:, len(places) :], sin[:, len(places) :])
        groups = config.num_heads // config.num_kv_heads
        key, value = qwen3.repeat_kv(key, groups), qwen3.repeat_kv(value, groups)
        shares = (query @ key.transpose(-1, -2) / config.head_dim**0.5).softmax(-1)
        attended = (shares @ value).transpose(1, 2).reshape(len(states), -1)
        states = states + attended @ weights[at + "self_attn.o_proj.weight"].T
        inside = norm(states, at + "post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(inside @ weights[at + "mlp.gate_proj.weight"].T)
        states = (
            states + (gate * (inside @ weights[at + "mlp.up_proj.weight"].T)) @ weights[at + "mlp.down_proj.weight"].T
        )
    return norm(states, "norm.weight")


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("packed", [False, True])
def test_every_block_equals_that_block_alone(packed: bool, window: int | None) -> None:
    given, model = inputs(packed), perturbed()
    with torch.no_grad():
        hidden = model(*given.arguments(blocks.visible_dense(*given.masks(window))))
        flex = model(*given.arguments(blocks.block_mask(*given.masks(window))))
    assert torch.allclose(hidden, flex, atol=1e-10)
    made, size = given.blocks, CONFIG.block_size
    for row in range(ROWS):
        for block, anchor in enumerate(made.anchors[row].tolist()):
            if not made.keep[row, block]:
                continue
            first = 0 if given.documents is None else int((given.documents[row] < given.documents[row, anchor]).sum())
            first = first if window is None else max(first, anchor - window)
            at = slice(block * size, (block + 1) * size)
            places = given.context_positions[row, first:anchor]
            alone = reference_block(
                model,
                given.features[row, first:anchor],
                places,
                given.embeddings[row, at],
                made.positions[row, at],
            )
            assert torch.allclose(hidden[row, at], alone, atol=1e-9)


def test_absent_blocks_are_finite_and_teach_nothing() -> None:
    given, model = inputs(), perturbed()
    assert not given.blocks.keep.all()
    hidden = model(*given.arguments(blocks.visible_dense(*given.masks())))
    absent = ~given.blocks.keep.repeat_interleave(CONFIG.block_size, 1)
    features = given.features.clone().requires_grad_()
    hidden = model(features, *given.arguments(blocks.visible_dense(*given.masks()))[1:])
    assert hidden.isfinite().all()
    (slope,) = torch.autograd.grad(hidden[absent].sum(), features, retain_graph=True)
    assert (slope == 0).all(), "nothing of the context reaches an absent block"
    hidden.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_dense_attention_equals_explicit_float64() -> None:
    query, (key, value) = random(2, 4, 10, 16), random(2, 2, 2, 25, 16)
    mask = torch.rand(2, 1, 10, 25, generator=RANDOM) < 0.5
    mask[0, :, 3] = False
    query.requires_grad_()
    out = layer.sdpa_attention(query, key, value, mask)
    for row in range(2):
        for head in range(4):
            for place in range(10):
                seen = mask[row, 0, place]
                scores = key[row, head // 2][seen] @ query[row, head, place] / 4.0
                want = scores.softmax(0) @ value[row, head // 2][seen] if seen.any() else torch.zeros(16).double()
                assert torch.allclose(out[row, head, place], want, atol=1e-12)
    out.sum().backward()
    assert query.grad.isfinite().all() and (query.grad[0, :, 3] == 0).all()


# --- drafting with a cache --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5])
def test_drafting_with_a_cache_equals_the_full_pass(window: int | None) -> None:
    """Context appended in uneven pieces, drafts in between, rows of different lengths, the cache cropped."""
    config = dataclasses.replace(CONFIG, sliding_window=window)
    model = perturbed(config)
    features = random(2, 50, 3 * config.target_hidden_size)
    cache = model.new_cache(rows=2, capacity=50)
    place = torch.arange(50).expand(2, 50)

    def full(anchors: list[int], embeddings: Tensor, positions: Tensor) -> Tensor:
        chosen = torch.tensor(anchors)[:, None]
        mask = blocks.visible_dense(chosen, torch.ones_like(chosen, dtype=torch.bool), 50, 8, None, window)
        return model(features, embeddings, place, positions, mask)

    def draft(anchors: list[int]) -> None:
        embeddings = random(2, 8, config.hidden_size)
        positions = torch.tensor(anchors)[:, None] + torch.arange(8)
        got = model.draft(cache, embeddings, positions)
        assert torch.allclose(got, full(anchors, embeddings, positions), atol=1e-10)

    with torch.no_grad():
        model.append_context(cache, features[:, :12], place[:, :12])
        draft([12, 9])
        model.append_context(cache, features[:, 12:20], place[:, 12:20])
        draft([20, 11])
        cache.crop(15)
        assert cache.length == 15
        draft([15, 13])
        # From here the rows run apart: each writes at places of its own, also places written before.
        ragged = torch.stack((torch.arange(15, 19), torch.arange(13, 17)))
        model.append_context(cache, torch.stack([features[row, ragged[row]] for row in range(2)]), ragged)
        draft([19, 17])
        cache.length = cache.capacity
        draft([19, 17])


# --- names, weights, settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 5])
def test_parameters_are_a_checkpoints_tensors(layers: int) -> None:
    model = Drafter(dataclasses.replace(CONFIG, num_layers=layers))
    per_layer = [
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    ]
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    names |= {f"layers.{index}.{name}.weight" for index in range(layers) for name in per_layer}
    assert set(model.state_dict()) == set(dict(model.named_parameters())) == names
    assert len(names) == 11 * layers + 3
    assert model.fc.weight.shape == (48, 3 * 40)


def test_norms_start_small_where_the_mask_embedding_is_loud() -> None:
    """By plain loops; what reads the context, or single heads, starts at one, and so does all without an embedding."""
    embedding = random(CONFIG.hidden_size)
    embedding[3] *= 30
    model, plain = Drafter(CONFIG, mask_embedding=embedding), Drafter(CONFIG)
    size = math.sqrt(sum(value * value for value in embedding.tolist()) / CONFIG.hidden_size)
    start = [min(1.0, 0.5 * size / abs(value)) for value in embedding.tolist()]
    scale = math.sqrt(sum(value * value for value in start) / CONFIG.hidden_size)
    quiet = torch.tensor([value / scale for value in start])
    of_states = {"norm.weight"}
    for index in range(CONFIG.num_layers):
        of_states |= {f"layers.{index}.{name}_layernorm.weight" for name in ("input", "post_attention")}
    for name, weight in model.named_parameters():
        wanted = quiet.to(weight) if name in of_states else dict(plain.named_parameters())[name]
        torch.testing.assert_close(weight, wanted.detach(), rtol=1e-5, atol=0)
    assert all(bool((weight == 1).all()) for name, weight in plain.named_parameters() if name in of_states)
    assert torch.equal(quiet_norm(torch.zeros(5)), torch.ones(5)), "an embedding that says nothing"


def test_the_first_loss_on_the_packaged_target() -> None:
    """Its mask token's embedding is loud in a few channels, and the head is tied: 64 with all norms at one."""
    with safe_open(packaged.folder() / "model.safetensors", framework="pt") as file:
        embedding = file.get_tensor("model.embed_tokens.weight").float()
    words, mask = 12, 16
    config = dataclasses.replace(
        CONFIG,
        hidden_size=576,
        vocab_size=len(embedding),
        mask_token_id=mask,
        target_hidden_size=8,
        dtype=torch.float32,
    )
    features = random(1, words, len(config.target_layer_ids) * 8).float()
    inputs = torch.full((1, config.block_size), mask)
    inputs[0, 0] = 500
    labels = torch.arange(400, 400 + config.block_size)[None]
    weights = torch.ones(1, config.block_size)
    anchors, keep = torch.tensor([[words - 1]]), torch.tensor([[True]])
    losses = []
    for start in (None, embedding[mask]):
        hidden = Drafter(config, mask_embedding=start)(
            features,
            embedding[inputs],
            torch.arange(words)[None],
            words - 1 + torch.arange(config.block_size)[None],
            blocks.visible_dense(anchors, keep, words, config.block_size),
        )
        found = drafter_loss(hidden, Head(embedding), labels, weights, block_size=config.block_size)
        losses.append(float(found.mean().detach()))
    assert losses[0] > 50 and losses[1] < 0.4 * losses[0], losses


def test_first_weights_come_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = Drafter(CONFIG, seed=3)
    before = torch.get_rng_state()
    two, other = Drafter(CONFIG, seed=3), Drafter(CONFIG, seed=4)
    assert torch.equal(before, torch.get_rng_state())
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert one.fc.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_parameters_stay_float32_while_arithmetic_is_bfloat16() -> None:
    config = dataclasses.replace(CONFIG, dtype=torch.bfloat16)
    given, model = inputs(), Drafter(config)
    hidden = model(*given.arguments(blocks.visible_dense(*given.masks())))
    assert hidden.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    wide = Drafter(CONFIG)
    wide.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    want = wide(*given.arguments(blocks.visible_dense(*given.masks())))
    assert (hidden - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("kind", ["dense", "flex"])
def test_one_compile_serves_all_layers_and_all_draws(kind: str) -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer.layer_forward, backend=counter, dynamic=False, fullgraph=True)
    make = blocks.visible_dense if kind == "dense" else blocks.block_mask
    model = Drafter(CONFIG)
    # flex_attention has no backward on a CPU; with gradients the first layer must not be a graph of its own
    with torch.set_grad_enabled(kind == "dense"):
        for epoch in range(3):
            given = inputs()
            response = torch.ones(ROWS, LENGTH, dtype=torch.bool)
            anchors, keep = blocks.draw_anchors(response, ANCHORS, seed=0, epoch=epoch, row_ids=[1, 2])
            mask = make(anchors, keep, LENGTH, CONFIG.block_size)
            got = model(*given.arguments(mask), layer=compiled)
            assert torch.allclose(got, model(*given.arguments(mask)), atol=1e-10)
    assert counter.frame_count == 1


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 50}


def rope_models() -> dict[str, tuple[Any, Any]]:
    """Configs of real families, and the rotary module that transformers builds for each."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RotaryEmbedding
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    long = {**SIZES, "max_position_embeddings": 1024}
    return {
        "qwen3": (transformers.Qwen3Config(**SIZES, head_dim=32, rope_theta=1e6), qwen3.Qwen3RotaryEmbedding),
        "llama3": (transformers.LlamaConfig(**long, rope_theta=5e5, rope_scaling=dict(LLAMA3)), LlamaRotaryEmbedding),
        "yarn": (transformers.Qwen3Config(**long, head_dim=16, rope_scaling=dict(YARN)), qwen3.Qwen3RotaryEmbedding),
        "linear": (
            transformers.LlamaConfig(**long, rope_scaling={"rope_type": "linear", "factor": 2.0}),
            LlamaRotaryEmbedding,
        ),
        "partial": (transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.25), GPTNeoXRotaryEmbedding),
        "partial phi": (
            transformers.Phi3Config(**SIZES, pad_token_id=0, partial_rotary_factor=0.5),
            Phi3RotaryEmbedding,
        ),
        "gemma2": (transformers.Gemma2Config(**SIZES, head_dim=32), Gemma2RotaryEmbedding),
    }


@pytest.mark.parametrize("family", ["qwen3", "llama3", "yarn", "linear", "partial", "partial phi", "gemma2"])
def test_rotary_settings_are_the_targets_own(family: str) -> None:
    config, module = rope_models()[family]
    settings = settings_of(config)
    assert set(settings) <= {"rope_theta", "rope_scaling", "partial_rotary_factor"}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies, factor = rotary_frequencies(
        settings,
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
    )
    positions = torch.arange(700)[None]
    rope = rope_at(positions, frequencies, factor, torch.float32)
    cos, sin = module(config)(torch.zeros(1, 700, 4), positions)
    assert torch.allclose(rope.cos, cos, atol=1e-5) and torch.allclose(rope.sin, sin, atol=1e-5)
    states = torch.randn(1, 700, 4, head_dim, generator=RANDOM)
    width = cos.shape[-1]
    turned, _ = qwen3.apply_rotary_pos_emb(states[..., :width], states[..., :width], cos, sin, unsqueeze_dim=2)
    got = rotate(states, rope)
    assert torch.allclose(got[..., :width], turned, atol=1e-4)
    assert torch.equal(got[..., width:], states[..., width:])


def test_gemma3_gives_its_full_attention_settings() -> None:
    settings = settings_of(transformers.Gemma3TextConfig(**SIZES))
    assert settings["rope_theta"] == 1_000_000.0


def test_old_transformers_configs_are_read_too() -> None:
    """4.57 has no rope_parameters."""
    config = SimpleNamespace(rope_theta=5e5, rope_scaling=dict(LLAMA3), partial_rotary_factor=0.5)
    assert settings_of(config) == {"rope_theta": 5e5, "rope_scaling": LLAMA3, "partial_rotary_factor": 0.5}
    assert settings_of(SimpleNamespace(rotary_emb_base=1e4, rotary_pct=0.25))["partial_rotary_factor"] == 0.25


def test_a_target_without_rotary_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="GPT2Config has no rotary positions"):
        settings_of(transformers.GPT2Config())


def test_config_comes_from_the_target() -> None:
    model = transformers.GPTNeoXConfig(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_hidden_layers=9,
        vocab_size=50,
        rotary_pct=0.25,
    )
    target = SimpleNamespace(config=model, layer_ids=(1, 3, 6), mask_token_id=49, hidden_size=64, device="cpu")
    config = DrafterConfig.from_target(target, RunConfig(drafter_layers=3, block_size=8, sliding_window=100))
    assert (config.num_layers, config.block_size, config.sliding_window) == (3, 8, 100)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (4, 4, 16, 50)
    assert config.target_layer_ids == (1, 3, 6) and config.num_target_layers == 9
    assert config.rope == {"rope_theta": 10_000.0, "rope_scaling": None, "partial_rotary_factor": 0.25}
    assert config.dtype == torch.float32
    half = DrafterConfig.from_target(target, RunConfig(precision="bfloat16"))
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": 101}, "mask_token_id: 101 is outside the embedding; use 0..100"),
        ({"target_layer_ids": (1, 6)}, "target_layer_ids: 6 is outside the target's layers 0..5"),
        ({"target_layer_ids": ()}, "target_layer_ids: is empty"),
        ({"num_kv_heads": 3}, "num_kv_heads: 3 does not divide the 4 query heads"),
    ],
)
def test_sizes_that_do_not_fit_are_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(CONFIG, **change)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_an_unknown_rotary_kind_is_named() -> None:
    rope = {"rope_theta": 1e4, "rope_scaling": {"rope_type": "spiral"}}
    with pytest.raises(ConfigError, match="rope_scaling: kind 'spiral' is not one of"):
        Drafter(dataclasses.replace(CONFIG, rope=rope))


def backward_costs() -> tuple[int, int]:
    """Bytes that a compiled layer keeps for its backward pass, and the matrix products made there."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    kept: list[int] = []
    products: list[int] = []

    def forward(graph: Any, _: Any) -> Any:
        (results,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        made = [node.meta["val"] for node in results[1:] if node.op == "call_function"]
        kept.append(sum(value.numel() * value.element_size() for value in made))
        return make_boxed_func(graph)

    def backward(graph: Any, _: Any) -> Any:
        products.append(sum("mm" in str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    compiled = torch.compile(layer.layer_forward, backend=backend, dynamic=False, fullgraph=True)
    config = dataclasses.replace(CONFIG, dtype=torch.bfloat16)
    given, model = inputs(), Drafter(dataclasses.replace(config, num_layers=1))
    hidden = model(*given.arguments(blocks.visible_dense(*given.masks())), layer=compiled)
    hidden.sum().backward()
    return kept[0], products[0]


def test_a_layer_keeps_products_only_and_makes_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As inductor partitions it: elementwise results and bfloat16 copies of weights are made again."""
    kept, products = backward_costs()
    monkeypatch.setattr(layer, "recomputed", lambda function, *arguments: function(*arguments))
    kept_without, products_without = backward_costs()
    assert kept < 0.7 * kept_without
    assert products == products_without == 2 * 9, "nine products, two gradients each"
