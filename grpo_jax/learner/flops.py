"""Floating-point operations that a device could do; what a token costs is `models.flops`."""

from typing import Any

import jax.numpy as jnp

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


def peak_flops(device_kind: str, dtype: Any) -> float | None:
    """Operations a second of a device in a dtype; None where no data sheet says (CPUs, float32)."""
    if jnp.dtype(dtype).itemsize != 2:
        return None
    return next((peak for name, peak in _PEAK if name in device_kind), None)
