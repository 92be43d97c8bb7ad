"""Causal attention with rotary positions and grouped key/value heads, in plain XLA operations.

Who may read whom is said by ids, so that a row can hold several prompts, and several completions behind one copy of a
prompt. Shapes: B rows, T tokens (S as keys, Q as a block of queries, M blocks), H query heads, K key/value heads,
G = H/K, h head size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.models.rope import RopeScaling, frequencies

Array = jax.Array

# Longest row whose scores are held at once; longer ones go through `attend_in_blocks`.
LONGEST_WHOLE = 512
# Most slices of keys: each is code of its own to compile (a second on a CPU), and 8 already save 7/16 of the work.
_SPANS = 8


class Tokens(NamedTuple):
    """What says who may read whom: places in the row and the ids of `attention_mask`."""

    index_T: Array
    prompt_ids_BxT: Array
    branch_ids_BxT: Array


def tokens_of(prompt_ids_BxT: Array, branch_ids_BxT: Array) -> Tokens:
    return Tokens(jnp.arange(prompt_ids_BxT.shape[1]), prompt_ids_BxT, branch_ids_BxT)


def attention_mask(prompt_ids_BxT: Array, branch_ids_BxT: Array) -> Array:
    """mask_BxTxT, true where the query (second axis) may read the key (last axis).

    A query reads what does not come after it in the row, belongs to the same prompt, and is either the shared prompt
    (branch 0) or of the query's own branch. So each query reads itself, and no softmax is over nothing.

    Args:
        prompt_ids_BxT: int32, from 1; 0 is padding, which only padding reads.
        branch_ids_BxT: int32, 0 for tokens that every branch of the prompt may read, from 1 for the branches.
    """
    tokens = tokens_of(prompt_ids_BxT, branch_ids_BxT)
    return may_read(tokens, tokens)


def may_read(queries: Tokens, keys: Tokens) -> Array:
    """mask_BxQxS of some queries and some keys of a row, by the rule of `attention_mask`."""
    earlier_QxS = queries.index_T[:, None] >= keys.index_T[None, :]
    same_prompt_BxQxS = queries.prompt_ids_BxT[:, :, None] == keys.prompt_ids_BxT[:, None, :]
    shared_Bx1xS = keys.branch_ids_BxT[:, None, :] == 0
    same_branch_BxQxS = queries.branch_ids_BxT[:, :, None] == keys.branch_ids_BxT[:, None, :]
    return earlier_QxS & same_prompt_BxQxS & (shared_Bx1xS | same_branch_BxQxS)


def rope_tables(
    positions_BxT: Array, head_dim: int, theta: float, dtype: jnp.dtype, scaling: RopeScaling | None = None
) -> tuple[Array, Array]:
    """cos and sin of the rotary angles, BxTx1xh/2, in float32 or the wider compute dtype.

    Su et al. 2021, arXiv:2104.09864. Frequencies, and the factor of cos and sin that YaRN has: see `rope`.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    angle = positions_BxT.astype(wide)[:, :, None, None] * jnp.asarray(frequencies(head_dim, theta, scaling), wide)
    factor = scaling.attention_factor if scaling else 1.0
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


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


def attend_in_blocks(
    q_BxTxHxh: Array, k_BxTxKxh: Array, v_BxTxKxh: Array, tokens: Tokens, *, block: int = 256
) -> Array:
    """`attend` under `attention_mask`, for long rows: scores of `block` queries exist at a time, in both passes.

    Each block of queries keeps nothing for the backward pass but its queries, and computes its scores again there (the
    idea of Rabe and Staats 2021, arXiv:2112.05682, over whole slices of keys). Nothing after a block is read, so blocks
    go in spans of two or more, whose keys end with the span.

    Args:
        tokens: of the whole row, `tokens_of`.
        block: most queries at a time; the blocks of a row have one size.

    Returns:
        out_BxTxHxh, as `attend` does but for the order of sums.
    """
    length = q_BxTxHxh.shape[1]
    count = -(-length // block)
    size = -(-length // count)
    # Padding has prompt id 0 and comes last: no token reads it, and its own results are cut off.
    q_BxTxHxh, k_BxTxKxh, v_BxTxKxh, prompt_ids_BxT, branch_ids_BxT = (
        jnp.pad(x, ((0, 0), (0, count * size - length)) + ((0, 0),) * (x.ndim - 2))
        for x in (q_BxTxHxh, k_BxTxKxh, v_BxTxKxh, tokens.prompt_ids_BxT, tokens.branch_ids_BxT)
    )
    tokens = tokens_of(prompt_ids_BxT, branch_ids_BxT)

    def span(first: int, last: int) -> Array:
        start, end = first * size, last * size

        @jax.checkpoint
        def one_block(queries: tuple[Array, Tokens]) -> Array:
            # Sliced in here, or every span would keep its own copy of its keys for the backward pass.
            keys = Tokens(tokens.index_T[:end], tokens.prompt_ids_BxT[:, :end], tokens.branch_ids_BxT[:, :end])
            q_BxQxHxh, query_tokens = queries
            return attend(q_BxQxHxh, k_BxTxKxh[:, :end], v_BxTxKxh[:, :end], may_read(query_tokens, keys))

        def cut(x_BxTx: Array) -> Array:
            """(M, B, Q, …)"""
            rows, _, *rest = x_BxTx.shape
            return jnp.moveaxis(x_BxTx[:, start:end].reshape(rows, last - first, size, *rest), 1, 0)

        index_MxQ = tokens.index_T[start:end].reshape(-1, size)
        query_tokens = Tokens(index_MxQ, cut(tokens.prompt_ids_BxT), cut(tokens.branch_ids_BxT))
        out_MxBxQxHxh = jax.lax.map(one_block, (cut(q_BxTxHxh), query_tokens))
        out_BxMxQxHxh = jnp.moveaxis(out_MxBxQxHxh, 0, 1)
        return out_BxMxQxHxh.reshape(out_BxMxQxHxh.shape[0], -1, *out_BxMxQxHxh.shape[3:])

    # A loop of one block would be no loop to XLA, which then merges its scores of the two passes and keeps them all.
    step = max(2, -(-count // _SPANS))
    outs = [span(first, min(first + step, count)) for first in range(0, count, step)]
    return jnp.concatenate(outs, axis=1)[:, :length]
