"""One draw: the completions of a problem under a policy, scored. Training groups and evaluations are made of draws."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_jax.config.schema import Sampling
from grpo_jax.rollouts.answers import Answer, Choice
from grpo_jax.rollouts.client import Client, RequestFailed, RequestRefused
from grpo_jax.rollouts.rewards import Completion
from grpo_jax.rollouts.sample import Sample
from grpo_jax.rollouts.scoring import Score, Scorer
from grpo_jax.rollouts.state import Counters
from grpo_jax.rollouts.tasks import Problem


@dataclass(frozen=True)
class Draw:
    answer: Answer
    samples: tuple[Sample, ...]  # one per sample asked for; those that failed are `failed`, without tokens
    failures: tuple[str, ...]

    @property
    def scorable(self) -> int:
        return sum(sample.reward is not None for sample in self.samples)


class Drawer:
    """Draws and counts. `inflight_samples` are those asked for and not yet answered."""

    def __init__(self, client: Client, scorer: Scorer, sampling: Sampling, counters: Counters):
        self._client, self._scorer, self._sampling, self._counters = client, scorer, sampling, counters
        self.inflight_samples = 0

    async def draw(
        self,
        problem: Problem,
        prompt: Sequence[int],
        policy: str,
        n: int,
        seed: int,
        sampling: Sampling | None = None,
    ) -> Draw:
        """PolicyGone, RequestRefused or RequestFailed if there is no answer; a sample that fails is in the draw.

        Args:
          sampling: None: as for training.
        """
        answer = await self._answer(prompt, policy, n, seed, sampling or self._sampling)
        choices = [choice for choice in answer.choices if choice is not None]
        began = time.monotonic()
        scores = await self._scorer.score([completion_of(problem, choice) for choice in choices])
        self._counters.scoring_s += len(choices) * (time.monotonic() - began)
        self._counters.reward_failures += sum(len(score.errors) for score in scores)
        samples, failures, remaining = [], list(answer.failures), iter(scores)
        for index, choice in enumerate(answer.choices):
            score = next(remaining) if choice is not None else None
            samples.append(_sample(choice, score))
            failures += [f"sample {index}: {error}" for error in (score.errors if score else ())]
        return Draw(answer, tuple(samples), tuple(failures))

    async def _answer(self, prompt: Sequence[int], policy: str, n: int, seed: int, sampling: Sampling) -> Answer:
        self.inflight_samples += n
        try:
            answer = await self._client.sample(policy, prompt, n, seed, sampling)
        except (RequestRefused, RequestFailed):
            self._counters.request_failures += 1
            raise
        finally:
            self.inflight_samples -= n
        self._counters.served(answer.policy, time.time())
        self._counters.generated_tokens += answer.generated_tokens
        self._counters.request_failures += len(answer.failures)
        return answer


def completion_of(problem: Problem, sampled: Choice | Sample) -> Completion:
    """What rewards see of it."""
    return Completion(
        text=sampled.text,
        tokens=sampled.tokens.tolist(),
        prompt=problem.prompt,
        answer=problem.answer,
        metadata=problem.metadata,
        finish_reason=sampled.finish_reason,
    )


def _sample(choice: Choice | None, score: Score | None) -> Sample:
    if choice is None or score is None:
        return Sample(np.zeros(0, np.int32), np.zeros(0, np.float32), None, {}, "", "failed")
    return Sample(choice.tokens, choice.logprobs, score.reward, score.parts, choice.text, choice.finish_reason)
