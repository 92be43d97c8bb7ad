"""From groups to weighted samples: advantages, token weights, and which samples count at all."""

from collections.abc import Sequence

import numpy as np

from grpo_jax.algorithms.advantages import group_advantages
from grpo_jax.algorithms.aggregation import token_mean_weights
from grpo_jax.config.schema import Algorithm
from grpo_jax.learner.packing import TrainSample
from grpo_jax.rollouts.sample import Group


def trainable(group: Group) -> np.ndarray:
    """bool [n]: scored, and with a finite log-probability for every token. The others have weight 0 everywhere."""
    finite = [bool(np.isfinite(sample.logprobs).all()) for sample in group.samples]
    return np.isfinite(group.rewards) & np.array(finite, bool)


def train_samples(
    groups: Sequence[Group], algorithm: Algorithm, *, skip_zero_advantage: bool = False
) -> list[TrainSample]:
    """The samples of one batch, in order, with advantages per group and weights over the whole batch.

    Samples that are not trainable, and empty completions, are not in the list. Neither changes what the others weigh:
    an empty completion counts in its group's mean reward, and an untrainable one nowhere.

    Args:
      skip_zero_advantage: leave out samples whose advantage is exactly 0 (a group of equal rewards). Their term
        and its gradient are 0 in every policy loss, and the weights still span them: only the metrics of their tokens
        are lost, and the forward pass that they would cost.
    """
    width = max(len(group.samples) for group in groups)
    rewards, valid = np.full((len(groups), width), np.nan), np.zeros((len(groups), width), bool)
    lengths = np.zeros((len(groups), width), np.int64)
    for g, group in enumerate(groups):
        n = len(group.samples)
        rewards[g, :n], valid[g, :n] = group.rewards, trainable(group)
        lengths[g, :n] = [len(sample.tokens) for sample in group.samples]
    advantages = np.asarray(
        group_advantages(
            rewards, valid, kind=algorithm.advantages, eps=algorithm.advantage_eps, ddof=algorithm.advantage_ddof
        )
    )
    weights = token_mean_weights(lengths, valid)
    return [
        TrainSample(
            group=g,
            sample=s,
            prompt=group.prompt_tokens,
            completion=sample.tokens,
            sampler_logprobs=sample.logprobs,
            advantage=float(advantages[g, s]),
            token_weight=float(weights[g, s]),
        )
        for g, group in enumerate(groups)
        for s, sample in enumerate(group.samples)
        if valid[g, s] and len(sample.tokens) and not (skip_zero_advantage and advantages[g, s] == 0)
    ]
