"""The parts of a target that a drafter needs, found in any family of transformers: layers, head, mask and stop ids."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash_lib.errors import UserError
from dflash_lib.head import Head


class Enough(Exception):
    """Ends a forward after the last layer that is needed."""


class TargetError(UserError):
    """A target that cannot be had or used as asked. One line: its name, what is wrong, what to do."""


def select_layers(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """The paper's even choice: ``round(1 + i * (M - 4) / (K - 1))``, from near the bottom to near the top.

    Raises:
        TargetError: fewer than 7 layers, or more features than distinct layers: name them with ``target_layers``.
    """
    if count == 1 and num_layers >= 7:
        return (num_layers // 2,)
    ids = [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)] if count > 1 else []
    if num_layers < 7 or len(set(ids)) < count:
        raise TargetError(
            f"{count} features cannot be spread over a target of {num_layers} layers: name fewer with target_layers "
            f"(ids 0 to {num_layers - 1}, for example target_layers={sorted({0, num_layers // 2, num_layers - 1})}), "
            "or set a smaller target_features"
        )
    return tuple(ids)


def choose_mask_token(tokenizer: Any, rows: int, wanted: int | str | None = None, name: str = "target") -> int:
    """The id fed into masked slots: one the embedding has a row for and no conversation contains.

    In this order: what was asked for; the tokenizer's own mask token; the first embedding row that no token uses
    (Qwen3: 151669); a reserved or unused token; the last special token that the chat template does not use.

    Raises:
        TargetError: the id is outside the embedding, the token is unknown, or nothing fits.
    """
    known: dict[str, int] = tokenizer.get_vocab()
    if isinstance(wanted, str):
        if wanted not in known:
            raise TargetError(f"mask_token: target {name!r} has no token {wanted!r}; name one of its tokens, or an id")
        wanted = known[wanted]
    if wanted is not None:
        if not 0 <= wanted < rows:
            raise TargetError(
                f"mask_token: id {wanted} is outside the embedding of target {name!r} (ids 0 to {rows - 1}); "
                "the embedding is frozen and is not resized"
            )
        return wanted
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id < rows:
        return int(tokenizer.mask_token_id)
    first_free = max(known.values(), default=-1) + 1
    if first_free < rows:
        return first_free
    spare = re.compile(r"<\|?(reserved|unused|extra|dummy|placeholder)[^>]*>", re.IGNORECASE)
    reserved = [index for token, index in known.items() if spare.fullmatch(token) and index < rows]
    if reserved:
        return min(reserved)
    template = tokenizer.chat_template or ""
    in_use = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    special = [
        index
        for token, index in tokenizer.get_added_vocab().items()
        if index not in in_use and index < rows and token not in str(template)
    ]
    if special:
        return max(special)
    raise TargetError(f"mask_token: target {name!r} has no token to spare; name one that its texts never contain")


def find_decoder(model: Any, name: str) -> tuple[Any, Any]:
    """The module without the head, and its list of decoder layers."""
    for candidate in (model.get_decoder(), model.base_model):
        layers = getattr(candidate, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers):
            return candidate, layers
    raise TargetError(
        f"target {name!r}: {type(model).__name__} has no list of decoder layers; this family is not supported"
    )


def find_head(model: Any, config: Any, name: str) -> Head:
    output = model.get_output_embeddings()
    if output is None or not isinstance(getattr(output, "weight", None), Tensor):
        raise TargetError(f"target {name!r}: {type(model).__name__} has no output layer; load a causal language model")
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return Head(output.weight, getattr(output, "bias", None), getattr(config, "final_logit_softcapping", None), scale)


def check_layers(name: str, named: Sequence[int] | None, num_layers: int, count: int) -> tuple[int, ...]:
    if named is None:
        try:
            return select_layers(num_layers, count)
        except TargetError as error:
            raise TargetError(f"target {name!r}: {error}") from None
    outside = [index for index in named if not 0 <= index < num_layers]
    if not named or outside or len(set(named)) < len(named):
        fault = f"has {outside[0]}" if outside else "is empty" if not named else "names a layer twice"
        raise TargetError(f"target_layers: {fault}; target {name!r} has layers 0 to {num_layers - 1}")
    return tuple(named)


def find_stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        found |= {value} if isinstance(value, int) else set(value or ())
    return tuple(sorted(found))


@torch.no_grad()
def measure_embedding(decoder: Any, first_layer: nn.Module, embedding: nn.Module, ids: Tensor, name: str) -> float:
    """The factor between embedding rows and what the first layer reads.

    1 when the embedding module scales by itself or not at all, as all families of transformers 5 do; transformers
    4.57 multiplies in the model's forward for Gemma 1 and 2 (by sqrt(H)) and Granite (by a setting). Measured, so
    that it holds for each.

    Raises:
        TargetError: the first layer reads something else, such as added position embeddings.
    """
    seen: list[Tensor] = []

    def look(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])
        raise Enough

    handle = first_layer.register_forward_pre_hook(look, with_kwargs=True)
    try:
        with contextlib.suppress(Enough):
            decoder(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    rows = embedding(ids)
    read = seen[0].to(rows.device).double()
    root = torch.tensor(rows.shape[-1] ** 0.5, dtype=rows.dtype)  # rounded as the models round it
    candidates = (1.0, float(root), float(getattr(decoder.config, "embedding_multiplier", None) or 1.0))
    rows = rows.double()
    scale = min(candidates, key=lambda value: float((rows * value - read).square().sum()))
    if not torch.allclose(rows * scale, read, rtol=2e-2, atol=1e-3 * float(read.abs().max())):
        raise TargetError(
            f"target {name!r}: its first layer reads more than scaled embeddings (model type "
            f"{decoder.config.model_type!r}); rotary decoders such as Llama, Qwen, Gemma and GPT-NeoX are supported"
        )
    return scale
