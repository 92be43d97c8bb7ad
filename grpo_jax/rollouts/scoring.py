"""Runs the rewards: user code that may be slow, hang or raise, and costs no more than the sample it was called for."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo_jax.rollouts.rewards import Completion, Reward, Value, read_value, read_values
from grpo_jax.rollouts.threads import in_daemon_thread

log = logging.getLogger(__name__)

# Sync rewards at work at one time. One that timed out no longer counts: its thread is left behind.
_MAX_THREADS = 32


@dataclass(frozen=True)
class Score:
    """The weighted sum of one completion's rewards, or None if one that counts could not be had.

    `parts` holds each reward under its label and the parts of those that return a dict as `<label>/<part>`; `errors`
    has one entry for each reward that raised or did not answer in time.
    """

    reward: float | None
    parts: dict[str, float | None]
    errors: tuple[str, ...]


class Scorer:
    """Scores completions with all configured rewards at once."""

    def __init__(self, rewards: Sequence[Reward], timeout_s: float):
        self._rewards, self._timeout_s = rewards, timeout_s
        self._threads = asyncio.Semaphore(_MAX_THREADS)
        self._shown: set[str] = set()

    async def score(self, completions: Sequence[Completion]) -> list[Score]:
        """One score per completion; all of them must be of one prompt."""
        if not completions:
            return []
        by_reward = await asyncio.gather(*(self._values(reward, completions) for reward in self._rewards))
        return [self._combined([values[i] for values in by_reward]) for i in range(len(completions))]

    def _combined(self, values: Sequence[Value]) -> Score:
        total: float | None = 0.0
        parts: dict[str, float | None] = {}
        for reward, value in zip(self._rewards, values, strict=True):
            parts[reward.label] = value.value
            parts.update({f"{reward.label}/{name}": part for name, part in (value.parts or {}).items()})
            if reward.weight != 0:
                total = None if total is None or value.value is None else total + reward.weight * value.value
        return Score(total, parts, tuple(value.error for value in values if value.error is not None))

    async def _values(self, reward: Reward, completions: Sequence[Completion]) -> list[Value]:
        if reward.batched:
            return await self._guarded(
                reward,
                partial(reward.call_batch, completions),
                lambda answer: read_values(answer, len(completions)),
                count=len(completions),
            )
        each = await asyncio.gather(
            *(
                self._guarded(reward, partial(reward.call, c), lambda answer: [read_value(answer)], count=1)
                for c in completions
            )
        )
        return [value for values in each for value in values]

    async def _guarded(
        self, reward: Reward, call: Callable[[], Any], read: Callable[[Any], list[Value]], count: int
    ) -> list[Value]:
        """The values that one call gives, or `count` failed ones."""
        try:
            return read(await self._answer(call))
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            failure: BaseException = error  # not ours: the reward's own code let it out
        except (Exception, SystemExit) as error:
            failure = error
        if reward.label not in self._shown:
            self._shown.add(reward.label)
            log.warning("reward %s failed (shown once, then counted)", reward.label, exc_info=failure)
        return [Value(error=f"reward {reward.label}: {failure!r:.300}")] * count

    async def _answer(self, call: Callable[[], Any]) -> Any:
        # Calling an async function only makes its coroutine, so both kinds may be called in a thread.
        async with self._threads:
            answer = await self._in_time(in_daemon_thread(call))
        return await self._in_time(answer) if inspect.isawaitable(answer) else answer

    async def _in_time(self, awaitable: Any) -> Any:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await awaitable
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"no answer within rollouts.reward_timeout_s = {self._timeout_s:g} s") from None
            raise
