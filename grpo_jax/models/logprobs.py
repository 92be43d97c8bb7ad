"""From hidden states to the log-probabilities of given tokens, without ever holding all logits.

Shapes: N positions, C of them at a time, D hidden, V vocabulary.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

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

    Only `chunk` rows of logits exist at a time, and none in the backward pass: memory is chunk x V whatever N is. The
    gradient is with respect to the hidden states alone: the base is frozen.

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
    if mask_N is None:
        mask_N = jnp.ones(count, bool)
    padding = -count % chunk
    hidden_MxCxD = jnp.pad(hidden_NxD, ((0, padding), (0, 0))).reshape(-1, chunk, hidden_NxD.shape[1])
    targets_MxC = jnp.pad(targets_N, (0, padding)).reshape(-1, chunk)
    mask_MxC = jnp.pad(mask_N, (0, padding)).reshape(-1, chunk)
    head = _Head(config.tie_embeddings, temperature)
    weights = params["embed"]["embedding"] if head.tied else params["head"]["kernel"]
    logprobs_MxC, entropy_MxC = _chunked(weights, hidden_MxCxD, targets_MxC, mask_MxC, head)
    return logprobs_MxC.reshape(-1)[:count], entropy_MxC.reshape(-1)[:count]


class _Head(NamedTuple):
    tied: bool
    """Whether the weights are an embedding, (V, D), or a kernel, (D, V)."""
    temperature: float

    @property
    def axes(self) -> str:
        return "VD" if self.tied else "DV"


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(
    weights: Array, hidden_MxCxD: Array, targets_MxC: Array, mask_MxC: Array, head: _Head
) -> tuple[Array, Array]:
    """(logprobs, entropy), M×C, one chunk after the other; chunks without a True in their mask are 0.

    The gradient is taken where the probabilities are at hand: d logprob / d hidden = (w_target − Σ p_v w_v) /
    temperature costs one more product in the forward pass and D numbers a position to keep, instead of all logits once
    more in the backward pass.
    """
    return _forward(weights, hidden_MxCxD, targets_MxC, mask_MxC, head, with_slope=False)[:2]


def _chunked_fwd(
    weights: Array, hidden_MxCxD: Array, targets_MxC: Array, mask_MxC: Array, head: _Head
) -> tuple[tuple[Array, Array], Array]:
    logprobs_MxC, entropy_MxC, slope_MxCxD = _forward(
        weights, hidden_MxCxD, targets_MxC, mask_MxC, head, with_slope=True
    )
    return (logprobs_MxC, entropy_MxC), slope_MxCxD


def _chunked_bwd(head: _Head, slope_MxCxD: Array, gradients: tuple[Array, Array]) -> tuple[Any, ...]:
    """The base is frozen and entropy is a metric: hidden states alone have a gradient."""
    return None, (gradients[0][..., None] * slope_MxCxD).astype(slope_MxCxD.dtype), None, None


_chunked.defvjp(_chunked_fwd, _chunked_bwd)


def _forward(
    weights: Array,
    hidden_MxCxD: Array,
    targets_MxC: Array,
    mask_MxC: Array,
    head: _Head,
    *,
    with_slope: bool,
) -> tuple[Array, Array, Array]:
    wide = jnp.promote_types(hidden_MxCxD.dtype, jnp.float32)
    weights = jnp.asarray(weights, hidden_MxCxD.dtype)
    slope_size = hidden_MxCxD.shape[-1] if with_slope else 0

    def score(hidden_CxD: Array, targets_C: Array) -> tuple[Array, Array, Array]:
        scores_CxV = jnp.einsum(f"CD,{head.axes}->CV", hidden_CxD, weights, preferred_element_type=wide)
        scores_CxV /= head.temperature
        scores_CxV -= jnp.max(scores_CxV, axis=-1, keepdims=True)
        exps_CxV = jnp.exp(scores_CxV)
        total_C = jnp.sum(exps_CxV, axis=-1)
        target_C = jnp.take_along_axis(scores_CxV, targets_C[:, None], axis=-1)[:, 0]
        entropy_C = jnp.log(total_C) - jnp.sum(exps_CxV * scores_CxV, axis=-1) / total_C
        slope_CxD = jnp.zeros((targets_C.shape[0], 0), hidden_CxD.dtype)
        if with_slope:
            probs_CxV = (exps_CxV / total_C[:, None]).astype(hidden_CxD.dtype)
            mean_CxD = jnp.einsum(f"CV,{head.axes}->CD", probs_CxV, weights, preferred_element_type=wide)
            own_CxD = weights[targets_C] if head.tied else weights[:, targets_C].T
            slope_CxD = ((own_CxD.astype(wide) - mean_CxD) / head.temperature).astype(hidden_CxD.dtype)
        return target_C - jnp.log(total_C), entropy_C, slope_CxD

    def skip(hidden_CxD: Array, targets_C: Array) -> tuple[Array, Array, Array]:
        zeros_C = jnp.zeros(targets_C.shape, wide)
        return zeros_C, zeros_C, jnp.zeros((targets_C.shape[0], slope_size), hidden_CxD.dtype)

    def score_used(chunked: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        hidden_CxD, targets_C, mask_C = chunked
        return jax.lax.cond(jnp.any(mask_C), score, skip, hidden_CxD, targets_C)

    return jax.lax.map(score_used, (hidden_MxCxD, targets_MxC, mask_MxC))
