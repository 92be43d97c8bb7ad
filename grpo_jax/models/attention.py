"""Causal attention with rotary positions and grouped key/value heads, in plain XLA operations.

Who may read whom is said by ids, so that a row can hold several prompts, and several completions behind one copy of a
prompt. Shapes: B rows, T tokens (S as keys), H query heads, K key/value heads, G = H/K, h head size.
"""

import jax
import jax.numpy as jnp

Array = jax.Array


def attention_mask(prompt_ids_BxT: Array, branch_ids_BxT: Array) -> Array:
    """mask_BxTxT, true where the query (second axis) may read the key (last axis).

    A query reads what does not come after it in the row, belongs to the same prompt, and is either the shared prompt
    (branch 0) or of the query's own branch. So each query reads itself, and no softmax is over nothing.

    Args:
        prompt_ids_BxT: int32, from 1; 0 is padding, which only padding reads.
        branch_ids_BxT: int32, 0 for tokens that every branch of the prompt may read, from 1 for the branches.
    """
    index_T = jnp.arange(prompt_ids_BxT.shape[1])
    earlier_TxT = index_T[:, None] >= index_T[None, :]
    same_prompt_BxTxT = prompt_ids_BxT[:, :, None] == prompt_ids_BxT[:, None, :]
    shared_Bx1xT = branch_ids_BxT[:, None, :] == 0
    same_branch_BxTxT = branch_ids_BxT[:, :, None] == branch_ids_BxT[:, None, :]
    return earlier_TxT & same_prompt_BxTxT & (shared_Bx1xT | same_branch_BxTxT)


def rope_tables(positions_BxT: Array, head_dim: int, theta: float, dtype: jnp.dtype) -> tuple[Array, Array]:
    """cos and sin of the rotary angles, BxTx1xh/2, in float32 or the wider compute dtype.

    Su et al. 2021, arXiv:2104.09864; frequencies theta^(-2i/head_dim).
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=wide) / head_dim)
    angle = positions_BxT.astype(wide)[:, :, None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x_BxTxNxh: Array, tables: tuple[Array, Array]) -> Array:
    """Rotates pairs (i, i + h/2), the layout of Hugging Face checkpoints. Computed in the tables' dtype."""
    cos, sin = tables
    low, high = jnp.split(x_BxTxNxh.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x_BxTxNxh.dtype)


def attend(q_BxTxHxh: Array, k_BxSxKxh: Array, v_BxSxKxh: Array, mask_BxTxS: Array) -> Array:
    """softmax(q kᵀ / sqrt(h)) v, BxTxHxh, each group of H/K query heads on one key/value head.

    Scores and softmax are in float32 (or wider), products in the inputs' dtype.
    """
    rows, length, heads, size = q_BxTxHxh.shape
    kv_heads = k_BxSxKxh.shape[2]
    wide = jnp.promote_types(q_BxTxHxh.dtype, jnp.float32)
    q_BxTxKxGxh = q_BxTxHxh.reshape(rows, length, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("BTKGh,BSKh->BKGTS", q_BxTxKxGxh, k_BxSxKxh, preferred_element_type=wide) * size**-0.5
    scores = jnp.where(mask_BxTxS[:, None, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BxSxKxh.dtype)
    return jnp.einsum("BKGTS,BSKh->BTKGh", weights, v_BxSxKxh).reshape(rows, length, heads, size)
