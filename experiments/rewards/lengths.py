"""Rewards for length, in tokens: to be mixed, with a small weight, with one for being right."""

from collections.abc import Sequence

from grpo_jax.rollouts.rewards import Completion


def soft_limit(completion: Completion, limit: int, slope: int) -> float:
    """0 up to `limit - slope` tokens, falling linearly to -1 at `limit` and beyond (DAPO's overlong penalty)."""
    over = len(completion.tokens) - (limit - slope)
    return -min(max(over / slope, 0.0), 1.0)


def near(completion: Completion, target: int, width: int) -> float:
    """1 at `target` tokens, falling linearly to 0 at `width` tokens away from it."""
    return max(0.0, 1.0 - abs(len(completion.tokens) - target) / width)


def finished(completion: Completion) -> float:
    """1 if the model ended the completion itself, 0 if it was cut off."""
    return float(completion.finish_reason == "stop")


def shorter_than_others(group: Sequence[Completion]) -> list[float]:
    """0.5 for the shortest completion of the prompt, -0.5 for the longest, linear between, 0 if all are equally long.

    The length term of Kimi k1.5 (2501.12599), which gives it to right completions in full and to wrong ones only where
    it is negative: here it does not know which are right.
    """
    lengths = [len(completion.tokens) for completion in group]
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    return [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
