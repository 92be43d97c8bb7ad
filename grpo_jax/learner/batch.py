"""From groups to weighted samples: rewards as the objective sees them, advantages, token weights, minibatches."""

from collections.abc import Sequence

import numpy as np

from grpo_jax.algorithms.advantages import group_advantages
from grpo_jax.algorithms.aggregation import token_weights
from grpo_jax.config.schema import Algorithm
from grpo_jax.learner.packing import TrainSample
from grpo_jax.rollouts.sample import Group, Sample


def trainable(group: Group) -> np.ndarray:
    """bool [n]: scored, and with a finite log-probability for every token. The others have weight 0 everywhere."""
    finite = [bool(np.isfinite(sample.logprobs).all()) for sample in group.samples]
    return np.isfinite(group.rewards) & np.array(finite, bool)


def shaped_rewards(group: Group, algorithm: Algorithm, max_tokens: int) -> np.ndarray:
    """float [n]: the rewards with DAPO's soft overlong penalty, if the algorithm has one (arXiv 2503.14476, eq. 13).

    The penalty is 0 up to max_tokens − overlong_cache tokens, and falls from there linearly to −overlong_penalty at
    max_tokens. What is recorded as a sample's reward stays what the reward functions said.
    """
    cache = algorithm.overlong_cache
    if not cache:
        return group.rewards
    over = np.array([len(sample.tokens) for sample in group.samples]) - (max_tokens - cache)
    return group.rewards - algorithm.overlong_penalty * np.clip(over / cache, 0.0, 1.0)


def is_zero_variance(group: Group, algorithm: Algorithm, max_tokens: int) -> bool:
    """Whether all samples of a group have the same reward, so that none of them has an advantage."""
    return _is_flat(shaped_rewards(group, algorithm, max_tokens), group)


def is_all_alike(group: Group) -> bool:
    """Whether all samples are as right or as wrong: what DAPO's dynamic sampling replaces (arXiv 2503.14476, eq. 11).

    The soft overlong penalty does not count, however much the lengths differ.
    """
    return _is_flat(group.rewards, group)


def _is_flat(rewards: np.ndarray, group: Group) -> bool:
    rewards = rewards[trainable(group)]
    return rewards.size == 0 or bool(np.ptp(rewards) == 0)


def train_minibatches(
    groups: Sequence[Group],
    algorithm: Algorithm,
    *,
    max_tokens: int,
    step_lags: Sequence[int] | None = None,
    skip_zero_advantage: bool = False,
) -> list[list[TrainSample]]:
    """What each optimiser update of a pass over a batch trains: samples in order, with advantages and weights.

    Advantages are per group and over the whole batch; weights span the minibatch that one update is made of. Groups are
    dealt out in order, whole, `algorithm.minibatches` parts as equal as they can be.

    Samples that are not trainable, and empty completions, are not in the lists. Neither changes what the others weigh:
    an empty completion counts in its group's mean reward and in N, and an untrainable one nowhere. With
    `overlong: filter` a completion that was cut at max_tokens is left out likewise, but counts in every mean and
    denominator.

    Args:
      max_tokens: `sampling.max_tokens`.
      step_lags: for each group, learner step − the step of the policy that sampled it; 0 by default.
      skip_zero_advantage: leave out samples whose advantage is exactly 0 (a group of equal rewards), where their term
        and its gradient are 0 too. The weights still span them: only the metrics of their tokens are lost, and the
        forward pass that they would cost.
    """
    if not groups:
        return []
    skip_zero_advantage &= algorithm.zero_advantage_is_neutral
    lags = [0] * len(groups) if step_lags is None else step_lags
    width = max(len(group.samples) for group in groups)
    rewards, valid = np.full((len(groups), width), np.nan), np.zeros((len(groups), width), bool)
    lengths = np.zeros((len(groups), width), np.int64)
    flat = np.array([is_zero_variance(group, algorithm, max_tokens) for group in groups])
    for g, group in enumerate(groups):
        n = len(group.samples)
        rewards[g, :n], valid[g, :n] = shaped_rewards(group, algorithm, max_tokens), trainable(group)
        lengths[g, :n] = [len(sample.tokens) for sample in group.samples]
    if algorithm.zero_variance != "keep":
        valid[flat] = False  # dropped groups count nowhere
    advantages = np.array(
        group_advantages(
            rewards, valid, kind=algorithm.advantages, eps=algorithm.advantage_eps, ddof=algorithm.advantage_ddof
        )
    )

    def is_trained(g: int, s: int, sample: Sample) -> bool:
        cut = algorithm.overlong == "filter" and sample.finish_reason == "length"
        neutral = skip_zero_advantage and advantages[g, s] == 0
        return bool(valid[g, s]) and len(sample.tokens) > 0 and not cut and not neutral

    minibatches = []
    for part in np.array_split(np.arange(len(groups)), algorithm.minibatches):
        weights = token_weights(lengths[part], valid[part], kind=algorithm.aggregation, max_length=max_tokens)
        minibatches.append(
            [
                TrainSample(
                    group=int(g),
                    sample=s,
                    prompt=groups[g].prompt_tokens,
                    completion=sample.tokens,
                    sampler_logprobs=sample.logprobs,
                    advantage=float(advantages[g, s]),
                    token_weight=float(weights[row, s]),
                    staleness=float(lags[g] * algorithm.updates_per_step),
                )
                for row, g in enumerate(part)
                for s, sample in enumerate(groups[g].samples)
                if is_trained(g, s, sample)
            ]
        )
    return minibatches
