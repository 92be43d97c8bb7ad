"""Evaluation: the held-out problems, drawn under one policy, and the means that come out of it."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from math import comb
from typing import Any

from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.rollouts.client import PolicyGone, RequestError
from grpo_jax.rollouts.drawing import Drawer
from grpo_jax.rollouts.sample import Sample
from grpo_jax.rollouts.seeds import sampling_seed
from grpo_jax.rollouts.tasks import Problem
from grpo_jax.rollouts.threads import until_it_works
from grpo_jax.rollouts.tokenizer import Prompts
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import canonical_json

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.5
_LOOK_S = 0.05  # between two looks for room
_SHARE = 1 / 8  # of the samples that training may have on their way


class Evaluator:
    """Evaluates policies on the split that the config names. Seeds depend on the problem alone, so policies compare.

    Training goes first: an evaluation takes what training leaves of the samples that it may have on their way, and an
    eighth of these, or one problem, where it leaves nothing. Requests of a lower priority could wait without end on a
    server at its limit, and one that is not answered counts as the server's fault.
    """

    def __init__(self, config: Config, problems: Sequence[Problem], prompts: Prompts, drawer: Drawer, run: Bucket):
        self._config, self._problems, self._prompts, self._drawer, self._run = config, problems, prompts, drawer, run
        self._most = (config.max_staleness + 1) * config.groups_per_version * config.batch.group_size
        self._drawing = 0  # samples, until they are scored
        self._next = asyncio.Lock()

    async def evaluate(self, policy: str, is_wanted: Callable[[], bool]) -> None:
        """Writes `evaluations/<policy>.<split>.json` unless it is there.

        While nobody serves the policy it is asked for again, as long as it is wanted. Then the evaluation is given up,
        and nothing is written: a part of a split is not its mean.
        """
        key = layout.evaluation(policy, self._config.evaluation.split)
        if await until_it_works(f"reading {key}", self._run.read_or_none, key) is not None:
            return
        draws = [
            asyncio.create_task(self._problem(index, problem, policy, is_wanted))
            for index, problem in enumerate(self._problems)
        ]
        try:
            drawn = await asyncio.gather(*draws)
        except PolicyGone:
            log.warning("%s is no longer served; its evaluation is given up", policy)
            return
        finally:
            for draw in draws:
                draw.cancel()
        result = self._result(policy, drawn)
        await until_it_works(f"writing {key}", self._run.put, key, canonical_json(result))
        log.info("evaluation of %s on %s: reward %s", policy, result["split"], result["reward"])

    async def _problem(
        self, index: int, problem: Problem, policy: str, is_wanted: Callable[[], bool]
    ) -> Sequence[Sample | None]:
        """The samples of one problem; None for each of them if it cannot be drawn."""
        evaluation, sampling = self._config.evaluation, self._config.evaluation_sampling
        seed = sampling_seed(self._config.run, self._config.seed, f"{evaluation.split} {index}")
        while True:
            try:
                async with self._place(evaluation.samples):
                    prompt = self._prompts.tokens(problem)
                    draw = await self._drawer.draw(problem, prompt, policy, evaluation.samples, seed, sampling)
                    return draw.samples
            except PolicyGone:
                if not is_wanted():
                    raise
                await asyncio.sleep(_ASK_AGAIN_S)
                continue
            except RequestError as error:
                log.warning("evaluation of %s: problem %s has no answer: %s", policy, problem.id, error)
            except UsageError:
                raise
            except Exception:
                log.exception("evaluation of %s: problem %s failed", policy, problem.id)
            return [None] * evaluation.samples

    @asynccontextmanager
    async def _place(self, samples: int) -> AsyncIterator[None]:
        """Waits, first come, first served, until so many samples more may be asked for."""
        async with self._next:
            while not self._has_room(samples):
                await asyncio.sleep(_LOOK_S)
            self._drawing += samples
        try:
            yield
        finally:
            self._drawing -= samples

    def _has_room(self, samples: int) -> bool:
        if not self._drawing or self._drawing + samples <= _SHARE * self._most:
            return True
        return max(self._drawing, self._drawer.inflight_samples) + samples <= self._most

    def _result(self, policy: str, drawn: Sequence[Sequence[Sample | None]]) -> dict[str, Any]:
        evaluation, sampling = self._config.evaluation, self._config.evaluation_sampling
        samples = [sample for of_problem in drawn for sample in of_problem]
        rewards = [_scored(of_problem, None) for of_problem in drawn]
        deciding = [_scored(of_problem, evaluation.pass_on) for of_problem in drawn]
        labels = [reward.label for reward in self._config.rewards]
        parts = {label: [s.reward_parts.get(label) for s in samples if s is not None] for label in labels}
        return {
            "policy": policy,
            "split": evaluation.split,
            "problems": len(self._problems),
            "samples": evaluation.samples,
            "reward": _mean([reward for of_problem in rewards for reward in of_problem]),
            "rewards": {label: _mean(values) for label, values in parts.items()},
            "pass_at": {str(k): _mean_pass_at(k, deciding, evaluation.pass_reward) for k in evaluation.pass_at},
            "pass_reward": evaluation.pass_reward,
            "pass_on": evaluation.pass_on,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "unscorable": len(samples) - sum(map(len, rewards)),
            "finished_at": time.time(),
        }


def pass_at(k: int, samples: int, passed: int) -> float:
    """The chance that one of k samples of a problem passes, when `passed` of `samples` have; unbiased for k ≤ samples.

    Chen et al. 2021, arXiv:2107.03374.
    """
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def _scored(samples: Sequence[Sample | None], reward: str | None) -> list[float]:
    """The sum of the rewards of each sample, or its reward of that name, where there is one."""
    given = [sample for sample in samples if sample is not None]
    values = [s.reward if reward is None else s.reward_parts.get(reward) for s in given]
    return [value for value in values if value is not None]


def _mean_pass_at(k: int, rewards: Sequence[Sequence[float]], needed: float) -> float | None:
    """Over the problems of which at least k samples could be scored."""
    return _mean([pass_at(k, len(r), sum(x >= needed for x in r)) for r in rewards if len(r) >= k])


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None
