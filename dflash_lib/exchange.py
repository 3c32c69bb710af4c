"""Layouts of other projects: a drafter written for z-lab's readers or for speculators, and read from both.

``"z-lab"``: ``config.json`` as a Qwen3 configuration with ``dflash_config``; SGLang and vLLM (``dflash``) load it.
``"speculators"``: ``config.json`` as vllm-project/speculators writes it, the Qwen3 sizes under
``transformer_layer_config``. The tensors are the same in both, 11 L + 3 of them, without embedding and head: readers
take those from the target. No file holds code.

Layer ids. DFlash's id ``l`` is the output of 0-based decoder layer ``l``; ``aux_hidden_state_layer_ids`` of speculators
counts the embedding as 0, so it is ``l + 1`` (vLLM reads it so: ``target_layer_ids = aux - 1``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash_lib.atomic import replace_folder, write_json
from dflash_lib.config import ConfigError
from dflash_lib.storage import CheckpointError, read_json, read_tensors, write_tensors

if TYPE_CHECKING:
    from dflash_lib.drafter import Drafter, DrafterConfig

FORMATS = ("z-lab", "speculators")
ARCHITECTURE, SPECULATOR = "DFlashDraftModel", "DFlashSpeculator"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
OURS = "dflash_workspace"  # key of config.json for what no other reader needs: step, target, compute dtype
ROPE_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor")


def export(
    path: str | os.PathLike[str],
    format: str,
    out: str | os.PathLike[str],
    *,
    target: str | None = None,
    dtype: str | None = None,
) -> Path:
    """Writes a checkpoint for another system; returns the folder.

    Args:
        path: checkpoint folder or run folder.
        format: ``"z-lab"`` or ``"speculators"``.
        out: folder to write; replaced when it exists and holds an export or nothing.
        target: name of the target for the reader (speculators' ``verifier``); None: what the checkpoint says.
        dtype: ``"bfloat16"``, ``"float32"`` or ``"float16"``; None keeps the checkpoint's (an exact round trip).

    Raises:
        CheckpointError: an unknown format or dtype, a checkpoint that is not sound, or ``out`` holds other things.
    """
    from dflash_lib.checkpoint import describe, resolve

    if format not in FORMATS:
        raise CheckpointError(f"format {format!r} is unknown: use {' or '.join(FORMATS)}")
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is unknown: use {', '.join(DTYPES)}")
    folder, destination = resolve(path), Path(out)
    if destination.exists() and (
        not destination.is_dir() or {p.name for p in destination.iterdir()} - {"model.safetensors", "config.json"}
    ):
        raise CheckpointError(f"{destination}: is not empty and is no export; name another folder")
    config, tensors = _read(folder)
    if dtype is not None:
        tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
    name = target or describe(folder)["target"]
    stored = dtype_name(tensors)
    document = zlab_config(config, stored) if format == "z-lab" else speculators_config(config, stored, name)

    def write(temporary: Path) -> None:
        write_tensors(tensors, temporary / "model.safetensors")
        write_json(temporary / "config.json", document)

    return replace_folder(destination, write)


def import_(
    path: str | os.PathLike[str], *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Drafter:
    """Builds a drafter from a folder of either format; the format is seen from ``config.json``.

    Raises:
        CheckpointError: a tensor is unknown, missing or mis-shaped (by name), a setting is missing or is not
            supported here (by name), or a file is damaged.
    """
    from dflash_lib.drafter import Drafter

    config, tensors = _read(Path(path))
    drafter = Drafter(config)
    drafter.load_state_dict(tensors, strict=True, assign=True)
    return drafter.to(device=device, dtype=dtype or DTYPES[dtype_name(tensors)])


def _read(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    config = drafter_config(read_json(folder / "config.json"), folder / "config.json")
    tensors = read_tensors(folder / "model.safetensors")
    check_tensors(tensors, config, folder / "model.safetensors")
    return config, tensors


# --- tensors -----------------------------------------------------------------------------------------------------
def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this configuration has, with its shape: 11 L + 3 (4 L more with biases)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config.num_layers):
        layer, attention = f"layers.{i}.", f"layers.{i}.self_attn."
        shapes |= {
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{attention}q_proj.weight": (queries, hidden),
            f"{attention}k_proj.weight": (keys, hidden),
            f"{attention}v_proj.weight": (keys, hidden),
            f"{attention}o_proj.weight": (hidden, queries),
            f"{attention}q_norm.weight": (config.head_dim,),
            f"{attention}k_norm.weight": (config.head_dim,),
            f"{layer}mlp.gate_proj.weight": (inner, hidden),
            f"{layer}mlp.up_proj.weight": (inner, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, inner),
        }
        if config.attention_bias:
            shapes |= {
                f"{attention}q_proj.bias": (queries,),
                f"{attention}k_proj.bias": (keys,),
                f"{attention}v_proj.bias": (keys,),
                f"{attention}o_proj.bias": (hidden,),
            }
    return shapes


def check_tensors(tensors: Mapping[str, Tensor], config: DrafterConfig, where: Path) -> None:
    """Refuses a set of tensors that is not exactly the configuration's, naming the first of each fault."""
    shapes = tensor_shapes(config)
    unknown, missing = sorted(set(tensors) - set(shapes)), sorted(set(shapes) - set(tensors))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise CheckpointError(
            f"{where}: tensor {unknown[0]!r}{more} is unknown to a DFlash drafter of this config.json"
        )
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{where}: tensor {missing[0]!r}{more} is missing")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise CheckpointError(
                f"{where}: tensor {name!r} has shape {list(tensors[name].shape)}, config.json asks for {list(shape)}"
            )
        if tensors[name].dtype not in DTYPES.values():
            raise CheckpointError(f"{where}: tensor {name!r} is {tensors[name].dtype}, not a floating-point weight")


def dtype_name(tensors: Mapping[str, Tensor]) -> str:
    """``"float32"`` and so on, of a checkpoint's tensors."""
    dtype = tensors["fc.weight"].dtype
    return next(name for name, known in DTYPES.items() if known == dtype)


# --- configurations ----------------------------------------------------------------------------------------------
def _sizes(config: DrafterConfig) -> dict[str, Any]:
    """The Qwen3 size fields. RoPE settings stand at the top level: transformers 4.57 does not read rope_parameters."""
    sliding = config.sliding_window is not None
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        **{key: value for key, value in (config.rope or {}).items() if key in ROPE_KEYS},
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "layer_types": ["sliding_attention" if sliding else "full_attention"] * config.num_layers,
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window,
        "max_window_layers": 0 if sliding else config.num_layers,
        "tie_word_embeddings": False,
    }


def zlab_config(config: DrafterConfig, dtype: str | None = None) -> dict[str, Any]:
    """``config.json`` of z-lab's layout; ``dtype`` defaults to the configuration's."""
    return {
        "architectures": [ARCHITECTURE],
        **_sizes(config),
        "dtype": dtype or str(config.dtype).removeprefix("torch."),
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "target_hidden_size": config.target_hidden_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "block_size": config.block_size,
            "causal": False,
            "sample_from_anchor": False,
        },
    }


def speculators_config(config: DrafterConfig, dtype: str, verifier: str | None) -> dict[str, Any]:
    """``config.json`` of vllm-project/speculators."""
    return {
        "architectures": [SPECULATOR],
        "model_type": "speculators",
        "speculators_model_type": "dflash",
        "speculators_version": "0.6.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": _sizes(config),
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": config.target_hidden_size,
        "num_target_layers": config.num_target_layers,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": config.sliding_window is not None,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def drafter_config(document: Mapping[str, Any], where: Path) -> DrafterConfig:
    """The drafter's configuration from a ``config.json`` of either format.

    Raises:
        CheckpointError: a setting is missing, of the wrong kind, or one that this drafter does not have.
    """
    from dflash_lib.drafter import DrafterConfig

    speculators = "speculators_model_type" in document
    sizes = document.get("transformer_layer_config") if speculators else document
    dflash = document if speculators else document.get("dflash_config")
    if not isinstance(sizes, dict) or not isinstance(dflash, dict):
        what = "transformer_layer_config" if speculators else "dflash_config"
        raise CheckpointError(f"{where}: has no {what}; this is no DFlash drafter")
    _refuse_unsupported(document, sizes, dflash, where)

    def need(source: Mapping[str, Any], key: str, default: Any = None) -> Any:
        value = source.get(key, default)
        if value is None:
            raise CheckpointError(f"{where}: has no {key!r}")
        return value

    try:
        if speculators:
            layer_ids = tuple(int(layer) - 1 for layer in need(document, "aux_hidden_state_layer_ids"))
        else:
            layer_ids = tuple(int(layer) for layer in need(dflash, "target_layer_ids"))
        hidden, heads = int(need(sizes, "hidden_size")), int(need(sizes, "num_attention_heads"))
        block_size = int(need(document, "block_size", dflash.get("block_size")))
        return DrafterConfig(
            hidden_size=hidden,
            intermediate_size=int(need(sizes, "intermediate_size")),
            num_layers=int(need(sizes, "num_hidden_layers")),
            num_heads=heads,
            num_kv_heads=int(need(sizes, "num_key_value_heads", heads)),
            head_dim=int(sizes.get("head_dim") or hidden // heads),
            rms_norm_eps=float(need(sizes, "rms_norm_eps", 1e-6)),
            rope=_rope(sizes, where),
            max_position_embeddings=int(need(sizes, "max_position_embeddings")),
            vocab_size=int(need(sizes, "vocab_size")),
            target_layer_ids=layer_ids,
            num_target_layers=int(need(document, "num_target_layers", max(layer_ids) + 1 if speculators else None)),
            target_hidden_size=int(document.get("target_hidden_size") or hidden),
            block_size=block_size,
            mask_token_id=int(need(dflash, "mask_token_id")),
            sliding_window=int(sizes["sliding_window"]) if _slides(sizes) else None,
            attention_bias=bool(sizes.get("attention_bias", False)),
            dtype=_arithmetic(document),
        )
    except CheckpointError:
        raise
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{where}: a setting is of the wrong kind ({type(error).__name__}: {error})") from None


def _arithmetic(document: Mapping[str, Any]) -> torch.dtype:
    """The dtype to compute in: what a checkpoint of ours says (its weights are float32 masters), else the file's."""
    ours = document.get(OURS)
    stated = ours.get("compute_dtype") if isinstance(ours, dict) else None
    return DTYPES[str(stated or document.get("dtype") or document.get("torch_dtype") or "float32")]


def _slides(sizes: Mapping[str, Any]) -> bool:
    return "sliding_attention" in (sizes.get("layer_types") or ())


def _rope(sizes: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """RoPE settings in their top-level form, whichever way the file has them."""
    rope: dict[str, Any] = {key: sizes[key] for key in ROPE_KEYS if sizes.get(key) is not None}
    nested = sizes.get("rope_parameters")
    if isinstance(nested, dict):
        flat = dict(nested)
        for key in ("rope_theta", "partial_rotary_factor"):
            if flat.get(key) is not None:
                rope.setdefault(key, flat[key])
            flat.pop(key, None)
        if flat.get("rope_type", flat.get("type", "default")) != "default":
            rope.setdefault("rope_scaling", flat)
    if "rope_theta" not in rope:
        raise CheckpointError(f"{where}: has no 'rope_theta'")
    rope.setdefault("rope_scaling", None)
    return rope


def _refuse_unsupported(
    document: Mapping[str, Any], sizes: Mapping[str, Any], dflash: Mapping[str, Any], where: Path
) -> None:
    """Settings that change what the drafter computes and that this one does not have."""
    kind = document.get("speculators_model_type", "dflash")
    if kind != "dflash":
        raise CheckpointError(f"{where}: is a {kind!r} speculator, not 'dflash'")
    wrong = {
        "projector_type": document.get("projector_type", "dflash") != "dflash",
        "sample_from_anchor": bool(dflash.get("sample_from_anchor")),
        "causal": bool(dflash.get("causal")),
        "draft_vocab_size": (document.get("draft_vocab_size") or sizes.get("vocab_size")) != sizes.get("vocab_size"),
        "hidden_act": sizes.get("hidden_act", "silu") != "silu",
        "layer_types": len(set(sizes.get("layer_types") or ["full_attention"])) != 1,
    }
    for name, refused in wrong.items():
        if refused:
            value = dflash.get(name, document.get(name, sizes.get(name)))
            raise CheckpointError(f"{where}: {name} = {value!r} is not supported by this drafter")
