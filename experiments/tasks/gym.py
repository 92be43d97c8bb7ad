"""Procedurally generated problems from the package `reasoning-gym`, by the generator's name."""

from collections.abc import Sequence
from typing import Any

from grpo_jax.errors import UsageError
from grpo_jax.rollouts.tasks import LazyProblems, Problem

# Generators seed item i with seed + i: so far apart, the items of two splits are never the same.
_EVAL_SEED_OFFSET = 1_000_000_007


def generated(
    name: str, size: int = 10_000, eval_size: int = 0, seed: int = 0, **settings: Any
) -> dict[str, Sequence[Problem]]:
    """`size` problems to train on and `eval_size` others; `settings` are the generator's own (difficulty).

    Score them with `experiments.rewards.gym:score`, which asks the generator: many accept more than one answer.
    """
    splits: dict[str, Sequence[Problem]] = {"train": Generated(name, size, seed, settings)}
    if eval_size:
        splits["eval"] = Generated(name, eval_size, seed + _EVAL_SEED_OFFSET, settings)
    return splits


class Generated(LazyProblems):
    """Problems that are generated when they are asked for, always the same at the same place."""

    def __init__(self, name: str, size: int, seed: int, settings: dict[str, Any]):
        try:
            import reasoning_gym
        except ImportError:
            raise UsageError("task.source: experiments.tasks.gym needs the package reasoning-gym") from None
        try:
            self._entries = reasoning_gym.create_dataset(name, size=size, seed=seed, **settings)
        except (ValueError, TypeError, AssertionError) as error:
            raise UsageError(f"task.args: reasoning-gym cannot make {name!r}: {error}") from None
        self._name = f"{name}-{seed}"

    def __len__(self) -> int:
        return len(self._entries)

    def make(self, place: int) -> Problem:
        entry = self._entries[place]
        return Problem(f"{self._name}-{place}", entry["question"], entry["answer"], dict(entry["metadata"]))
