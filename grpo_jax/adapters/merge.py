"""Merged weights: the base's own files, with scale · B A added to the matrices that an adapter adapts."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from grpo_jax.adapters.manifest import AdapterError
from grpo_jax.storage import layout

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_COPIED = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "LICENSE*")


def merge(base: Path, adapter: Path, scale: float, to: Path) -> float:
    """Writes the model `base` (a Hugging Face directory) with the PEFT adapter in `adapter` merged into it.

    Sums are taken in float32 and rounded to the dtype of each of the base's tensors. Shards, index, config and
    tokenizer are the base's; one shard at a time is in memory.

    Returns:
      What rounding has moved, as a share of the update: |rounded(W + Δ) − (W + Δ)| / |Δ|, over all matrices.

    Raises:
      AdapterError: the adapter has a matrix for which the base has none of its shape.
    """
    updates = _updates(adapter)
    to.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for file in base.glob(pattern):
            shutil.copyfile(file, to / file.name)
    moved = total = 0.0
    for file in _weight_files(base):
        tensors, metadata = {}, None
        with safe_open(file, framework="numpy") as shard:
            metadata = shard.metadata()
            for name in shard.keys():  # noqa: SIM118 - no mapping
                value = shard.get_tensor(name)
                if (factors := updates.pop(name, None)) is not None:
                    value, error, size = _merged(name, value, *factors, scale)
                    moved, total = moved + error, total + size
                tensors[name] = np.ascontiguousarray(value)
        save_file(tensors, to / file.name, metadata=metadata or {"format": "pt"})
    if updates:
        raise AdapterError(f"the base has no tensor {min(updates)!r}, which the adapter adapts")
    return (moved / total) ** 0.5 if total else 0.0


def _merged(
    name: str, weight: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float
) -> tuple[np.ndarray, float, float]:
    """(W + scale · B A in W's dtype, squared norm of what rounding moved, squared norm of the update)."""
    if weight.shape != (b.shape[0], a.shape[1]):
        raise AdapterError(f"{name} has shape {weight.shape}, the adapter's update {(b.shape[0], a.shape[1])}")
    update = scale * (b @ a)
    exact = weight.astype(np.float32) + update
    rounded = exact.astype(weight.dtype)
    return rounded, float(np.sum(np.square(rounded.astype(np.float32) - exact))), float(np.sum(np.square(update)))


def _updates(adapter: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{name of the base's tensor: (A (r, in), B (out, r))}, float32."""
    tensors = {k: v.astype(np.float32) for k, v in load_file(adapter / layout.ADAPTER_WEIGHTS).items()}
    found = {}
    for key, a in tensors.items():
        if key.endswith(_A):
            stem = key.removesuffix(_A)
            if stem + _B not in tensors:
                raise AdapterError(f"the adapter has {key!r} and no matrix B beside it")
            found[f"{stem.removeprefix(_PREFIX)}.weight"] = (a, tensors[stem + _B])
    return found


def _weight_files(base: Path) -> list[Path]:
    """As a loader finds them: one file, or those of the index (a repository may hold other copies beside them)."""
    single, index = base / "model.safetensors", base / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    return [base / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
