"""Objectives: per-token loss terms. The trainer minimises Σ weight · term, whatever the objective."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# exp(20) ≈ 5e8: far beyond every clip range, far below overflow in float32.
_MAX_LOG_RATIO = 20.0


class TokenArrays(NamedTuple):
    """What an objective sees of N trained tokens. `mask` is False for padding; the rest is undefined there."""

    logprob_N: jax.Array  # under the current policy, differentiable
    sampler_logprob_N: jax.Array  # as stored with the rollout
    advantage_N: jax.Array
    mask_N: jax.Array  # bool


def log_ratio(tokens: TokenArrays) -> jax.Array:
    """log π − log μ, clamped to ±20; 0 (without a gradient) where masked, so that NaN in padding cannot spread."""
    logprob_N = jnp.where(tokens.mask_N, tokens.logprob_N, 0.0)
    sampler_N = jnp.where(tokens.mask_N, tokens.sampler_logprob_N, 0.0)
    return jnp.clip(logprob_N - sampler_N, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def dual_clip(tokens: TokenArrays, *, clip_low: float, clip_high: float, cap: float) -> jax.Array:
    """PPO's clipped surrogate with a cap for negative advantages.

    −min(r A, clip(r, 1 − ε_low, 1 + ε_high) A) (arXiv 1707.06347, 2503.14476), and for A < 0 no larger than −cap · A
    (arXiv 1912.09729): against a stale sampler the plain surrogate is unbounded there.

    Returns:
      Loss term per token, N; 0 where masked.
    """
    ratio_N = jnp.exp(log_ratio(tokens))
    advantage_N = jnp.where(tokens.mask_N, tokens.advantage_N, 0.0)
    # `where` instead of jnp.clip, whose gradient at the bound is a half (torch's is one).
    clipped_N = jnp.where(
        ratio_N < 1 - clip_low, 1 - clip_low, jnp.where(ratio_N > 1 + clip_high, 1 + clip_high, ratio_N)
    )
    unclipped_N = ratio_N * advantage_N
    surrogate_N = jnp.where(clipped_N * advantage_N < unclipped_N, clipped_N * advantage_N, unclipped_N)
    floor_N = cap * advantage_N
    capped_N = jnp.where((advantage_N < 0) & (surrogate_N < floor_N), floor_N, surrogate_N)
    return jnp.where(tokens.mask_N, -capped_N, 0.0)
