"""A loss for tests, named by import path as a user's would be."""

from grpo_jax.algorithms.tokens import LossTerms, TokenArrays, masked_logprob


def likelihood(tokens: TokenArrays, *, strength: float = 1.0) -> LossTerms:
    """−strength · log π, whatever the advantage."""
    return LossTerms(-strength * masked_logprob(tokens))
