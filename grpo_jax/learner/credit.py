"""What one sample weighed in the step that trained it, computed again exactly as the learner does."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_jax.config.schema import Config
from grpo_jax.learner.batch import is_zero_variance, train_minibatches
from grpo_jax.learner.packing import TrainSample
from grpo_jax.rollouts.sample import Group


@dataclass(frozen=True)
class Credit:
    """`advantage` and `token_weight` (of each of its tokens) are None where the sample has none.

    `update`: which of the step's optimiser updates (of one pass) it was part of, from 0. `note` says why a sample had
    no gradient.
    """

    advantage: float | None
    token_weight: float | None
    update: int | None
    note: str | None


def credit(config: Config, groups: Sequence[Group], step: int, group: int, sample: int) -> Credit:
    """Of sample `sample` of `groups[group]`; `groups` are those of the batch of `step`, in its order."""
    lags = [step - g.version * config.sync_every for g in groups]

    def found(skip: bool) -> tuple[int, TrainSample] | None:
        minibatches = train_minibatches(
            groups,
            config.algorithm,
            max_tokens=config.sampling.max_tokens,
            step_lags=lags,
            skip_zero_advantage=skip,
        )
        return next(
            ((u, s) for u, part in enumerate(minibatches) for s in part if (s.group, s.sample) == (group, sample)), None
        )

    trained = found(config.batch.skip_zero_advantage)
    weighed = trained or found(False)
    if weighed is None:
        return Credit(None, None, None, _why_none(config, groups[group], sample))
    update, own = weighed
    note = None if trained else "its advantage is 0, so it has no gradient and was not forwarded"
    return Credit(own.advantage, own.token_weight, update, note)


def _why_none(config: Config, group: Group, sample: int) -> str:
    own = group.samples[sample]
    if own.reward is None:
        return "it has no reward"
    if not np.isfinite(own.logprobs).all():
        return "a log-probability of it is not finite"
    flat = is_zero_variance(group, config.algorithm, config.sampling.max_tokens)
    if config.algorithm.zero_variance != "keep" and flat:
        return f"all rewards of its group are equal (algorithm.zero_variance: {config.algorithm.zero_variance})"
    if not len(own.tokens):
        return "it is empty"
    return "it was cut at max_tokens (algorithm.overlong: filter)"
