"""An existing PEFT adapter as the start of a run (`lora.init_from`)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from grpo_jax.adapters.manifest import AdapterError
from grpo_jax.adapters.peft import modules, read_adapter
from grpo_jax.errors import UsageError
from grpo_jax.scratch import scratch
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket, BucketError, Limits

_HASTY = Limits(attempt_s=20.0, total_s=30.0)
# What would make the adapter another function than scale · B A on each target.
_REFUSED = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out", "lora_bias")


def initial_adapter(source: str, like: Mapping[str, Any], *, rank: int, scale: float) -> dict[str, Any]:
    """The LoRA tree of the PEFT adapter at `source`, as host arrays (float32).

    Args:
      source: a directory, or the URL of one in a bucket.
      like: a LoRA tree of the run: its modules and shapes are those that the adapter must have.
      rank: of the run.
      scale: of the run, alpha / rank or alpha / sqrt(rank).

    Raises:
      UsageError: there is no such adapter, or it does not fit; one sentence that says in what.
      BucketError: it cannot be read now.
    """
    where = f"lora.init_from: {Bucket(source).address}"
    with scratch() as folder:
        _fetch(source, where, folder)
        try:
            config = json.loads((folder / layout.ADAPTER_CONFIG).read_bytes())
            if not isinstance(config, dict):
                raise ValueError("its config is no JSON object")
            _check(where, config, rank, scale)
            weights = folder / layout.ADAPTER_WEIGHTS  # in bfloat16 they can be read from a file only
            save_file({k: np.ascontiguousarray(v, np.float32) for k, v in load_file(weights).items()}, weights)
            tree, _ = read_adapter(folder, _layers(like))
        except AdapterError as error:
            raise UsageError(f"{where} does not fit this model: {str(error).partition(': ')[2]}") from None
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError, SafetensorError) as error:
            raise UsageError(f"{where} is no PEFT adapter ({error!r:.200})") from None
    _compare(where, tree, like)
    return tree


def require_source(source: str) -> None:
    """UsageError if there is nothing like an adapter, or it cannot be read: before anything waits for it."""
    try:
        found = Bucket(source, _HASTY).read_or_none(layout.ADAPTER_CONFIG)
    except BucketError as error:
        raise UsageError(f"lora.init_from: {error}") from None
    if found is None:
        raise UsageError(f"lora.init_from: {Bucket(source).address} holds no {layout.ADAPTER_CONFIG}")


def _fetch(source: str, where: str, folder: Path) -> None:
    bucket = Bucket(source)
    for file in (layout.ADAPTER_CONFIG, layout.ADAPTER_WEIGHTS):
        data = bucket.read_or_none(file)
        if data is None:
            raise UsageError(f"{where} holds no {file}")
        (folder / file).write_bytes(data)


def _check(where: str, config: Mapping[str, Any], rank: int, scale: float) -> None:
    if config.get("peft_type") != "LORA":
        raise UsageError(f"{where} is of the kind {config.get('peft_type')!r}, not LORA")
    odd = [key for key in _REFUSED if config.get(key)]
    if odd or config.get("bias", "none") != "none":
        raise UsageError(f"{where} has {odd[0] if odd else 'bias'} set, which cannot be trained here")
    r, alpha = config["r"], config["lora_alpha"]
    if r != rank:
        raise UsageError(f"{where} has rank {r}, lora.rank is {rank}")
    theirs = alpha / (r**0.5 if config.get("use_rslora") else r)
    if not abs(theirs - scale) <= 1e-6 * scale:
        raise UsageError(f"{where} has scale {theirs:g}, lora.alpha, lora.rank and lora.rslora make it {scale:g}")


def _compare(where: str, tree: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    theirs, ours = (dict(modules(t)) for t in (tree, like))
    if theirs.keys() != ours.keys():
        lacking, extra = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
        differing = [f"lacks {', '.join(lacking)}"] * bool(lacking) + [f"has {', '.join(extra)}"] * bool(extra)
        raise UsageError(f"{where} {' and '.join(differing)}, other than lora.targets says")
    for name, factors in ours.items():
        for part in ("a", "b"):
            expected, given = np.shape(factors[part]), theirs[name][part].shape
            if expected != given:
                raise UsageError(f"{where}: {name}.{part} has shape {given}, this model needs {expected}")
            if not np.isfinite(theirs[name][part]).all():
                raise UsageError(f"{where}: {name}.{part} is not finite")


def _layers(like: Mapping[str, Any]) -> int:
    return int(np.shape(next(modules(like))[1]["a"])[0])
