"""The frozen target: loading it, the features of K of its layers, its embedding and its head.

Features come from forward hooks of our own into a collector that belongs to one call in one thread.
transformers' ``output_hidden_states`` is never used: it collects through a process-wide variable while anybody
compiles, and then returned another thread's states in half of the calls (docs/hazards.md).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dflash_lib import packaged
from dflash_lib.anatomy import (
    Enough,
    TargetError,
    check_layers,
    choose_mask_token,
    find_decoder,
    find_head,
    find_stop_ids,
    measure_embedding,
    select_layers,
)
from dflash_lib.blocks import context_positions
from dflash_lib.sources import dtype_of, place_of, why_not

__all__ = ["Features", "Target", "TargetError", "choose_mask_token", "load", "select_layers"]


class Features(NamedTuple):
    """What one forward of the target gives a drafter.

    Attributes:
        features: ``[R, S, K*H]``, the outputs of the K layers side by side, in the order of ``layer_ids``.
        last_hidden: ``[R, S, H]`` after the final norm, what the head reads; None unless it was asked for.
    """

    features: Tensor
    last_hidden: Tensor | None


# .call during a call: (layer ids wanted, {layer id: its output}, layer id to stop after or None)
_collecting = threading.local()


class Target:
    """A frozen decoder of transformers, as a drafter sees it. Immutable; any number of threads may share it.

    Attributes:
        name: as it was asked for.
        model: the causal language model, in eval mode, no parameter with a gradient.
        tokenizer: its fast tokenizer (use it in one thread).
        config: the text configuration of the model.
        layer_ids: the K layers whose outputs are the features; id l is ``hidden_states[l + 1]`` of transformers.
        mask_token_id: the id fed into masked slots; the embedding has a row for it.
        stop_ids: ids that end an answer.
        head: the output layer. embedding_scale: the factor on embedding rows, where the model's forward applies one.
        cache_name: what this transformers calls the argument with the key/value cache (``past_key_values``, or the
            later ``cache``).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str = "target",
        target_layers: Sequence[int] | None = None,
        target_features: int = 5,
        mask_token: int | str | None = None,
    ) -> None:
        """Wraps a loaded model; :func:`load` is the usual way.

        Raises:
            TargetError: layers or mask token that do not exist, or a family whose embedding or head this class
                does not reproduce (checked against the model's own numbers).
        """
        self.name = name
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.decoder, self.layers = find_decoder(model, name)
        self.num_layers = len(self.layers)
        self.hidden_size: int = self.config.hidden_size
        self.layer_ids = check_layers(name, target_layers, self.num_layers, target_features)
        named = inspect.signature(self.decoder.forward).parameters
        self.cache_name = "cache" if "cache" in named else "past_key_values"
        self.embedding: nn.Module = model.get_input_embeddings()
        self.vocab_size = self._weight.shape[0]
        self.mask_token_id = choose_mask_token(tokenizer, self.vocab_size, mask_token, name)
        self.stop_ids = find_stop_ids(model, tokenizer)
        for index, layer in enumerate(self.layers):
            layer.register_forward_hook(_hook(index))
        self.head = find_head(model, self.config, name)
        self.embedding_scale = measure_embedding(self.decoder, self.layers[0], self.embedding, self._probe_ids(), name)
        self._compare_head()

    def __repr__(self) -> str:
        return (
            f"Target({self.name!r}, {self.num_layers} layers, hidden {self.hidden_size}, vocabulary {self.vocab_size}, "
            f"features of layers {list(self.layer_ids)}, {self.dtype}, {self.device})"
        )

    @property
    def _weight(self) -> Tensor:
        weight = self.embedding.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def device(self) -> torch.device:
        """Of the embedding: where token ids go in and features come out."""
        return self._weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    # --- what the drafter reads ---------------------------------------------------------------------------------
    @torch.no_grad()
    def features(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        last_hidden: bool = False,
    ) -> Features:
        """One forward over whole rows, without the head, and without the layers above the last feature.

        Args:
            input_ids: ``[R, S]``. Rows padded on the right need no mask: attention is causal.
            attention_mask: ``[R, S]``, 1 for tokens and 0 for padding, for rows padded on the left.
            document_ids: ``[R, S]`` of packed rows, -1 for padding; a token sees its own document only.
            positions: ``[R, S]``; None: counted from 0 in each document (or from the first unpadded token).
            last_hidden: also run the remaining layers and return what the head reads.
        """
        device = self.device
        input_ids = input_ids.to(device, non_blocking=True)  # else the host waits for all work queued before it
        mask = None
        if attention_mask is not None:  # padding is a document of its own: transformers' own masks may make NaN of it
            document_ids = attention_mask.to(device, non_blocking=True).long() - 1
        if document_ids is not None:
            document_ids = document_ids.to(device, non_blocking=True)
            mask = self._document_mask(document_ids)
            positions = context_positions(document_ids, *input_ids.T.shape) if positions is None else positions
        if positions is not None:
            positions = positions.to(device)
        with self.collecting(None if last_hidden else max(self.layer_ids)) as outputs:
            hidden = None
            with contextlib.suppress(Enough):
                hidden = self.decoder(
                    input_ids=input_ids,
                    attention_mask=mask,
                    position_ids=positions,
                    use_cache=False,
                    **{self.cache_name: _keeps_nothing()},
                ).last_hidden_state
        return Features(self.join(outputs), hidden)

    @contextlib.contextmanager
    def collecting(self, last: int | None = None) -> Iterator[dict[int, Tensor]]:
        """Inside, the calling thread's forwards of ``model`` leave each layer's output in the dictionary given.

        For decoding, which runs ``model`` with caches of its own; :meth:`join` makes features of the dictionary.

        Args:
            last: end the forward after this layer (it then raises a private exception; :meth:`features` uses it).
        """
        outputs: dict[int, Tensor] = {}
        before = getattr(_collecting, "call", None)
        _collecting.call = (frozenset(self.layer_ids), outputs, last)
        try:
            yield outputs
        finally:
            _collecting.call = before

    def join(self, outputs: dict[int, Tensor]) -> Tensor:
        """The collected outputs side by side: ``[R, S, K*H]`` on the embedding's device."""
        device = self.device
        return torch.cat([outputs[index].to(device) for index in self.layer_ids], dim=-1)

    def embed(self, ids: Tensor) -> Tensor:
        """``ids [..]`` -> ``[.., H]``, what the first layer reads (scaled where the family scales). No gradient."""
        with torch.no_grad():
            embedded = self.embedding(ids.to(self.device))
            return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [.., H]`` after the final norm -> ``[.., V]``."""
        return self.head.logits(hidden)

    # --- where it is --------------------------------------------------------------------------------------------
    def to(self, device: torch.device | str) -> Target:
        """This target on another device: a copy of weights there, or itself where it already is.

        Raises:
            TargetError: it is spread over several devices.
        """
        wanted = torch.device(device)
        if wanted.type == "cuda" and wanted.index is None:
            wanted = torch.device("cuda", torch.cuda.current_device())
        if wanted == self.device:
            return self
        if len({tensor.device for tensor in self.model.parameters()}) > 1:
            raise TargetError(f"target {self.name!r}: is spread over several devices by device_map and cannot be moved")
        # Handing deepcopy the moved tensors copies the modules without copying a weight twice, and keeps ties.
        memo: dict[int, Any] = {
            id(tensor): nn.Parameter(tensor.to(wanted), requires_grad=False) for tensor in self.model.parameters()
        }
        memo |= {id(tensor): tensor.to(wanted) for tensor in self.model.buffers()}
        moved = copy.copy(self)
        moved.model = copy.deepcopy(self.model, memo)
        moved.decoder, moved.layers = find_decoder(moved.model, self.name)
        moved.embedding = moved.model.get_input_embeddings()
        moved.head = find_head(moved.model, self.config, self.name)
        return moved

    # --- inside -------------------------------------------------------------------------------------------------
    def _document_mask(self, document_ids: Tensor) -> Any:
        """Causal within a document, in the form the family's attention wants; padding sees padding, so no row is
        empty. Families that mix sliding and full attention get one mask a kind."""
        length = document_ids.shape[1]
        index = torch.arange(length, device=document_ids.device)
        distance = index[:, None] - index[None, :]
        allowed = (document_ids[:, :, None] == document_ids[:, None, :]) & (distance >= 0)
        window = getattr(self.config, "sliding_window", None)
        if not window or getattr(self.config, "use_sliding_window", True) is False:
            return self._mask_form(allowed)
        near = self._mask_form(allowed & (distance < window))
        if not getattr(self.config, "layer_types", None):  # Mistral: the window is every layer's
            return near
        return {"full_attention": self._mask_form(allowed), "sliding_attention": near}

    def _mask_form(self, allowed: Tensor) -> Tensor:
        """``[R, S, S]`` of truth values -> ``[R, 1, S, S]``, added to the scores by eager attention, read by others."""
        allowed = allowed[:, None]
        if self.config._attn_implementation != "eager":
            return allowed
        zero = torch.zeros((), dtype=self.dtype, device=allowed.device)
        return torch.where(allowed, zero, torch.finfo(self.dtype).min)

    def _probe_ids(self) -> Tensor:
        last = self.vocab_size - 1
        return torch.tensor([[min(5, last), last // 2, last // 3, min(11, last)]], device=self.device)

    @torch.no_grad()
    def _compare_head(self) -> None:
        """The head of this class must give the model's own logits: a wrong scale would train a useless drafter."""
        own = self.model(input_ids=self._probe_ids(), use_cache=False).logits.float()
        hidden = self.features(self._probe_ids(), last_hidden=True).last_hidden
        assert hidden is not None
        ours = self.head.logits(hidden.to(self.head.weight.device)).float().to(own.device)
        tolerance = 1e-3 if self.dtype in (torch.float32, torch.float64) else 5e-2
        if own.shape != ours.shape or not torch.allclose(
            own, ours, rtol=tolerance, atol=tolerance * float(own.abs().max())
        ):
            raise TargetError(
                f"target {self.name!r}: the logits of model type {self.config.model_type!r} are not those of a plain "
                "head (weight, bias, scale, soft cap); this family is not supported"
            )


_loading = threading.Lock()  # neither transformers' loaders nor fast tokenizers are thread-safe


def load(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    target_layers: Sequence[int] | None = None,
    target_features: int = 5,
    mask_token: int | str | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
    device_map: Any = None,
) -> Target:
    """Loads a target, on the CPU unless ``device_map`` says otherwise. Call it in the main thread, then ``.to()``.

    Args:
        name: ``"smollm2"`` (packaged), a hub id, or a local folder.
        dtype: ``"auto"`` is bfloat16 where there is a CUDA device and float32 elsewhere.
        target_layers: 0-based ids of the feature layers; None spreads ``target_features`` of them.
        mask_token: token or id of masked slots; None chooses one.
        trust_remote_code: run the repository's own Python. Off unless asked for.
        device_map: given to transformers as it is (``"auto"``: spread over the GPUs).

    Raises:
        TargetError: one line; offline, it names the packaged target.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    name = str(name)
    wanted = dtype_of(dtype)
    with _loading:
        if not progress:
            logging.disable_progress_bar()
        try:
            place = place_of(name, progress)
            common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
            config = AutoConfig.from_pretrained(place, **common)
            if getattr(config.get_text_config(), "attn_logit_softcapping", None):
                common["attn_implementation"] = "eager"  # sdpa leaves the cap out without a word
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
            model = AutoModelForCausalLM.from_pretrained(place, dtype=wanted, device_map=device_map, **common)
        except TargetError:
            raise
        except packaged.PackagedError as error:
            raise TargetError(str(error)) from None
        except Exception as error:  # transformers raises OSError, ValueError, KeyError, hub and safetensors errors
            raise TargetError(why_not(name, error)) from error
        finally:
            if not progress:
                logging.enable_progress_bar()
    return Target(
        model,
        tokenizer,
        name=name,
        target_layers=target_layers,
        target_features=target_features,
        mask_token=mask_token,
    )


@functools.cache
def _keeps_nothing() -> Any:
    """A cache that hands keys and values straight back. Without a cache, transformers looks for packed rows in the
    positions' values, and on a GPU that look waits for all work queued before it."""
    from transformers import DynamicCache

    class Nothing(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return key_states, value_states

    return Nothing()


def _hook(index: int) -> Any:
    """A plain function, so that a copied model shares it and one collector serves every copy."""

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        call = getattr(_collecting, "call", None)
        if call is None:
            return
        wanted, outputs, last = call
        if index in wanted:
            outputs[index] = output[0] if isinstance(output, tuple) else output
        if index == last:
            raise Enough

    return keep
