"""Rewards for tests, named by import path as a user's would be."""

from grpo_jax.rollouts.rewards import Completion


def even_first_token(completion: Completion) -> float:
    """About half of what a random model samples earns it."""
    return float(len(completion.tokens) > 0 and completion.tokens[0] % 2 == 0)
