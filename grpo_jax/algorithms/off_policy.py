"""Off-policy weights and masks: factors of a token's loss that correct for the sampler not being the learner.

Each function returns a factor per token, without a gradient, 0 where masked. ρ = exp(log π_prox − log μ) is the
ratio of the learner's own probability (π_old if recomputed, else the current π) to the sampler's. A factor never
changes a denominator: what is masked out still counts in the mean.
"""

import jax
import jax.numpy as jnp

from grpo_jax.algorithms.tokens import TokenArrays, clamped_exp, masked_log_ratio, sample_mean, sample_sum


def token_tis(tokens: TokenArrays, *, cap: float) -> jax.Array:
    """min(ρ, cap): truncated importance sampling, each token on its own."""
    return _factor(tokens, jnp.minimum(_ratio(tokens), cap))


def sequence_tis(tokens: TokenArrays, *, cap: float) -> jax.Array:
    """min(Π_t ρ, cap), one factor for all tokens of a sample."""
    return _factor(tokens, jnp.minimum(_product(tokens), cap))


def token_mis(tokens: TokenArrays, *, low: float, high: float) -> jax.Array:
    """ρ inside [low, high], else 0 (IcePop, arXiv 2510.18855)."""
    ratio_N = _ratio(tokens)
    return _factor(tokens, jnp.where((ratio_N >= low) & (ratio_N <= high), ratio_N, 0.0))


def sequence_mis(tokens: TokenArrays, *, cap: float) -> jax.Array:
    """Π_t ρ if it is at most cap, else 0 for the whole sample (arXiv 2510.26788)."""
    product_N = _product(tokens)
    return _factor(tokens, jnp.where(product_N <= cap, product_N, 0.0))


def geometric_mask(tokens: TokenArrays, *, low: float, high: float) -> jax.Array:
    """1 for samples whose geometric mean of ρ is inside [low, high], else 0 (arXiv 2512.23075)."""
    mean_N = clamped_exp(sample_mean(tokens, _log_ratio(tokens)))
    return _factor(tokens, ((mean_N >= low) & (mean_N <= high)).astype(mean_N.dtype))


def outlier_veto(tokens: TokenArrays, *, low: float, high: float) -> jax.Array:
    """0 for samples with a token whose ρ is below low or above high, else 1."""
    ratio_N = _ratio(tokens)
    outside_N = sample_sum(tokens, ((ratio_N < low) | (ratio_N > high)).astype(ratio_N.dtype))
    return _factor(tokens, (outside_N == 0).astype(ratio_N.dtype))


def _log_ratio(tokens: TokenArrays) -> jax.Array:
    return masked_log_ratio(tokens, tokens.proximal_logprob_N, tokens.sampler_logprob_N)


def _ratio(tokens: TokenArrays) -> jax.Array:
    return clamped_exp(_log_ratio(tokens))


def _product(tokens: TokenArrays) -> jax.Array:
    return clamped_exp(sample_sum(tokens, _log_ratio(tokens)))


def _factor(tokens: TokenArrays, factor_N: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(jnp.where(tokens.mask_N, factor_N, 0.0))
