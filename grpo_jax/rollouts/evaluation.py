"""Evaluation: the held-out problems, drawn under one policy, and the means that come out of it."""

import asyncio
import logging
import time
from collections.abc import Sequence
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


class Evaluator:
    """Evaluates policies on the split that the config names. Seeds depend on the problem alone, so policies compare."""

    def __init__(self, config: Config, problems: Sequence[Problem], prompts: Prompts, drawer: Drawer, run: Bucket):
        self._config, self._problems, self._prompts, self._drawer, self._run = config, problems, prompts, drawer, run
        # As many requests at a time as training has: a large split must not flood a fleet that also serves training.
        self._slots = asyncio.Semaphore((config.max_staleness + 1) * config.groups_per_version)

    async def evaluate(self, policy: str, until_served: bool) -> None:
        """Writes `evaluations/<policy>.<split>.json` unless it is there.

        Args:
          until_served: ask for a policy that nobody serves until somebody does. Otherwise an evaluation whose policy is
            retired before it is through is given up, and nothing is written: a part of a split is not its mean.
        """
        key = layout.evaluation(policy, self._config.evaluation.split)
        if await until_it_works(f"reading {key}", self._run.read_or_none, key) is not None:
            return
        draws = [
            asyncio.create_task(self._problem(index, problem, policy, until_served))
            for index, problem in enumerate(self._problems)
        ]
        try:
            samples = [sample for drawn in await asyncio.gather(*draws) for sample in drawn]
        except PolicyGone:
            log.warning("%s is no longer served; its evaluation is given up", policy)
            return
        finally:
            for draw in draws:
                draw.cancel()
        result = self._result(policy, samples)
        await until_it_works(f"writing {key}", self._run.put, key, canonical_json(result))
        log.info("evaluation of %s on %s: reward %s", policy, result["split"], result["reward"])

    async def _problem(self, index: int, problem: Problem, policy: str, until_served: bool) -> Sequence[Sample | None]:
        """The samples of one problem; None for each of them if it cannot be drawn."""
        evaluation = self._config.evaluation
        seed = sampling_seed(self._config.run, self._config.seed, f"{evaluation.split} {index}")
        async with self._slots:
            while True:
                try:
                    prompt = self._prompts.tokens(problem)
                    return (await self._drawer.draw(problem, prompt, policy, evaluation.samples, seed)).samples
                except PolicyGone:
                    if not until_served:
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

    def _result(self, policy: str, samples: Sequence[Sample | None]) -> dict[str, Any]:
        scored = [sample for sample in samples if sample is not None and sample.reward is not None]
        labels = [reward.label for reward in self._config.rewards]
        parts = {label: [s.reward_parts.get(label) for s in samples if s is not None] for label in labels}
        return {
            "policy": policy,
            "split": self._config.evaluation.split,
            "problems": len(self._problems),
            "samples": self._config.evaluation.samples,
            "reward": _mean([sample.reward for sample in scored]),
            "rewards": {label: _mean(values) for label, values in parts.items()},
            "unscorable": len(samples) - len(scored),
            "finished_at": time.time(),
        }


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None
