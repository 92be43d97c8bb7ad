"""One step on the device: the batch scored where the objective asks for it, then update after update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from grpo_jax.config.schema import Config
from grpo_jax.learner.batch import train_minibatches
from grpo_jax.learner.diagnostics import TokenRecord
from grpo_jax.learner.engine import Engine
from grpo_jax.learner.packing import MicroBatch, TrainSample
from grpo_jax.learner.step import Applied, TokenOutputs
from grpo_jax.rollouts.sample import Group


@dataclass
class Trained:
    """What the updates of a step left behind. `losses`, `norms` and `finite` have one entry per update."""

    batches: list[MicroBatch] = field(default_factory=list)  # of one pass
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    applied: Applied | None = None  # of the last update; None when there was nothing to train on
    record: TokenRecord | None = None


def train_groups(
    engine: Engine,
    config: Config,
    groups: Sequence[Group],
    step: int,
    *,
    rate: float,
    canary_tokens: np.ndarray,
    between: Callable[[], None] = lambda: None,
) -> Trained:
    """All updates of one step on the groups of its batch; returns once they are computed. See `train_batch`."""
    lags = [step - group.version * config.sync_every for group in groups]
    minibatches = train_minibatches(
        groups,
        config.algorithm,
        max_tokens=config.sampling.max_tokens,
        step_lags=lags,
        skip_zero_advantage=config.batch.skip_zero_advantage,
    )
    trained = train_batch(
        engine,
        minibatches,
        lags,
        iterations=config.algorithm.num_iterations,
        rate=rate,
        canary_tokens=canary_tokens,
        between=between,
    )
    jax.block_until_ready(trained.applied)
    return trained


def train_batch(
    engine: Engine,
    minibatches: Sequence[Sequence[TrainSample]],
    step_lags: Sequence[int],
    *,
    iterations: int,
    rate: float,
    canary_tokens: np.ndarray,
    between: Callable[[], None] = lambda: None,
) -> Trained:
    """Makes `iterations` passes over the minibatches, an optimiser update for each.

    Args:
      minibatches: see `batch.train_minibatches`. A minibatch without samples makes no update.
      step_lags: for each group, learner step − the step of the policy that sampled it.
      rate: learning rate of the whole step.
      between: called between two micro-batches; may raise, which leaves the state as it was before the step.
    """
    objective = engine.trainer.objective
    trained = Trained()
    packed: list[tuple[Sequence[TrainSample], list[MicroBatch]]] = []
    for samples in minibatches:
        batches = engine.trainer.layout.pack(samples)
        for i, batch in enumerate(batches):
            between()
            # Before the first update of the step, for all minibatches: π_old is the policy that the batch met.
            if objective.needs_old:
                batch = replace(batch, old_logprob_SxN=engine.score(batch).astype(batch.old_logprob_SxN.dtype))
            if objective.needs_reference:
                reference = engine.score_reference(batch).astype(batch.reference_logprob_SxN.dtype)
                batch = replace(batch, reference_logprob_SxN=reference)
            batches[i] = batch
        if batches:
            packed.append((samples, batches))
        trained.batches += batches
    outputs: list[tuple[Sequence[TrainSample], MicroBatch, TokenOutputs]] = []
    updates = iterations * len(packed)
    if updates > 1:
        engine.mark()
    try:
        for update in range(updates):
            samples, batches = packed[update % len(packed)]
            engine.begin(update)
            for batch in batches:
                between()
                out = engine.accumulate(batch)
                jax.block_until_ready(out.logprob)  # or a stop would have to wait for all that was dispatched
                outputs.append((samples, batch, out))
            loss, trained.applied = engine.apply(rate, canary_tokens)
            trained.losses.append(loss)
            trained.norms.append(float(trained.applied.grad_norm))
            trained.finite.append(bool(trained.applied.finite))
    except BaseException:
        if updates > 1:
            engine.rewind()  # half a step is no state to resume from
        raise
    if updates > 1:
        engine.unmark()
    lags = np.asarray(step_lags, np.int64)
    trained.record = _record(outputs, lags, objective.needs_old, objective.needs_reference)
    return trained


def _record(
    outputs: Sequence[tuple[Sequence[TrainSample], MicroBatch, TokenOutputs]],
    lags: np.ndarray,
    recomputed: bool,
    reference: bool,
) -> TokenRecord:
    columns: list[tuple[np.ndarray, ...]] = []
    for samples, batch, out in outputs:
        used = batch.mask_SxN
        logprob_N = np.asarray(out.logprob, np.float64)[used]
        groups_N = np.array([sample.group for sample in samples])[batch.sample_SxN[used]]
        columns.append(
            (
                logprob_N,
                batch.old_logprob_SxN[used].astype(np.float64) if recomputed else logprob_N,
                batch.reference_logprob_SxN[used].astype(np.float64) if reference else np.zeros(0),
                batch.sampler_logprob_SxN[used].astype(np.float64),
                batch.advantage_SxN[used].astype(np.float64),
                np.asarray(out.entropy, np.float64)[used],
                np.asarray(out.factor, np.float64)[used],
                np.asarray(out.clipped)[used],
                lags[groups_N],
            )
        )
    if not columns:
        return TokenRecord(*(np.zeros(0) for _ in range(9)))
    return TokenRecord(*(np.concatenate(column) for column in zip(*columns, strict=True)))
