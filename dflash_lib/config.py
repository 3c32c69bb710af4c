"""RunConfig: every choice of a run, strict and typed, from notebook parameters or a file.

papermill injects separate names and only warns about ones it does not know, and its shell turns numbers and
booleans into text (``-p flag false`` arrives as ``'false'``, ``-y '{lr: 1e-4}'`` as ``'1e-4'``). So a notebook
builds this object in the cell after its parameters: what is safe is coerced, the rest is refused, one line each.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from dflash_lib.errors import UserError

MAX_BUCKETS = 6
BUCKET_MULTIPLE = 128


class ConfigError(UserError):
    """A choice that cannot be used. One line for each thing wrong: its name, the value, and what to do."""


def _list_or_comma_text(value: Any) -> Any:
    """``"cuda:0,cuda:1"`` (a shell's way to write a list) becomes a list; everything else passes."""
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            return yaml.safe_load(value)
        except yaml.YAMLError:
            return value
    if isinstance(value, str) and "," in value:
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, tuple):
        return list(value)
    return value


def _numbers_text(value: Any) -> Any:
    """As above, where one number alone is a list too."""
    found = _list_or_comma_text(value)
    return [found] if isinstance(found, str) else found


def _no_bool(value: Any) -> Any:
    """True is an int in Python; as a number of steps it is a mistake."""
    if isinstance(value, bool):
        raise ValueError("is a truth value, not a number")
    return value


def _number_text(value: Any) -> Any:
    """'60' and '1e-4' are numbers that a shell turned into text; '007' or 'nan' are not."""
    if isinstance(value, str) and not re.fullmatch(r"[+-]?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", value.strip()):
        raise ValueError("is text, not a number")
    return _no_bool(value)


def _truth_text(value: Any) -> Any:
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if not isinstance(value, bool):
        raise ValueError("is not true or false")
    return value


def _optional(check: Any) -> BeforeValidator:
    """The same check, letting None (and a shell's 'none') through."""

    def validate(value: Any) -> Any:
        if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null", "")):
            return None
        return check(value)

    return BeforeValidator(validate)


Int = Annotated[int, BeforeValidator(_number_text)]
Float = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number_text)]
Bool = Annotated[bool, BeforeValidator(_truth_text)]
Beta = Annotated[float, Field(ge=0, lt=1), BeforeValidator(_number_text)]
OptionalBool = Annotated[bool | None, _optional(_truth_text)]
OptionalInt = Annotated[int | None, _optional(_number_text)]
OptionalFloat = Annotated[float | None, _optional(_number_text)]
OptionalText = Annotated[str | None, _optional(lambda value: str(value) if isinstance(value, Path) else value)]
Texts = Annotated[list[str] | str, BeforeValidator(_list_or_comma_text)]


class Parameters(BaseModel):
    """Named values from a notebook, a shell or a file: typed, with nothing unknown among them. Frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @classmethod
    def from_namespace(cls, namespace: Mapping[str, Any], before: set[str] | None = None, **overrides: Any) -> Self:
        """Takes every name of a notebook that was not there before its parameters cell.

        Args:
            namespace: the notebook's ``globals()``.
            before: ``set(globals())``, taken in a cell before the parameters cell.
            overrides: values that win over the namespace's.

        Modules, classes and functions (what a cell imports), names with a leading underscore, ``before`` itself and
        the names IPython makes are passed over. Everything else must be a field.

        Raises:
            ConfigError: one line for each unknown name and each wrong value.
        """
        known_before = set(before or ()) | {"before", "In", "Out", "exit", "quit", "get_ipython", "open"}
        values = {
            name: value
            for name, value in namespace.items()
            if name not in known_before
            and not name.startswith("_")
            and not isinstance(value, types.ModuleType)
            and not callable(value)
        }
        return cls.from_dict({**values, **overrides})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Builds it from plain values.

        Raises:
            ConfigError: one line for each unknown name and each wrong value.
        """
        lines = [_unknown(name, cls.model_fields) for name in values if name not in cls.model_fields]
        try:
            config = cls.model_validate({k: v for k, v in values.items() if k in cls.model_fields})
        except ValidationError as error:
            raise ConfigError("\n".join(lines + _lines(error))) from None
        if lines:
            raise ConfigError("\n".join(lines))
        return config

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **overrides: Any) -> Self:
        """Reads a JSON or YAML file (a run's ``config.json`` among them); ``overrides`` win over it.

        Raises:
            ConfigError: the file is missing, is not an object, or holds something :meth:`from_dict` refuses.
        """
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
        try:
            values = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
        except (json.JSONDecodeError, yaml.YAMLError) as error:
            where = getattr(error, "problem_mark", None)
            line = where.line + 1 if where else getattr(error, "lineno", "?")
            raise ConfigError(f"{file}: line {line} is not valid {file.suffix.lstrip('.') or 'YAML'}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: holds no names and values (found {type(values).__name__})")
        try:
            return cls.from_dict({**values, **overrides})
        except ConfigError as error:
            raise ConfigError("\n".join(f"{file}: {line}" for line in str(error).splitlines())) from None

    def to_json(self) -> str:
        """All of them as JSON; of a run, the text of its ``config.json``."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"


class RunConfig(Parameters):
    """Every choice of a run. Lengths are in tokens, times in seconds, probabilities between 0 and 1.

    A notebook builds it with :meth:`from_namespace`, a shell with :meth:`from_file`. Frozen: a run's
    ``config.json`` is this object and nothing else.
    """

    # --- the run ------------------------------------------------------------------------------------------------
    name: str = Field("drafter", pattern=r"^[A-Za-z0-9._-]+$", description="first part of the run folder's name")
    runs_dir: str = Field("runs", description="folder that holds run folders")
    run_dir: OptionalText = Field(None, description="exactly this run folder instead of a dated one")
    seed: Int = Field(
        0, ge=0, lt=2**62, description="decides the order of rows, the anchors and the drafter's first weights"
    )
    resume: OptionalText = Field(None, description="run folder or checkpoint to go on from")
    warm_start: OptionalText = Field(None, description="checkpoint whose weights the drafter starts from")

    # --- the target ---------------------------------------------------------------------------------------------
    target: str = Field("smollm2", description="'smollm2' (packaged), a hub id, or a local folder")
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    target_mode: Literal["shared", "dedicated", "cached"] = Field(
        "shared", description="where features come from: each drafter's own device, target threads, or disk"
    )
    target_devices: Texts = Field(default_factory=list, description="devices of dedicated target threads")
    feature_cache: OptionalText = Field(
        None, description="folder of cached features (target_mode 'cached'); None: one under runs_dir, named by content"
    )
    trust_remote_code: Bool = Field(False, description="run code from a hub repository; off unless asked for")
    thinking: OptionalBool = Field(None, description="the chat template's enable_thinking, as it will be served")

    # --- devices and threads ------------------------------------------------------------------------------------
    devices: Texts = Field("auto", description="'auto', or one entry per drafter thread; a device may repeat")
    mode: Literal["averaged", "independent"] = Field(
        "averaged", description="'averaged': one drafter, gradients averaged; 'independent': one drafter a thread"
    )
    stop_timeout: Float = Field(120.0, gt=0, description="seconds a stop waits for a step boundary")

    # --- data ---------------------------------------------------------------------------------------------------
    train_data: Texts = Field("packaged", description="JSON lines of conversations, or 'packaged'")
    heldout_data: Texts = Field("packaged", description="conversations that are never trained on")
    max_length: Int = Field(512, ge=16, le=262_144, description="longest row, in tokens")
    bucket_lengths: Bool = Field(True, description="pad rows to a few lengths, so that nothing recompiles")
    buckets: Annotated[list[int] | None, _optional(_numbers_text)] = Field(
        None, description=f"row lengths, at most {MAX_BUCKETS}, multiples of {BUCKET_MULTIPLE}; None: chosen from data"
    )
    packing: Bool = Field(False, description="several conversations in one row, invisible to each other")

    # --- blocks -------------------------------------------------------------------------------------------------
    block_size: Int = Field(16, ge=2, le=128, description="slots of a block: the anchor and B-1 drafted tokens")
    anchors: Int = Field(64, ge=1, le=8192, description="blocks per row")
    anchors_per_document: OptionalInt = Field(None, ge=1, description="most blocks of one packed conversation")
    anchor_sampling: Literal["random", "fixed"] = Field(
        "random", description="'random': redrawn every epoch; 'fixed' costs 10-14 %% acceptance, for experiments"
    )
    gamma: OptionalFloat = Field(None, gt=0, description="decay of the slot weights; None: 7 / 5 / 4 for B 16 / 10 / 8")
    mask_token: Annotated[int | str | None, _optional(lambda value: value)] = Field(
        None, description="token (or id) of masked slots; None: chosen"
    )

    # --- drafter ------------------------------------------------------------------------------------------------
    drafter_layers: Int = Field(5, ge=1, le=64)
    target_features: Int = Field(5, ge=1, le=32, description="number K of target layers whose outputs are used")
    target_layers: Annotated[list[int] | None, _optional(_numbers_text)] = Field(
        None, description="0-based ids of those layers; None: spread evenly"
    )
    sliding_window: OptionalInt = Field(None, ge=1, description="context tokens a drafter layer sees; None: all")

    # --- objective ----------------------------------------------------------------------------------------------
    objective: Literal["ce", "dpace", "forward_kl", "reverse_kl", "tv"] = "ce"
    dpace_alpha: Float = Field(0.5, ge=0, le=1)
    label_source: Literal["text", "argmax"] = Field("text", description="labels: the row's tokens or the target's")

    # --- optimisation -------------------------------------------------------------------------------------------
    steps: Int = Field(60, ge=1, description="optimizer steps of the run")
    rows: Int = Field(4, ge=1, description="rows per thread in one forward")
    accumulation: Int = Field(1, ge=1, description="forwards per optimizer step")
    lr: Float = Field(6e-4, gt=0, le=1)
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: Float = Field(0.04, ge=0, le=1, description="share of the steps that warm up linearly")
    betas: Annotated[list[Beta], BeforeValidator(_list_or_comma_text)] = Field(
        default_factory=lambda: [0.9, 0.95], min_length=2, max_length=2
    )
    weight_decay: Float = Field(0.0, ge=0)
    clip: Float = Field(1.0, gt=0, description="largest gradient norm")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the drafter's arithmetic; masters are float32. 'auto': bfloat16 on CUDA"
    )
    fused_optimizer: Bool = Field(True, description="AdamW's fused form, where the device has it")

    # --- compiling ----------------------------------------------------------------------------------------------
    compile: Bool = Field(True, description="torch.compile the drafter's attention and loss")
    backend: str = Field("inductor", description="torch.compile backend; 'aot_eager' compiles in a third of a second")
    compile_caches: Bool = Field(True, description="use torch's on-disk compile caches")

    # --- keeping and measuring ----------------------------------------------------------------------------------
    checkpoint_every: Int = Field(0, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_checkpoints: Int = Field(3, ge=1)
    drift_every: Int = Field(20, ge=0, description="steps between comparisons of the replicas; 0: never")
    evaluate_every: Int = Field(0, ge=0, description="steps between evaluations; 0: only when asked")
    evaluate_prompts: Int = Field(8, ge=1)
    evaluate_tokens: Int = Field(64, ge=1, description="most new tokens a prompt")
    temperature: Float = Field(0.0, ge=0)

    @field_validator("devices", "target_devices", mode="after")
    @classmethod
    def _devices(cls, value: list[str] | str, info: ValidationInfo) -> list[str] | str:
        if value == ("auto" if info.field_name == "devices" else []):
            return value
        names = [value] if isinstance(value, str) else value
        if not names:
            raise ValueError("is empty: name at least one device, or 'auto'")
        for name in names:
            if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
                raise ValueError(f"{name!r} is no device: use 'cpu', 'cuda:0', ... or 'auto'")
        return names

    @field_validator("buckets", mode="after")
    @classmethod
    def _buckets(cls, value: list[int] | None) -> list[int] | None:
        if value is None:
            return None
        if not 1 <= len(value) <= MAX_BUCKETS:
            raise ValueError(f"has {len(value)} lengths: use 1 to {MAX_BUCKETS}")
        for length in value:
            if length <= 0 or length % BUCKET_MULTIPLE:
                raise ValueError(f"has {length}: every bucket is a positive multiple of {BUCKET_MULTIPLE}")
        return sorted(set(value))

    @model_validator(mode="after")
    def _together(self) -> RunConfig:
        if self.target_layers is not None and len(set(self.target_layers)) != len(self.target_layers):
            raise ValueError("target_layers: names a layer twice")
        if self.target_mode == "dedicated" and not self.target_devices:
            raise ValueError("target_devices: target_mode 'dedicated' needs the devices of its target threads")
        if self.target_mode != "dedicated" and self.target_devices:
            raise ValueError(f"target_devices: only target_mode 'dedicated' has any (it is {self.target_mode!r})")
        if self.target_mode != "cached" and self.feature_cache:
            raise ValueError(f"feature_cache: only target_mode 'cached' reads it (it is {self.target_mode!r})")
        if self.warm_start and self.resume:
            raise ValueError("warm_start: leave it out when resume is given (a resumed run has its own weights)")
        if self.packing and not self.bucket_lengths:
            raise ValueError("packing: needs bucket_lengths (rows are packed into the largest bucket)")
        return self

    @property
    def decay(self) -> float:
        """gamma, or the paper's value for this block size (7 / 5 / 4 for 16 / 10 / 8, scaled in between)."""
        if self.gamma is not None:
            return self.gamma
        return {16: 7.0, 10: 5.0, 8: 4.0}.get(self.block_size, max(1.0, 0.44 * self.block_size))


def _unknown(name: Any, known: Mapping[str, Any]) -> str:
    if not isinstance(name, str):  # YAML's 1, no, 2026-01-01
        return f"{name}: is no parameter; names are text"
    close = difflib.get_close_matches(name, known, n=1)
    return f"{name}: is no parameter" + (f"; did you mean {close[0]!r}?" if close else "; remove it or start it with _")


def _lines(error: ValidationError) -> list[str]:
    """pydantic's report as one line a fault: the name, what is wrong, what was given."""
    lines: dict[str, str] = {}
    for fault in error.errors():
        name = str(fault["loc"][0]) if fault["loc"] else ""
        message = str(fault["msg"]).removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        given = fault.get("input")
        lines.setdefault(name or message, f"{name}: {message} (given: {given!r:.80})" if name else message)
    return list(lines.values())
