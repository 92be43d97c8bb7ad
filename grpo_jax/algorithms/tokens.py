"""What an objective sees and what it returns: arrays over the N token slots of a micro-batch, and sums per sample."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# exp(20) ≈ 5e8: far beyond every clip range, far below overflow in float32.
_MAX_LOG_RATIO = 20.0


class TokenArrays(NamedTuple):
    """N trained tokens. `mask` is False for padding; the rest is undefined there, NaN included.

    μ is the sampler, π the current policy, π_old the policy when the batch arrived.
    """

    logprob_N: jax.Array  # log π, the only differentiable one
    sampler_logprob_N: jax.Array  # log μ, as stored with the rollout
    anchor_logprob_N: jax.Array  # what ratios are against: log μ (anchor sampler) or log π_old (anchor recomputed)
    proximal_logprob_N: jax.Array  # log π_old if it was recomputed, else log π without a gradient
    advantage_N: jax.Array
    mask_N: jax.Array  # bool
    sample_N: jax.Array  # int32, 0 … N − 1: which tokens are of one sample; all of them are in this micro-batch
    staleness_N: jax.Array  # float, optimiser updates between the sample's policy and the start of the step
    update: jax.Array  # float scalar, optimiser updates since the start of the step


class LossTerms(NamedTuple):
    """What an objective returns. The trainer minimises Σ weight · term, whatever the objective.

    The two flags feed the metrics `clip_ratio/low` and `clip_ratio/high`; an objective without a clip leaves them out.
    """

    term_N: jax.Array  # 0 where masked
    clipped_low_N: jax.Array | None = None  # bool: the lower bound of the ratio decided this term
    clipped_high_N: jax.Array | None = None


def masked_log_ratio(tokens: TokenArrays, numerator_N: jax.Array, denominator_N: jax.Array) -> jax.Array:
    """numerator − denominator, 0 where masked.

    Masked by `where` before the subtraction, so that NaN in padding reaches neither values nor gradients.
    """
    return jnp.where(tokens.mask_N, numerator_N, 0.0) - jnp.where(tokens.mask_N, denominator_N, 0.0)


def log_ratio(tokens: TokenArrays) -> jax.Array:
    """ℓ = log π − log anchor, 0 where masked; differentiable."""
    return masked_log_ratio(tokens, tokens.logprob_N, tokens.anchor_logprob_N)


def clamped_exp(x_N: jax.Array) -> jax.Array:
    """exp of x clamped to ±20, without a gradient outside. What is summed or averaged is so before it comes here."""
    return jnp.exp(jnp.clip(x_N, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def masked_advantage(tokens: TokenArrays) -> jax.Array:
    return jnp.where(tokens.mask_N, tokens.advantage_N, 0.0)


def masked_logprob(tokens: TokenArrays) -> jax.Array:
    return jnp.where(tokens.mask_N, tokens.logprob_N, 0.0)


def bounded(x_N: jax.Array, low: float, high: float) -> jax.Array:
    """x within [low, high]. At a bound the gradient is x's, as torch's clamp has it, where jnp.clip's is a half."""
    return jnp.where(x_N < low, low, jnp.where(x_N > high, high, x_N))


def sample_sum(tokens: TokenArrays, x_N: jax.Array) -> jax.Array:
    """For each token the sum of x over its sample's tokens; 0 where masked."""
    segments = tokens.mask_N.shape[0]
    sample_N = jnp.where(tokens.mask_N, tokens.sample_N, 0)
    total_S = jax.ops.segment_sum(jnp.where(tokens.mask_N, x_N, 0.0), sample_N, num_segments=segments)
    return jnp.where(tokens.mask_N, total_S[sample_N], 0.0)


def sample_mean(tokens: TokenArrays, x_N: jax.Array) -> jax.Array:
    """For each token the mean of x over its sample's tokens; 0 where masked."""
    return sample_sum(tokens, x_N) / jnp.maximum(sample_sum(tokens, jnp.ones_like(x_N)), 1.0)
