"""The probe and the canary: by what a replica proves that it serves what the learner means."""

import math
from typing import Any

import jax
import numpy as np

from grpo_jax.models.config import LoraConfig, ModelConfig
from grpo_jax.models.lora import init_lora

_CANARY_TOKENS = 24
_COMMON_TOKENS = 8192
# How large the probe's update of a projection is beside its input, root mean square.
_STRENGTH = 1.0


def canary_tokens(config: ModelConfig) -> np.ndarray:
    """int32 [24]: the same for every run of a model; low ids, which every tokenizer of the family knows."""
    return np.random.default_rng(0).integers(0, min(config.vocab_size, _COMMON_TOKENS), _CANARY_TOKENS).astype(np.int32)


def probe_lora(key: jax.Array, config: ModelConfig, lora: LoraConfig) -> dict[str, Any]:
    """An adapter of the run's shape whose A and B are large and random, so that any mistake in keys, orientation, rank
    or scale moves the canary far away."""
    tree = init_lora(key, config, lora)
    # x A has about rms(x) / sqrt(3) per rank; with this deviation of B, scale · x A B has _STRENGTH · rms(x).
    deviation = _STRENGTH * math.sqrt(3 / lora.rank) / lora.scale
    leaves, structure = jax.tree.flatten_with_path(tree)
    filled = []
    for i, (path, leaf) in enumerate(leaves):
        is_b = path[-1].key == "b"
        filled.append(deviation * jax.random.normal(jax.random.fold_in(key, 1000 + i), leaf.shape) if is_b else leaf)
    return jax.tree.unflatten(structure, filled)
