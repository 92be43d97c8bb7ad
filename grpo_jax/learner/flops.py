"""Floating-point operations: what a token costs, and what a device could do."""

from typing import Any

import jax.numpy as jnp

from grpo_jax.models.config import LoraConfig, ModelConfig, parameter_count, projection_shapes

# Dense bfloat16 / float16 peak of a device, from its maker's data sheet, by a part of `jax.Device.device_kind`.
_PEAK = (
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("A10G", 70e12),
    ("L4", 121e12),
    ("TPU v6 lite", 918e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5p", 459e12),
    ("TPU v5", 459e12),
    ("TPU v4", 275e12),
)


def flops_per_token(config: ModelConfig, lora: LoraConfig) -> float:
    """Forward and backward of one token with a frozen base: 4 N, and 6 for each number of the adapter.

    2 N forward and 2 N backward through the activations: the base has no weight gradient. N counts what a token is
    multiplied with: the head, but not an embedding that is only looked up. Attention's own products, which grow with
    the row, and what remat computes again are not counted.
    """
    matrices = parameter_count(config) - (0 if config.tie_embeddings else config.vocab_size * config.hidden_size)
    adapter = config.num_layers * sum(
        lora.rank * sum(shape) for module, shape in projection_shapes(config).items() if lora.adapts(module)
    )
    return 4.0 * matrices + 6.0 * adapter


def peak_flops(device_kind: str, dtype: Any) -> float | None:
    """Operations a second of a device in a dtype; None where no data sheet says (CPUs, float32)."""
    if jnp.dtype(dtype).itemsize != 2:
        return None
    return next((peak for name, peak in _PEAK if name in device_kind), None)
