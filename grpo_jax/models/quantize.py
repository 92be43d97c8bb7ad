"""Weight-only quantisation of the frozen base: what a kernel is stored as, and how it becomes a kernel again.

The kernels of the seven projections are quantised; embedding, head, norms and biases stay. With a kernel W of
(in, out), D by F, and layers on an axis before them or not:

    "int8"  symmetric, one scale per output channel
            kernel_int8   D×F      int8     in −127…127
            kernel_scale  F        float32  absmax / 127;      W ≈ kernel_int8 · kernel_scale
    "nf4"   NormalFloat of QLoRA (Dettmers et al. 2023, arXiv:2305.14314), in blocks of 64 along the input
            kernel_nf4    D/2×F    uint8    codes of row 2i in the low half, of row 2i + 1 in the high half of a byte
            kernel_scale  D/64×F   float32  absmax of the block;  W ≈ NF4[code] · kernel_scale

Each array keeps the logical axes of the dimensions it shares with the kernel, so a shard of the stored arrays is what
a shard of the kernel is stored as, if it cuts no block. Quantising is numpy on the host, dequantising jax.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from grpo_jax.errors import UsageError
from grpo_jax.models.layout import Leaf

Array = jax.Array

SCHEMES = ("none", "int8", "nf4")
BLOCK = 64
"""Inputs that share a scale in "nf4"."""

# Appendix E of QLoRA: quantiles of the normal distribution, 8 below and 7 above an exact zero, scaled to [−1, 1].
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)

_DTYPES = {"kernel_int8": np.int8, "kernel_nf4": np.uint8, "kernel_scale": np.float32}


def stored_leaves(leaf: Leaf, scheme: str) -> tuple[Leaf, ...]:
    """The arrays that a leaf of the base is stored as: itself, or those of a quantised kernel.

    Raises:
        UsageError: the inputs of the kernel do not divide into blocks.
        ValueError: the scheme is unknown.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"quantization {scheme!r} is unknown; it is one of {', '.join(SCHEMES)}.")
    if scheme == "none" or not (leaf.stacked and leaf.name == "kernel"):
        return (leaf,)
    rows, columns = leaf.shape
    if scheme == "int8":
        scale = replace(leaf, name="kernel_scale", shape=(columns,), axes=leaf.axes[1:])
        return replace(leaf, name="kernel_int8"), scale
    if rows % BLOCK:
        raise UsageError(f"learner.quantization: nf4 takes blocks of {BLOCK} inputs, and {leaf.module} has {rows}.")
    return (
        replace(leaf, name="kernel_nf4", shape=(rows // 2, columns)),
        replace(leaf, name="kernel_scale", shape=(rows // BLOCK, columns)),
    )


def stored_dtype(leaf: Leaf, dtype: Any) -> Any:
    """What a leaf out of `stored_leaves` is stored in, where `dtype` is what unquantised ones are stored in."""
    return _DTYPES.get(leaf.name, dtype)


def quantize(kernel_xDxF: np.ndarray, scheme: str) -> dict[str, np.ndarray]:
    """A kernel's stored arrays by name, computed in float32. Beside a value that is not finite, none of its scale is.

    Args:
        kernel_xDxF: (…, in, out), of any float dtype; for "nf4" in is a multiple of 64.
        scheme: "int8" or "nf4".
    """
    wide_xDxF = np.ascontiguousarray(kernel_xDxF, np.float32)
    if scheme == "int8":
        scale_xF = np.max(np.abs(wide_xDxF), axis=-2) / np.float32(127)
        codes_xDxF = np.rint(wide_xDxF / _divisor(scale_xF)[..., None, :])
        return {"kernel_int8": np.clip(codes_xDxF, -127, 127).astype(np.int8), "kernel_scale": scale_xF}
    *lead, rows, columns = wide_xDxF.shape
    blocks = wide_xDxF.reshape(*lead, rows // BLOCK, BLOCK, columns)
    scale = np.max(np.abs(blocks), axis=-2)
    unit = blocks / _divisor(scale)[..., None, :]
    codes = np.zeros(unit.shape, np.uint8)
    # The nearest level is the number of midpoints below. Counted, because a search returns eight bytes a weight.
    for midpoint in (NF4[1:] + NF4[:-1]) / 2:
        codes += unit > midpoint
    pairs = codes.reshape(*lead, rows // 2, 2, columns)
    return {"kernel_nf4": pairs[..., 0, :] | pairs[..., 1, :] << 4, "kernel_scale": scale}


def dequantize(arrays: Mapping[str, Array], scheme: str, dtype: Any) -> Array:
    """The kernel of stored arrays, (…, in, out): computed in float32 or wider, rounded once to the compute dtype."""
    wide = jnp.promote_types(dtype, jnp.float32)
    scale = arrays["kernel_scale"].astype(wide)
    if scheme == "int8":
        return (arrays["kernel_int8"].astype(wide) * scale[..., None, :]).astype(dtype)
    pairs = arrays["kernel_nf4"]
    *lead, half, columns = pairs.shape
    codes = jnp.stack([pairs & 15, pairs >> 4], axis=-2).reshape(*lead, -1, BLOCK, columns)
    levels = jnp.asarray(NF4, wide).at[codes].get(mode="promise_in_bounds")
    return (levels * scale[..., None, :]).reshape(*lead, 2 * half, columns).astype(dtype)


def quantize_params(params: Mapping[str, Any], scheme: str) -> dict[str, Any]:
    """A base as `load_params` would have stored it, from one that is not quantised: a host copy, for tests."""
    flat: dict[tuple[str, ...], Any] = {}
    for path, array in flatten_dict(dict(params)).items():
        if scheme != "none" and path[0] == "layers" and path[-1] == "kernel":
            flat |= {(*path[:-1], name): part for name, part in quantize(np.asarray(array), scheme).items()}
        else:
            flat[path] = array
    return unflatten_dict(flat)


def _divisor(scale: np.ndarray) -> np.ndarray:
    """What is all zero has scale 0, and any divisor will do."""
    return np.where(scale == 0, np.float32(1), scale)
