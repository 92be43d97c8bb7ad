"""Policy losses: per-token terms of the objectives in the literature. Each is one function and one line in `registry`.

Every function takes `TokenArrays` and its own numbers, and returns `LossTerms` to be minimised. r = exp ℓ is the ratio
to the anchor, A the advantage, sg a stopped gradient.
"""

import jax
import jax.numpy as jnp

from grpo_jax.algorithms.tokens import (
    LossTerms,
    TokenArrays,
    bounded,
    clamped_exp,
    log_ratio,
    masked_advantage,
    masked_log_ratio,
    masked_logprob,
    sample_mean,
)

_stop = jax.lax.stop_gradient


def ppo_clip(tokens: TokenArrays, *, clip_low: float, clip_high: float) -> LossTerms:
    """−min(r A, clip(r, 1 − ε_low, 1 + ε_high) A) (PPO, arXiv 1707.06347; two bounds: DAPO, arXiv 2503.14476)."""
    return _clipped(tokens, clamped_exp(log_ratio(tokens)), clip_low, clip_high)


def dual_clip(tokens: TokenArrays, *, clip_low: float, clip_high: float, cap: float) -> LossTerms:
    """`ppo_clip`, and for A < 0 no larger than −cap · A (arXiv 1912.09729).

    Against a stale sampler the plain surrogate is unbounded there.
    """
    ratio_N, advantage_N = clamped_exp(log_ratio(tokens)), masked_advantage(tokens)
    plain = _clipped(tokens, ratio_N, clip_low, clip_high)
    over_N = (advantage_N < 0) & (plain.term_N > -cap * advantage_N)
    clipped_high_N = over_N | ((advantage_N > 0) & (ratio_N > 1 + clip_high))
    return LossTerms(jnp.where(over_N, -cap * advantage_N, plain.term_N), plain.clipped_low_N, clipped_high_N)


def cispo(tokens: TokenArrays, *, low: float, high: float) -> LossTerms:
    """−sg(clip(r, low, high)) A log π (CISPO, arXiv 2506.13585; ScaleRL, arXiv 2510.13786). No token loses its
    gradient: the bounds limit its weight."""
    ratio_N = _stop(clamped_exp(log_ratio(tokens)))
    term_N = -bounded(ratio_N, low, high) * masked_advantage(tokens) * masked_logprob(tokens)
    return LossTerms(term_N, tokens.mask_N & (ratio_N < low), tokens.mask_N & (ratio_N > high))


def reinforce_clip(tokens: TokenArrays, *, clip_high: float) -> LossTerms:
    """−sg(min(r, 1 + ε_high)) A log π (arXiv 2509.19128): REINFORCE with a truncated importance weight."""
    ratio_N = _stop(clamped_exp(log_ratio(tokens)))
    term_N = -jnp.minimum(ratio_N, 1 + clip_high) * masked_advantage(tokens) * masked_logprob(tokens)
    return LossTerms(term_N, None, tokens.mask_N & (ratio_N > 1 + clip_high))


def gspo(tokens: TokenArrays, *, clip_low: float, clip_high: float) -> LossTerms:
    """`ppo_clip` with the sequence ratio s = exp(mean_t ℓ) in place of r (arXiv 2507.18071).

    In the paper's token form sg(s) · exp(log π − sg(log π)), whose value is s and whose gradient per token is s ∇log π.
    Under the aggregation `sequence_mean` that is the gradient of the sequence form.
    """
    mean_N = _stop(sample_mean(tokens, log_ratio(tokens)))
    sequence_N, logprob_N = clamped_exp(mean_N), masked_logprob(tokens)
    # Where the exponent is clamped the sequence form has no gradient; its token form must not have one either.
    ratio_N = jnp.where(jnp.exp(mean_N) == sequence_N, sequence_N * jnp.exp(logprob_N - _stop(logprob_N)), sequence_N)
    return _clipped(tokens, ratio_N, clip_low, clip_high)


def sapo(tokens: TokenArrays, *, tau_positive: float, tau_negative: float) -> LossTerms:
    """−(4/τ) σ(τ (r − 1)) A, τ by the sign of A (arXiv 2511.20347): a soft gate instead of a clip."""
    advantage_N = masked_advantage(tokens)
    tau_N = jnp.where(advantage_N > 0, tau_positive, tau_negative)
    gate_N = 4 / tau_N * jax.nn.sigmoid(tau_N * (clamped_exp(log_ratio(tokens)) - 1))
    return LossTerms(-gate_N * advantage_N)


def decoupled_ppo(tokens: TokenArrays, *, clip_low: float, clip_high: float, cap: float) -> LossTerms:
    """−sg(min(π_old/μ, cap)) · min(u A, clip(u) A), u = π/π_old (arXiv 2110.00641, 2505.24298).

    The importance weight corrects for the sampler, the clip bounds the distance from the proximal policy π_old.
    """
    return _decoupled(tokens, _stop(tokens.proximal_logprob_N), clip_low, clip_high, cap)


def a3po(tokens: TokenArrays, *, clip_low: float, clip_high: float, cap: float) -> LossTerms:
    """`decoupled_ppo` with log π_old := (1 − α) log μ + α sg(log π) instead of a forward pass (arXiv 2512.06547).

    α = (v_prox − v_sample) / (v_now − v_sample), versions counted in optimiser updates and v_prox the one at the start
    of the step; 0 for samples of that very version.
    """
    stale_N = jnp.where(tokens.mask_N, tokens.staleness_N, 0.0)
    alpha_N = jnp.where(stale_N > 0, stale_N / jnp.where(stale_N > 0, stale_N + tokens.update, 1.0), 0.0)
    proximal_N = (1 - alpha_N) * jnp.where(tokens.mask_N, tokens.sampler_logprob_N, 0.0)
    proximal_N += alpha_N * _stop(masked_logprob(tokens))
    return _decoupled(tokens, proximal_N, clip_low, clip_high, cap)


def dppo_tv(tokens: TokenArrays, *, delta: float, tau: float) -> LossTerms:
    """−1[keep] A r + τ ℓ²: a trust region in probability space instead of a clip of the ratio (arXiv 2602.04879).

    A token is dropped when it has moved away already by more than δ in the direction that A pushes it:
    A > 0 and p − p_μ > δ, or A < 0 and p − p_μ < −δ.
    """
    advantage_N, log_ratio_N = masked_advantage(tokens), log_ratio(tokens)
    sampler_N = jnp.exp(jnp.where(tokens.mask_N, tokens.sampler_logprob_N, 0.0))
    moved_N = _stop(jnp.exp(masked_logprob(tokens))) - sampler_N
    high_N, low_N = (advantage_N > 0) & (moved_N > delta), (advantage_N < 0) & (moved_N < -delta)
    surrogate_N = jnp.where(high_N | low_N, 0.0, advantage_N * clamped_exp(log_ratio_N))
    return LossTerms(tau * jnp.square(log_ratio_N) - surrogate_N, low_N, high_N)


def importance_sampling(tokens: TokenArrays) -> LossTerms:
    """−sg(r) A log π: the policy gradient under the sampler's distribution, with nothing to bound its variance."""
    ratio_N = _stop(clamped_exp(log_ratio(tokens)))
    return LossTerms(-ratio_N * masked_advantage(tokens) * masked_logprob(tokens))


def _clipped(tokens: TokenArrays, ratio_N: jax.Array, clip_low: float, clip_high: float) -> LossTerms:
    """PPO's pessimistic surrogate of a ratio; a flag where a bound took the gradient."""
    advantage_N = masked_advantage(tokens)
    plain_N = ratio_N * advantage_N
    clipped_N = bounded(ratio_N, 1 - clip_low, 1 + clip_high) * advantage_N
    cut_N = clipped_N < plain_N
    term_N = -jnp.where(cut_N, clipped_N, plain_N)
    return LossTerms(jnp.where(tokens.mask_N, term_N, 0.0), cut_N & (advantage_N < 0), cut_N & (advantage_N > 0))


def _decoupled(tokens: TokenArrays, proximal_N: jax.Array, clip_low: float, clip_high: float, cap: float) -> LossTerms:
    weight_N = jnp.minimum(clamped_exp(masked_log_ratio(tokens, proximal_N, tokens.sampler_logprob_N)), cap)
    ratio_N = clamped_exp(masked_log_ratio(tokens, tokens.logprob_N, proximal_N))
    term_N, low_N, high_N = _clipped(tokens, ratio_N, clip_low, clip_high)
    return LossTerms(weight_N * term_N, low_N, high_N)
