"""Rewards for answers that are numbers."""

import re

from grpo_jax.rollouts.rewards import Completion

_INTEGER = re.compile(r"-?\d+")


def last_integer(completion: Completion) -> float:
    """1 if the last integer in the text equals the answer, else 0."""
    found = _INTEGER.findall(completion.text)
    return float(bool(found) and int(found[-1]) == int(completion.answer))
