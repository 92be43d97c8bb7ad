"""Advantages of the samples of a group, from their rewards alone."""

from functools import partial

import jax
import jax.numpy as jnp

KINDS = ("dr_grpo", "grpo", "rloo", "batch_std", "maxrl")


@partial(jax.jit, static_argnames=("kind", "ddof"))
def group_advantages(rewards_PxG: jax.Array, valid_PxG: jax.Array, *, kind: str, eps: float, ddof: int) -> jax.Array:
    """Advantages per sample, each group on its own (but for the spread of `batch_std`).

    With n scorable samples in a group and R their rewards:

    | kind | advantage | source |
    |---|---|---|
    | `dr_grpo` | R − mean R | arXiv 2503.20783 |
    | `grpo` | (R − mean R) / (std R + eps) | arXiv 2402.03300 |
    | `rloo` | n/(n − 1) · (R − mean R): against the mean of the others | arXiv 2402.14740 |
    | `batch_std` | (R − mean R) / (std of all rewards of the batch + eps) | arXiv 2501.03262, 2510.13786 |
    | `maxrl` | (R − mean R) / mean R, 0 where the mean is not positive | arXiv 2602.02710 |

    Args:
      rewards_PxG: float, one row per group; what stands where `valid` is False does not matter (NaN is fine).
      valid_PxG: bool, True for scorable samples. The others are left out of mean, standard deviation and count.
      eps: added to the standard deviation.
      ddof: of the standard deviation, 0 or 1. A single scorable sample has advantage 0 with either.

    Returns:
      float, P×G, 0 for samples that are not scorable; never NaN.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown advantages {kind!r}")
    rewards_PxG = jnp.where(valid_PxG, rewards_PxG, 0.0)
    batch_spread = _spread(_centred(rewards_PxG.ravel(), valid_PxG.ravel()), valid_PxG.ravel(), ddof) + eps
    return jax.vmap(partial(_advantages, kind=kind, eps=eps, ddof=ddof, batch_spread=batch_spread))(
        rewards_PxG, valid_PxG
    )


def _advantages(
    rewards_G: jax.Array, valid_G: jax.Array, *, kind: str, eps: float, ddof: int, batch_spread: jax.Array
) -> jax.Array:
    count = valid_G.sum()
    centred_G = _centred(rewards_G, valid_G)
    if kind == "dr_grpo":
        return centred_G
    if kind == "rloo":
        return centred_G * (count / jnp.maximum(count - 1, 1))
    if kind == "maxrl":
        return _divided(centred_G, rewards_G.sum() / jnp.maximum(count, 1))
    return _divided(centred_G, batch_spread if kind == "batch_std" else _spread(centred_G, valid_G, ddof) + eps)


def _centred(rewards_G: jax.Array, valid_G: jax.Array) -> jax.Array:
    """R − mean R, 0 where not valid.

    The mean of equal numbers need not be that number in floating point, and what is left would be divided by a spread
    as small. So one of the rewards is subtracted first: equal ones are exactly 0 then.
    """
    shifted_G = jnp.where(valid_G, rewards_G - rewards_G[jnp.argmax(valid_G)], 0.0)
    return jnp.where(valid_G, shifted_G - shifted_G.sum() / jnp.maximum(valid_G.sum(), 1), 0.0)


def _spread(centred_G: jax.Array, valid_G: jax.Array, ddof: int) -> jax.Array:
    return jnp.sqrt((centred_G**2).sum() / jnp.maximum(valid_G.sum() - ddof, 1))


def _divided(values_G: jax.Array, divisor: jax.Array) -> jax.Array:
    """values / divisor, 0 where the divisor is not positive."""
    return jnp.where(divisor > 0, values_G / jnp.where(divisor > 0, divisor, 1.0), 0.0)
