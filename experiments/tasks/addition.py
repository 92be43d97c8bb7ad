"""One-digit addition: all 81 sums of two digits in 1…9, some of them held out."""

import random

from grpo_jax.rollouts.tasks import Problem


def one_digit(held_out: int = 16, seed: int = 0) -> dict[str, list[Problem]]:
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(seed).shuffle(sums)
    problems = [Problem(id=f"{a}+{b}", prompt=f"{a} + {b} = ?", answer=a + b) for a, b in sums]
    return {"train": problems[held_out:], "eval": problems[:held_out]}
