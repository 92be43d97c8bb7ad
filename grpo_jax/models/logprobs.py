"""From hidden states to the log-probabilities of given tokens, without ever holding all logits.

Shapes: N positions, C of them at a time, D hidden, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.models.config import ModelConfig

Array = jax.Array


def logits(params: Mapping[str, Any], hidden_xD: Array, config: ModelConfig) -> Array:
    """Raw logits, (…, V), accumulated and returned in float32 or the wider dtype of the hidden states."""
    wide = jnp.promote_types(hidden_xD.dtype, jnp.float32)
    if config.tie_embeddings:
        weights, pattern = params["embed"]["embedding"], "...D,VD->...V"
    else:
        weights, pattern = params["head"]["kernel"], "...D,DV->...V"
    return jnp.einsum(pattern, hidden_xD, weights.astype(hidden_xD.dtype), preferred_element_type=wide)


def token_logprobs(
    params: Mapping[str, Any],
    hidden_NxD: Array,
    targets_N: Array,
    mask_N: Array | None = None,
    *,
    config: ModelConfig,
    temperature: float,
    chunk: int,
) -> tuple[Array, Array]:
    """Log-probability of each target under its hidden state, and the entropy of that distribution.

    Only `chunk` rows of logits exist at a time, in the backward pass too, where they are computed again: memory is
    chunk x V whatever N is.

    Args:
        params: the base; its head, or its embedding if tied.
        hidden_NxD: after the final norm.
        targets_N: int32. An id of the vocabulary's size or more yields NaN.
        mask_N: bool, all True by default. A chunk without a True is not computed and yields 0: put what counts first.
        temperature: what logits are divided by, above 0.
        chunk: most positions at a time; the last chunk is padded.

    Returns:
        logprobs_N: float32 or wider.
        entropy_N: in nats, for metrics: no gradient flows through it.
    """
    if temperature <= 0 or chunk < 1:
        raise ValueError(f"temperature {temperature} and chunk {chunk} must be positive")

    count = targets_N.shape[0]
    chunk = min(chunk, count)

    @jax.checkpoint
    def score(hidden_CxD: Array, targets_C: Array) -> tuple[Array, Array]:
        scores_CxV = logits(params, hidden_CxD, config) / temperature
        scores_CxV -= jax.lax.stop_gradient(jnp.max(scores_CxV, axis=-1, keepdims=True))
        exps_CxV = jnp.exp(scores_CxV)
        total_C = jnp.sum(exps_CxV, axis=-1)
        target_C = jnp.take_along_axis(scores_CxV, targets_C[:, None], axis=-1)[:, 0]
        entropy_C = jnp.log(total_C) - jnp.sum(exps_CxV * scores_CxV, axis=-1) / total_C
        return target_C - jnp.log(total_C), jax.lax.stop_gradient(entropy_C)

    def skip(hidden_CxD: Array, targets_C: Array) -> tuple[Array, Array]:
        zeros_C = jnp.zeros(targets_C.shape, jnp.promote_types(hidden_CxD.dtype, jnp.float32))
        return zeros_C, zeros_C

    def score_used(chunked: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        hidden_CxD, targets_C, mask_C = chunked
        return jax.lax.cond(jnp.any(mask_C), score, skip, hidden_CxD, targets_C)

    if mask_N is None:
        mask_N = jnp.ones(count, bool)
    padding = -count % chunk
    hidden_MxCxD = jnp.pad(hidden_NxD, ((0, padding), (0, 0))).reshape(-1, chunk, hidden_NxD.shape[1])
    targets_MxC = jnp.pad(targets_N, (0, padding)).reshape(-1, chunk)
    mask_MxC = jnp.pad(mask_N, (0, padding)).reshape(-1, chunk)
    logprobs_MxC, entropy_MxC = jax.lax.map(score_used, (hidden_MxCxD, targets_MxC, mask_MxC))
    return logprobs_MxC.reshape(-1)[:count], entropy_MxC.reshape(-1)[:count]
