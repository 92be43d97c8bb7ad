"""The updates of a step: their order, what they are against, and what is left when they are stopped."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from grpo_jax.learner.batch import train_minibatches
from grpo_jax.learner.diagnostics import token_metrics
from grpo_jax.learner.engine import Engine
from grpo_jax.learner.train import train_batch
from tests.learner.tiny import MAX_TOKENS, algorithm_of, flat, make_group, make_trainer, ragged_groups

RATE, CANARY = 1e-2, np.arange(8, dtype=np.int32)
RECOMPUTED = (("anchor", "recomputed"), ("loss", "ppo_clip"), ("minibatches", 2), ("num_iterations", 2))


def engine_of(algorithm=RECOMPUTED):
    return Engine(make_trainer(algorithm=algorithm))


def parts_of(groups, algorithm=RECOMPUTED):
    return train_minibatches(groups, algorithm_of(algorithm), max_tokens=MAX_TOKENS)


def run(engine, parts, *, iterations=2, between=lambda: None):
    lags = [0] * 8
    return train_batch(engine, parts, lags, iterations=iterations, rate=RATE, canary_tokens=CANARY, between=between)


def assert_same_state(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_step_is_its_updates_pass_after_pass_minibatch_after_minibatch():
    groups = ragged_groups()
    engine, by_hand = engine_of(), engine_of()
    trained = run(engine, parts_of(groups))
    packed = [by_hand.trainer.layout.pack(part) for part in parts_of(groups)]
    packed = [[replace(batch, old_logprob_SxN=by_hand.score(batch)) for batch in part] for part in packed]
    losses = []
    for update, part in enumerate([*packed, *packed]):
        by_hand.begin(update)
        for batch in part:
            by_hand.accumulate(batch)
        losses.append(by_hand.apply(RATE, CANARY)[0])
    assert trained.losses == losses
    assert len(trained.norms) == len(trained.finite) == 4
    assert all(trained.finite)
    assert_same_state(engine.host_state(), by_hand.host_state())
    np.testing.assert_array_equal(flat(trained.applied.publish), flat(engine.published()))


def test_the_old_policy_of_every_update_is_the_one_that_met_the_batch():
    groups, fresh = ragged_groups(), engine_of()
    trained = run(engine_of(), parts_of(groups))
    used = np.concatenate([batch.mask_SxN.ravel() for batch in trained.batches])
    old = np.concatenate([batch.old_logprob_SxN.ravel() for batch in trained.batches])
    met = np.concatenate([fresh.score(batch).ravel() for batch in trained.batches])
    np.testing.assert_array_equal(old[used], met[used])
    np.testing.assert_array_equal(trained.record.proximal_N, np.tile(met[used], 2))
    moved = np.abs(trained.record.logprob_N - trained.record.proximal_N)
    first = trained.batches[0].count
    assert moved[:first].max() < 1e-5  # of the first update's first micro-batch: the policy has not moved yet
    assert moved[-first:].mean() > 1e-3


def test_against_the_recomputed_policy_a_single_update_has_a_ratio_of_one_and_clips_nothing():
    engine = engine_of()
    (whole,) = train_minibatches(ragged_groups(), algorithm_of(RECOMPUTED[:2]), max_tokens=MAX_TOKENS)
    trained = run(engine, [whole], iterations=1)
    np.testing.assert_allclose(trained.record.logprob_N, trained.record.proximal_N, atol=1e-5)
    metrics = token_metrics(trained.record, weighted=False)
    assert {value for name, value in metrics.items() if name.startswith("clip_ratio")} == {0.0}
    # Every term is then −A, whatever the sampler said.
    expected = sum(s.token_weight * len(s.completion) * -s.advantage for s in whole)
    assert trained.losses == pytest.approx([expected], abs=1e-5)


class Stop(Exception):
    pass


def stopping(engine, after):
    """Raises once so many updates were made, and a micro-batch of the next one."""
    calls = 0

    def between():
        nonlocal calls
        if int(engine.host_state().updates) == after:
            calls += 1
            if calls == 2:
                raise Stop

    return between


@pytest.mark.parametrize("after", [1, 3])
def test_a_step_that_is_stopped_between_two_updates_did_not_happen(after):
    engine, untouched, parts = engine_of(), engine_of(), parts_of(ragged_groups())
    with pytest.raises(Stop):
        run(engine, parts, between=stopping(engine, after))
    assert_same_state(engine.host_state(), untouched.host_state())
    again, expected = run(engine, parts), run(untouched, parts)
    assert again.losses == expected.losses
    assert_same_state(engine.host_state(), untouched.host_state())


@pytest.mark.parametrize("parts", [[], [[]], [[], []]], ids=str)
def test_nothing_to_train_is_no_update(parts):
    engine = engine_of()
    before = engine.host_state()
    trained = run(engine, parts)
    assert trained.applied is None
    assert (trained.losses, trained.norms, trained.finite, trained.batches) == ([], [], [], [])
    assert token_metrics(trained.record, weighted=False) == {}
    assert_same_state(engine.host_state(), before)


def test_a_minibatch_without_a_sample_makes_no_update():
    engine, other = engine_of(), engine_of()
    (first, second) = parts_of(ragged_groups())
    with_empty, without = run(engine, [first, [], second]), run(other, [first, second])
    assert with_empty.losses == without.losses
    assert len(with_empty.losses) == 4
    assert_same_state(engine.host_state(), other.host_state())


def test_micro_batches_of_one_update_are_summed_not_averaged():
    engine, rng = engine_of(), np.random.default_rng(0)
    groups = [make_group(rng, i, n=5, longest=1) for i in range(8)]  # one token a sample
    (samples,) = train_minibatches(groups, algorithm_of(RECOMPUTED[:2]), max_tokens=MAX_TOKENS)
    # The ratio is 1, so a term is −A: 2 for a tenth of the tokens, 0.5 for the others.
    samples = [replace(s, advantage=-2.0 if s.group == 0 and s.sample < 4 else -0.5) for s in samples]
    trained = run(engine, [samples], iterations=1)
    assert len({batch.count for batch in trained.batches}) > 1
    assert trained.losses == pytest.approx([0.1 * 2.0 + 0.9 * 0.5], abs=1e-5)
