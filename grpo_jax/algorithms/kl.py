"""Estimators of KL(π ‖ π_ref) from sampled tokens (Schulman 2020, "Approximating KL divergence")."""

import jax
import jax.numpy as jnp


def kl_terms(logprob_N: jax.Array, reference_logprob_N: jax.Array, mask_N: jax.Array, *, estimator: str) -> jax.Array:
    """Per token, 0 where masked; differentiable in `logprob_N` alone. With d = log π − log π_ref:

    `k1` d (as a loss its expected gradient is zero: for the metrics), `k2` d²/2 (the right gradient), `k3`
    exp(−d) − 1 + d (unbiased and never negative; its gradient is that of the forward KL), `k3_value_k2_gradient` (the
    value of k3 with the gradient of k2).
    """
    reference_N = jnp.where(mask_N, jax.lax.stop_gradient(reference_logprob_N), 0.0)
    difference_N = jnp.where(mask_N, logprob_N, 0.0) - reference_N
    if estimator == "k1":
        return difference_N
    half_square_N = jnp.square(difference_N) / 2
    if estimator == "k2":
        return half_square_N
    # All of d is clamped, not the exponent alone: what is left of the slope would push further away.
    clamped_N = jnp.clip(difference_N, -20.0, 20.0)
    k3_N = jnp.expm1(-clamped_N) + clamped_N
    if estimator == "k3":
        return k3_N
    if estimator == "k3_value_k2_gradient":
        return half_square_N + jax.lax.stop_gradient(k3_N - half_square_N)
    raise ValueError(f"unknown KL estimator {estimator!r}")
