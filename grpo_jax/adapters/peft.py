"""LoRA tree ↔ PEFT directory: the one place that knows both layouts.

Ours: `{"layers": {"self_attn": {"q_proj": {"a": (L, in, r), "b": (L, r, out)}}, "mlp": {…}}}`, float32, layers
stacked on axis 0. PEFT: one `lora_A.weight` (r, in) and one `lora_B.weight` (out, r) per layer and module. Transposed
slices are copied: the safetensors writer stores a non-contiguous array as garbage without a word.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from grpo_jax.adapters.manifest import AdapterError
from grpo_jax.storage import layout
from grpo_jax.storage.records import canonical_json

_PREFIX = "base_model.model.model.layers"
_KEY = re.compile(
    rf"{re.escape(_PREFIX)}\.(?P<layer>0|[1-9][0-9]{{0,5}})\.(?P<module>[^.]+\.[^.]+)\.lora_(?P<factor>[AB])\.weight"
)


def modules(lora: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(`self_attn.q_proj`, {"a", "b"}) of each target module, in sorted order."""
    for block in sorted(lora["layers"]):
        for module in sorted(lora["layers"][block]):
            yield f"{block}.{module}", lora["layers"][block][module]


def adapter_files(
    lora: Mapping[str, Any], *, rank: int, alpha: float, rslora: bool, base_model: str
) -> dict[str, bytes]:
    """The canonical `adapter_config.json` and `adapter_model.safetensors` of a LoRA tree of host arrays.

    Canonical: the same weights and settings give the same bytes, so their digest can name the policy.
    """
    tensors, targets = {}, []
    for module, factors in modules(lora):
        targets.append(module.rpartition(".")[2])
        for layer, (a, b) in enumerate(zip(np.asarray(factors["a"]), np.asarray(factors["b"]), strict=True)):
            tensors[f"{_PREFIX}.{layer}.{module}.lora_A.weight"] = np.ascontiguousarray(a.T, np.float32)
            tensors[f"{_PREFIX}.{layer}.{module}.lora_B.weight"] = np.ascontiguousarray(b.T, np.float32)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "target_modules": sorted(targets),
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return {layout.ADAPTER_CONFIG: canonical_json(config), layout.ADAPTER_WEIGHTS: save(tensors)}


def read_adapter(folder: Path, num_layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(LoRA tree of float32 arrays, adapter config) of a PEFT directory; AdapterError names what does not fit."""
    config, tensors = _read(folder)
    stacks: dict[str, dict[str, list[Any]]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or int(match["layer"]) >= num_layers:
            raise AdapterError(f"{folder.name}: {layout.ADAPTER_WEIGHTS} has the key {key!r}, which matches no module")
        if tensor.ndim != 2:
            raise AdapterError(f"{folder.name}: {key} in {layout.ADAPTER_WEIGHTS} is no matrix")
        slots = stacks.setdefault(match["module"], {"a": [None] * num_layers, "b": [None] * num_layers})
        slots[match["factor"].lower()][int(match["layer"])] = np.ascontiguousarray(tensor.T, np.float32)
    tree: dict[str, Any] = {"layers": {}}
    for module, factors in stacks.items():
        if any(x is None for x in factors["a"] + factors["b"]):
            raise AdapterError(f"{folder.name}: {layout.ADAPTER_WEIGHTS} lacks layers of {module}")
        if len({(a.shape, b.shape) for a, b in zip(factors["a"], factors["b"], strict=True)}) > 1:
            raise AdapterError(f"{folder.name}: {module} in {layout.ADAPTER_WEIGHTS} has layers of several shapes")
        if factors["a"][0].shape[1] != factors["b"][0].shape[0]:
            raise AdapterError(f"{folder.name}: {module} in {layout.ADAPTER_WEIGHTS} has factors of two ranks")
        block, _, name = module.partition(".")
        tree["layers"].setdefault(block, {})[name] = {k: np.stack(v) for k, v in factors.items()}
    return tree, config


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        config = json.loads((folder / layout.ADAPTER_CONFIG).read_bytes())
        tensors = load((folder / layout.ADAPTER_WEIGHTS).read_bytes())
    # The reader of tensors raises errors of several kinds for a dtype that numpy does not have.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, SafetensorError) as error:
        raise AdapterError(f"{folder.name}: its files cannot be read: {error!r:.200}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{folder.name}: {layout.ADAPTER_CONFIG} holds no JSON object")
    return config, tensors


def update_norm(lora: Mapping[str, Any], scale: float) -> float:
    """Frobenius norm of the whole effective update, sqrt(Σ |scale · A B|²), without forming A B."""
    total = 0.0
    for _, factors in modules(lora):
        for a, b in zip(np.asarray(factors["a"], np.float64), np.asarray(factors["b"], np.float64), strict=True):
            total += float(np.sum((a.T @ a) * (b @ b.T)))  # |A B|² = tr(AᵀA · B Bᵀ)
    return scale * total**0.5
