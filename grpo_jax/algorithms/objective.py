"""An objective, composed: policy loss, off-policy factors, KL to the reference, entropy bonus."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.algorithms.kl import kl_terms
from grpo_jax.algorithms.tokens import LossTerms, TokenArrays


class Terms(NamedTuple):
    """Per token, 0 where masked."""

    term_N: jax.Array  # to be weighted and summed
    factor_N: jax.Array  # product of the off-policy weight and the masks; 1 without any
    clipped_N: jax.Array  # int8: −1 clipped at the lower bound of the ratio, +1 at the upper, else 0


@dataclass(frozen=True)
class Objective:
    """term = Π factors · loss + kl_coef · KL(π ‖ π_ref) − entropy_coef · H(π).

    The factors correct the policy loss alone; KL and entropy are of the current policy on the tokens at hand.

    Attributes:
      loss: see `policy_losses`; its own numbers are bound already.
      factors: see `off_policy`; likewise.
      anchor: what the loss's ratios are against: the sampler, or π_old recomputed when the batch arrived.
    """

    loss: Callable[[TokenArrays], LossTerms]
    factors: tuple[Callable[[TokenArrays], jax.Array], ...] = ()
    anchor: Literal["sampler", "recomputed"] = "sampler"
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0

    @property
    def needs_old(self) -> bool:
        return self.anchor == "recomputed"

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    def __call__(self, tokens: TokenArrays, reference_logprob_N: jax.Array, entropy_N: jax.Array) -> Terms:
        terms = self.loss(tokens)
        factor_N = tokens.mask_N.astype(terms.term_N.dtype)
        for factor in self.factors:
            factor_N *= factor(tokens)
        # `where`, because a term may be infinite exactly where its factor drops it.
        term_N = jnp.where(factor_N > 0, factor_N * jnp.where(factor_N > 0, terms.term_N, 0.0), 0.0)
        if self.kl_coef:
            term_N += self.kl_coef * kl_terms(
                tokens.logprob_N, reference_logprob_N, tokens.mask_N, estimator=self.kl_estimator
            )
        if self.entropy_coef:
            term_N -= self.entropy_coef * jnp.where(tokens.mask_N, entropy_N, 0.0)
        return Terms(term_N, factor_N, _sides(terms, tokens.mask_N))


def _sides(terms: LossTerms, mask_N: jax.Array) -> jax.Array:
    side_N = jnp.zeros(mask_N.shape, jnp.int8)
    if terms.clipped_low_N is not None:
        side_N = jnp.where(mask_N & terms.clipped_low_N, jnp.int8(-1), side_N)
    if terms.clipped_high_N is not None:
        side_N = jnp.where(mask_N & terms.clipped_high_N, jnp.int8(1), side_N)
    return side_N
