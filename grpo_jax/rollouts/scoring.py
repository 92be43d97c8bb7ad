"""Runs the rewards: user code that may be slow, hang or raise, and costs no more than the sample it was called for."""

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from grpo_jax.rollouts.reward_pool import RewardPool
from grpo_jax.rollouts.rewards import Completion, Reward, Value
from grpo_jax.rollouts.threads import in_daemon_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

# Sync rewards at work at one time. One that timed out no longer counts: its thread is left behind.
_MAX_THREADS = 32


@dataclass(frozen=True)
class Score:
    """The weighted sum of one completion's rewards, or None if one that counts could not be had.

    `parts` holds each reward under its label and the parts of those that return a dict as `<label>/<part>`; `errors`
    has one entry for each reward that raised or did not answer in time; `seconds` how long each reward's call took,
    by label (the call for all completions of the prompt, where there is one).
    """

    reward: float | None
    parts: dict[str, float | None]
    errors: tuple[str, ...]
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)


class Scorer:
    """Scores completions with all configured rewards at once.

    Sync rewards run in threads, those with `processes` in a pool of their own, async ones on the event loop. `close`
    ends the idle processes; those that are left end with this process.
    """

    def __init__(self, rewards: Sequence[Reward], timeout_s: float):
        self._rewards, self._timeout_s = rewards, timeout_s
        self._threads = asyncio.Semaphore(_MAX_THREADS)
        self._pools = {reward.label: RewardPool(reward.config) for reward in rewards if reward.config.processes}
        self._shown: set[str] = set()

    async def score(self, completions: Sequence[Completion]) -> list[Score]:
        """One score per completion; all of them must be of one prompt."""
        if not completions:
            return []
        by_reward = await asyncio.gather(*(self._values(reward, completions) for reward in self._rewards))
        return [self._combined([values[i] for values in by_reward]) for i in range(len(completions))]

    @property
    def slots(self) -> int:
        """How many samples can be scored at one time, by the reward that takes the fewest."""
        return min((reward.config.processes or _MAX_THREADS for reward in self._rewards), default=_MAX_THREADS)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _combined(self, values: Sequence[Value]) -> Score:
        total: float | None = 0.0
        parts: dict[str, float | None] = {}
        for reward, value in zip(self._rewards, values, strict=True):
            parts[reward.label] = value.value
            parts.update({f"{reward.label}/{name}": part for name, part in (value.parts or {}).items()})
            weight = reward.config.weight
            if weight != 0:
                total = None if total is None or value.value is None else total + weight * value.value
        return Score(
            total,
            parts,
            tuple(value.error for value in values if value.error is not None),
            {reward.label: value.seconds for reward, value in zip(self._rewards, values, strict=True)},
        )

    async def _values(self, reward: Reward, completions: Sequence[Completion]) -> list[Value]:
        calls = [completions] if reward.batched else [[completion] for completion in completions]
        answers = await asyncio.gather(*(self._guarded(reward, call) for call in calls))
        return [value for values in answers for value in values]

    async def _guarded(self, reward: Reward, completions: Sequence[Completion]) -> list[Value]:
        """The values that one call gives, or as many failed ones."""
        limit = _Limit(reward, self._timeout_s)
        try:
            values = await self._call(reward, completions, limit)
            return [replace(value, seconds=limit.spent_s) for value in values]
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
        failed = Value(error=f"reward {reward.label}: {failure!r:.300}", seconds=limit.spent_s)
        return [failed] * len(completions)

    async def _call(self, reward: Reward, completions: Sequence[Completion], limit: "_Limit") -> list[Value]:
        if reward.label in self._pools:
            return await self._pools[reward.label].values(completions, limit.wait)
        # Calling an async function only makes its coroutine, so both kinds may be called in a thread.
        async with self._threads:
            answer = await limit.wait(in_daemon_thread(reward.call, completions))
        if inspect.isawaitable(answer):
            answer = await limit.wait(answer)
        return reward.read(answer, len(completions))


class _Limit:
    """The time that one call of a reward may take, and what it has taken; waiting for a slot is neither."""

    def __init__(self, reward: Reward, default_s: float):
        own_s = reward.config.timeout_s
        self._limit_s = default_s if own_s is None else own_s
        key = "rollouts.reward_timeout_s" if own_s is None else f"timeout_s of the reward {reward.label}"
        self._message = f"no answer within {key} = {self._limit_s:g} s"
        self.spent_s = 0.0

    async def wait(self, awaitable: Awaitable[T]) -> T:
        started, limit = time.monotonic(), asyncio.timeout(self._limit_s)
        try:
            async with limit:
                return await awaitable
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(self._message) from None
            raise
        finally:
            self.spent_s += time.monotonic() - started
