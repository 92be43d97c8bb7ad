"""Advantages of the samples of a group, from their rewards alone."""

from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.jit, static_argnames=("kind", "ddof"))
def group_advantages(rewards_PxG: jax.Array, valid_PxG: jax.Array, *, kind: str, eps: float, ddof: int) -> jax.Array:
    """Advantages per sample, each group on its own.

    Args:
      rewards_PxG: float, one row per group; what stands where `valid` is False does not matter (NaN is fine).
      valid_PxG: bool, True for scorable samples. The others are left out of mean, standard deviation and count.
      kind: `dr_grpo` (R - mean R, arXiv 2503.20783) or `grpo` ((R - mean R) / (std R + eps), arXiv 2402.03300).
      eps: added to the standard deviation.
      ddof: of the standard deviation, 0 or 1. A single scorable sample has advantage 0 with either.

    Returns:
      float, P×G, 0 for samples that are not scorable; never NaN.
    """
    if kind not in ("dr_grpo", "grpo"):
        raise ValueError(f"unknown advantages {kind!r}")
    return jax.vmap(partial(_advantages, kind=kind, eps=eps, ddof=ddof))(rewards_PxG, valid_PxG)


def _advantages(rewards_G: jax.Array, valid_G: jax.Array, *, kind: str, eps: float, ddof: int) -> jax.Array:
    rewards_G = jnp.where(valid_G, rewards_G, 0.0)
    count = valid_G.sum()
    centred_G = jnp.where(valid_G, rewards_G - rewards_G.sum() / jnp.maximum(count, 1), 0.0)
    if kind == "dr_grpo":
        return centred_G
    variance = (centred_G**2).sum() / jnp.maximum(count - ddof, 1)
    spread = jnp.sqrt(variance) + eps
    return jnp.where(spread > 0, centred_G / jnp.where(spread > 0, spread, 1.0), 0.0)
