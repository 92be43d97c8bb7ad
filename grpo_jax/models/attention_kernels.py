"""Fused attention kernels that come with jax, called as rows of segments: one id a token, equal ids read each other.

Both are causal, compute scores block by block in both passes (Dao 2023, arXiv:2307.08691) and so never hold T×T. jax is
imported as far as a kernel needs it when it is first traced: Pallas takes half a second, a platform may lack one of
the two, and jax 0.12 warns at the import of the GPU one. Shapes: see `attention`.
"""

import math

import jax
import jax.numpy as jnp

Array = jax.Array

FLASH_MODULE = "jax.experimental.pallas.ops.gpu.attention"
SPLASH_MODULE = "jax.experimental.pallas.ops.tpu.splash_attention"
# Queries and keys of a tile of 16 KiB: a tile of queries and two stages of keys and values are 80 KiB, which the shared
# memory of every GPU since Ampere holds.
_FLASH_TILE_BYTES = 16 * 1024


def flash(q_BxTxHxh: Array, k_BxTxKxh: Array, v_BxTxKxh: Array, segments_BxT: Array, *, interpret: bool) -> Array:
    """Pallas's GPU kernel with its own backward pass; out_BxTxHxh. Key heads are repeated: it knows no groups.

    Products of float32 are in TF32, which is Triton's default.
    """
    from jax.experimental.pallas.ops.gpu import attention as pallas

    _, length, heads, size = q_BxTxHxh.shape
    repeats = heads // k_BxTxKxh.shape[2]
    k_BxTxHxh, v_BxTxHxh = (jnp.repeat(x, repeats, axis=2) for x in (k_BxTxKxh, v_BxTxKxh))
    block = min(128, _FLASH_TILE_BYTES // (size * q_BxTxHxh.dtype.itemsize))
    block = math.gcd(block, length)
    # The backward pass holds twice as many tiles at a time.
    backward = min(32, block)
    blocks = pallas.BlockSizes(
        block_q=block,
        block_k=block,
        block_q_dkv=backward,
        block_kv_dkv=backward,
        block_q_dq=backward,
        block_kv_dq=backward,
    )
    return pallas.mha(
        q_BxTxHxh,
        k_BxTxHxh,
        v_BxTxHxh,
        segments_BxT,
        sm_scale=size**-0.5,
        causal=True,
        block_sizes=blocks,
        interpret=interpret,
    )


def splash(q_BxTxHxh: Array, k_BxTxKxh: Array, v_BxTxKxh: Array, segments_BxT: Array, *, interpret: bool) -> Array:
    """Pallas's TPU kernel, with the heads of a group on one key head; out_BxTxHxh."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as pallas
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    rows, length, heads, size = q_BxTxHxh.shape
    kv_heads = k_BxTxKxh.shape[2]
    block = math.gcd(512, length)
    kernel = pallas.make_splash_mqa_single_device(
        masks.MultiHeadMask([masks.CausalMask((length, length))] * (heads // kv_heads)),
        block_sizes=pallas.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        interpret=interpret,
    )
    # The kernel does not scale. A scale rounded to bfloat16 would be a temperature of its own, up to 0.4 % off.
    q_BxTxHxh = (q_BxTxHxh.astype(jnp.float32) * size**-0.5).astype(q_BxTxHxh.dtype)
    q_BxKxGxTxh = q_BxTxHxh.reshape(rows, length, kv_heads, -1, size).transpose(0, 2, 3, 1, 4)
    k_BxKxTxh, v_BxKxTxh = (x.transpose(0, 2, 1, 3) for x in (k_BxTxKxh, v_BxTxKxh))
    over_key_heads = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    segments = pallas.SegmentIds(segments_BxT, segments_BxT)
    out_BxKxGxTxh = jax.vmap(over_key_heads)(q_BxKxGxTxh, k_BxKxTxh, v_BxKxTxh, segments)
    return out_BxKxGxTxh.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, size)
