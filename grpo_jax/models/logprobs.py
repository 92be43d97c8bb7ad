"""From hidden states to the log-probabilities of given tokens, without ever holding all logits.

Shapes: S shards of N positions, C of them at a time in M chunks, D hidden, V vocabulary.
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
    hidden_SxNxD: Array,
    targets_SxN: Array,
    mask_SxN: Array | None = None,
    *,
    config: ModelConfig,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Array, Array]:
    """Log-probability of each target under its hidden state, and the entropy of that distribution.

    Only `chunk` rows of logits exist at a time for each of the S shards, and none in the backward pass: memory is
    chunk x V a shard, whatever N is. The gradient is with respect to the hidden states alone: the base is frozen.

    Args:
        params: the base; its head, or its embedding if tied.
        hidden_SxNxD: after the final norm; axis 0 may be sharded over devices. Without it (and then in no other array
            either) there is one shard.
        targets_SxN: int32. An id of the vocabulary's size or more yields NaN.
        mask_SxN: bool, all True by default. A chunk without a True on any shard is not computed and yields 0: put what
            counts first.
        temperature: what logits are divided by, above 0.
        chunk: most positions of a shard at a time; the last chunk is padded.
        entropy_gradient: whether a gradient flows through the entropy, at the cost of one more product.

    Returns:
        logprobs_SxN: float32 or wider.
        entropy_SxN: in nats.
    """
    if temperature <= 0 or chunk < 1:
        raise ValueError(f"temperature {temperature} and chunk {chunk} must be positive")

    if hidden_SxNxD.ndim == 2:
        found = token_logprobs(
            params,
            hidden_SxNxD[None],
            targets_SxN[None],
            None if mask_SxN is None else mask_SxN[None],
            config=config,
            temperature=temperature,
            chunk=chunk,
            entropy_gradient=entropy_gradient,
        )
        return found[0][0], found[1][0]

    count = targets_SxN.shape[1]
    chunk = min(chunk, count)
    if mask_SxN is None:
        mask_SxN = jnp.ones(targets_SxN.shape, bool)

    def in_chunks(x_SxNx: Array) -> Array:
        padding = [(0, 0), (0, -count % chunk)] + [(0, 0)] * (x_SxNx.ndim - 2)
        x_SxMxCx = jnp.pad(x_SxNx, padding).reshape(x_SxNx.shape[0], -1, chunk, *x_SxNx.shape[2:])
        return jnp.moveaxis(x_SxMxCx, 1, 0)

    def in_order(x_MxSxC: Array) -> Array:
        return jnp.moveaxis(x_MxSxC, 0, 1).reshape(targets_SxN.shape[0], -1)[:, :count]

    head = _Head(config.tie_embeddings, temperature, entropy_gradient)
    weights = params["embed"]["embedding"] if head.tied else params["head"]["kernel"]
    logprobs_MxSxC, entropy_MxSxC = _chunked(weights, *map(in_chunks, (hidden_SxNxD, targets_SxN, mask_SxN)), head)
    return in_order(logprobs_MxSxC), in_order(entropy_MxSxC)


class _Head(NamedTuple):
    tied: bool
    """Whether the weights are an embedding, (V, D), or a kernel, (D, V)."""
    temperature: float
    entropy_gradient: bool

    @property
    def axes(self) -> str:
        return "VD" if self.tied else "DV"


class _Scores(NamedTuple):
    """Of a chunk. The slopes are d logprob / d hidden and d entropy / d hidden, of width 0 where not asked for."""

    logprob_SxC: Array
    entropy_SxC: Array
    slope_SxCxD: Array
    entropy_slope_SxCxD: Array


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(
    weights: Array, hidden_MxSxCxD: Array, targets_MxSxC: Array, mask_MxSxC: Array, head: _Head
) -> tuple[Array, Array]:
    """(logprobs, entropy), M×S×C, one chunk after the other; chunks without a True in their mask are 0.

    The gradient is taken where the probabilities are at hand: d logprob / d hidden = (w_target − Σ p_v w_v) /
    temperature costs one more product in the forward pass and D numbers a position to keep, instead of all logits once
    more in the backward pass.
    """
    scores = _forward(weights, hidden_MxSxCxD, targets_MxSxC, mask_MxSxC, head, with_slope=False)
    return scores.logprob_SxC, scores.entropy_SxC


def _chunked_fwd(
    weights: Array, hidden_MxSxCxD: Array, targets_MxSxC: Array, mask_MxSxC: Array, head: _Head
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    scores = _forward(weights, hidden_MxSxCxD, targets_MxSxC, mask_MxSxC, head, with_slope=True)
    return (scores.logprob_SxC, scores.entropy_SxC), (scores.slope_SxCxD, scores.entropy_slope_SxCxD)


def _chunked_bwd(head: _Head, slopes: tuple[Array, Array], gradients: tuple[Array, Array]) -> tuple[Any, ...]:
    """The base is frozen: hidden states alone have a gradient."""
    slope, entropy_slope = slopes
    hidden = gradients[0][..., None] * slope
    if head.entropy_gradient:
        hidden += gradients[1][..., None] * entropy_slope
    return None, hidden.astype(slope.dtype), None, None


_chunked.defvjp(_chunked_fwd, _chunked_bwd)


def _forward(
    weights: Array,
    hidden_MxSxCxD: Array,
    targets_MxSxC: Array,
    mask_MxSxC: Array,
    head: _Head,
    *,
    with_slope: bool,
) -> _Scores:
    dtype = hidden_MxSxCxD.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    weights = jnp.asarray(weights, dtype)
    size = hidden_MxSxCxD.shape[-1]
    slope_size, entropy_size = size if with_slope else 0, size if with_slope and head.entropy_gradient else 0

    def mean_weight(factor_SxCxV: Array) -> Array:
        return jnp.einsum(f"SCV,{head.axes}->SCD", factor_SxCxV.astype(dtype), weights, preferred_element_type=wide)

    def score(hidden_SxCxD: Array, targets_SxC: Array) -> _Scores:
        scores_SxCxV = jnp.einsum(f"SCD,{head.axes}->SCV", hidden_SxCxD, weights, preferred_element_type=wide)
        scores_SxCxV /= head.temperature
        scores_SxCxV -= jnp.max(scores_SxCxV, axis=-1, keepdims=True)
        exps_SxCxV = jnp.exp(scores_SxCxV)
        total_SxC = jnp.sum(exps_SxCxV, axis=-1)
        target_SxC = jnp.take_along_axis(scores_SxCxV, targets_SxC[..., None], axis=-1)[..., 0]
        entropy_SxC = jnp.log(total_SxC) - jnp.sum(exps_SxCxV * scores_SxCxV, axis=-1) / total_SxC
        slope_SxCxD, entropy_slope_SxCxD = empty(targets_SxC.shape)
        if slope_size:
            probs_SxCxV = exps_SxCxV / total_SxC[..., None]
            own_SxCxD = weights[targets_SxC] if head.tied else jnp.moveaxis(weights[:, targets_SxC], 0, -1)
            slope_SxCxD = ((own_SxCxD.astype(wide) - mean_weight(probs_SxCxV)) / head.temperature).astype(dtype)
        if entropy_size:
            # d H / d score_v = −p_v (log p_v + H)
            log_probs_SxCxV = scores_SxCxV - jnp.log(total_SxC)[..., None]
            pull_SxCxV = probs_SxCxV * (log_probs_SxCxV + entropy_SxC[..., None])
            entropy_slope_SxCxD = (-mean_weight(pull_SxCxV) / head.temperature).astype(dtype)
        return _Scores(target_SxC - jnp.log(total_SxC), entropy_SxC, slope_SxCxD, entropy_slope_SxCxD)

    def empty(shape: tuple[int, ...]) -> tuple[Array, Array]:
        return jnp.zeros((*shape, slope_size), dtype), jnp.zeros((*shape, entropy_size), dtype)

    def skip(hidden_SxCxD: Array, targets_SxC: Array) -> _Scores:
        zeros_SxC = jnp.zeros(targets_SxC.shape, wide)
        return _Scores(zeros_SxC, zeros_SxC, *empty(targets_SxC.shape))

    def score_used(chunked: tuple[Array, Array, Array]) -> _Scores:
        hidden_SxCxD, targets_SxC, mask_SxC = chunked
        return jax.lax.cond(jnp.any(mask_SxC), score, skip, hidden_SxCxD, targets_SxC)

    return jax.lax.map(score_used, (hidden_MxSxCxD, targets_MxSxC, mask_MxSxC))
