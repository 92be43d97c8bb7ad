"""Tasks and rewards that the tests name by import path."""

import asyncio
import math
import os
import re
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_jax.rollouts.rewards import Completion
from grpo_jax.rollouts.tasks import Problem

release = threading.Event()  # ends what `hangs` waits for


def letters(count: int = 6, held_out: int = 0, long: bool = False) -> dict[str, list[Problem]]:
    """Problems `p0`, `p1`, …, the answer of each its number; `long` makes the last prompt very long."""
    problems = [Problem(f"p{i}", f"word{i} ?", i, {"hint": i * 10}) for i in range(count)]
    if long:
        problems[-1] = Problem("endless", "word0 " * 500, 0)
    splits = {"train": problems}
    if held_out:
        splits["eval"] = [Problem(f"e{i}", f"word{i} !", i) for i in range(held_out)]
    return splits


def tools() -> list[Problem]:
    """A conversation that the chat template of the tests refuses."""
    return [Problem("p0", [{"role": "tool", "content": "42"}])]


def length(completion: Completion, scale: float = 1.0) -> float:
    return scale * len(completion.tokens)


def none_for(completion: Completion, problem: int) -> float | None:
    """Cannot score the completions of one problem."""
    return None if completion.answer == problem else 1.0


def none_always(completion: Completion) -> None:
    return None


def raises_for(completion: Completion, problem: int) -> float:
    if completion.answer == problem:
        raise ValueError(f"cannot score {completion.answer}")
    return 1.0


async def asynchronous(completion: Completion) -> float:
    await asyncio.sleep(0)
    return float(completion.answer)


async def async_hangs(completion: Completion) -> float:
    await asyncio.sleep(3600)
    return 0.0


def hangs(completion: Completion) -> float:
    release.wait(60)
    return 0.0


def exits(completion: Completion) -> float:
    raise SystemExit(3)


async def async_exits(completion: Completion) -> float:
    raise SystemExit(3)


async def cancels_itself(completion: Completion) -> float:
    raise asyncio.CancelledError


def parts(completion: Completion) -> dict[str, float | None]:
    return {"a": 1.0, "b": 2.5}


def parts_with_reward(completion: Completion) -> dict[str, float | None]:
    return {"reward": 0.5, "a": 1.0, "unknown": math.nan}


def trl(completions: list[Any], answer: list[Any], hint: list[int], **kwargs: Any) -> list[float]:
    assert kwargs.keys() == {"prompts", "completion_ids", "bonus"}
    return [len(c) + a + h + kwargs["bonus"] for c, a, h in zip(completions, answer, hint, strict=True)]


def trl_few(completions: list[str]) -> list[float]:
    return [1.0]


def rank(group: Sequence[Completion]) -> list[float]:
    return [float(sorted(c.answer for c in group).index(c.answer)) for c in group]


def process_id(completion: Completion) -> float:
    return float(os.getpid())


def spins_for(completion: Completion, problem: int) -> float:
    while completion.answer == problem:
        pass
    return process_id(completion)


def dies_for(completion: Completion, problem: int) -> float:
    if completion.answer == problem:
        os._exit(3)
    return 1.0


def raises_or_process_id(completion: Completion, problem: int) -> float:
    return process_id(completion) * raises_for(completion, problem)


def waits_for_another(completion: Completion) -> float:
    """Each of two calls, of answers 0 and 1, waits until the other is at work, too."""
    folder = Path(tempfile.gettempdir())
    mine, other = (folder / f"toys-{os.getppid()}-{n}" for n in (completion.answer, 1 - completion.answer))
    mine.touch()
    try:
        while not other.exists():
            time.sleep(0.01)
        time.sleep(0.1)
    finally:
        mine.unlink()
    return 1.0


def matches_for_ever(completion: Completion) -> float:
    return float(re.fullmatch("(a+)+", "a" * 64 + "b") is not None)


not_callable = 3
