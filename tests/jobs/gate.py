"""A reward that lets a run come so far, and no further before a file is there."""

import asyncio
import itertools
from pathlib import Path

from grpo_jax.rollouts.rewards import Completion
from tests import plugins

_calls = itertools.count()


async def even_first_token(completion: Completion, gate: str, free: int) -> float:
    """As that of `tests.plugins`. In each process the first `free` completions are scored at once."""
    if next(_calls) >= free:
        while not Path(gate).exists():
            await asyncio.sleep(0.05)
    return plugins.even_first_token(completion)
