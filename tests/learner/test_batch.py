"""What a batch weighs: advantages over groups, weights over minibatches, and who is left out of what."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.algorithms import advantages, aggregation
from grpo_jax.algorithms.registry import LOSSES, loss_function
from grpo_jax.config.schema import Algorithm
from grpo_jax.learner.batch import is_all_alike, is_zero_variance, shaped_rewards, train_minibatches
from tests.algorithms.oracle import random_tokens
from tests.learner.tiny import MAX_TOKENS, make_group, ragged_groups

EQUAL, UNEQUAL = [0.25, 0.25], [1.0, 0.0]


def sized(index, lengths, rewards, cut=()):
    """A group of completions of given lengths; those in `cut` ended at the limit."""
    rng = np.random.default_rng(index)
    group = make_group(rng, index, n=len(lengths), rewards=rewards)
    samples = [
        replace(
            sample,
            tokens=rng.integers(0, 9, length).astype(np.int32),
            logprobs=-np.ones(length, np.float32),
            finish_reason="length" if i in cut else "stop",
        )
        for i, (sample, length) in enumerate(zip(group.samples, lengths, strict=True))
    ]
    return replace(group, samples=tuple(samples))


def minibatches(groups, *, step_lags=None, skip=False, **algorithm):
    return train_minibatches(
        groups, Algorithm(**algorithm), max_tokens=MAX_TOKENS, step_lags=step_lags, skip_zero_advantage=skip
    )


def chosen(samples):
    return [(s.group, s.sample) for s in samples]


def test_the_mean_of_all_tokens_is_not_a_mean_of_means():
    groups = [sized(0, [50, 50], UNEQUAL), sized(1, [300] * 3, [0, 1, 2])]
    terms = {0: 2.0, 1: 0.5}
    (samples,) = minibatches(groups, aggregation="token_mean")
    assert sum(s.token_weight * len(s.completion) * terms[s.group] for s in samples) == pytest.approx(0.65)
    first, second = minibatches(groups, aggregation="token_mean", minibatches=2)
    assert {s.token_weight for s in first} == {1 / 100}  # an update knows nothing of the other one's tokens
    assert {s.token_weight for s in second} == {1 / 900}


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 99), st.integers(1, 7), st.integers(1, 4), st.sampled_from(aggregation.KINDS))
def test_minibatches_hold_every_group_once_and_whole_with_advantages_of_the_whole_batch(seed, count, parts, kind):
    groups = ragged_groups(seed, count)
    how = {"advantages": "batch_std", "aggregation": kind}
    found, (whole,) = minibatches(groups, minibatches=parts, **how), minibatches(groups, **how)
    assert len(found) == parts
    sizes = [len({s.group for s in part}) for part in found]
    assert max(sizes) - min(sizes) <= 1
    assert [(s.group, s.sample, s.advantage) for part in found for s in part] == [
        (s.group, s.sample, s.advantage) for s in whole
    ]


def test_a_group_of_equal_rewards_counts_in_denominators_when_kept_and_nowhere_when_dropped():
    groups = [sized(0, [4, 6], UNEQUAL), sized(1, [5, 5], EQUAL)]
    for kind, kept, dropped in [("token_mean", 1 / 20, 1 / 10), ("token_sum", 1 / 4, 1 / 2)]:
        (keep,) = minibatches(groups, aggregation=kind)
        (skip,) = minibatches(groups, aggregation=kind, skip=True)
        assert {s.token_weight for s in keep} == {s.token_weight for s in skip} == {kept}
        assert chosen(keep) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert chosen(skip) == [(0, 0), (0, 1)]
        for choice in ("drop", "replace"):
            (samples,) = minibatches(groups, aggregation=kind, zero_variance=choice)
            assert {s.token_weight for s in samples} == {dropped}
            assert chosen(samples) == [(0, 0), (0, 1)]


def test_a_filtered_completion_is_not_trained_but_counts_in_means_and_denominators():
    groups = [sized(0, [3, 9, 8], [1.0, 0.0, 0.0], cut=[1])]
    (every,) = minibatches(groups)
    (samples,) = minibatches(groups, overlong="filter")
    assert chosen(samples) == [(0, 0), (0, 2)]
    for sample, same in zip(samples, [every[0], every[2]], strict=True):
        assert (sample.advantage, sample.token_weight) == (same.advantage, same.token_weight)
    assert samples[0].token_weight == 1 / 20
    assert samples[0].advantage == pytest.approx(2 / 3)


def test_the_overlong_penalty_falls_over_the_cache_and_leaves_the_recorded_reward_alone():
    algorithm = Algorithm(overlong_cache=4, overlong_penalty=0.5)
    group = sized(0, [2, 5, 6, 7, 9], [1.0] * 5)
    shaped = shaped_rewards(group, algorithm, MAX_TOKENS)
    np.testing.assert_allclose(shaped, [1.0, 1.0, 0.875, 0.75, 0.5])
    np.testing.assert_array_equal(group.rewards, [1.0] * 5)
    assert is_zero_variance(group, Algorithm(), MAX_TOKENS)
    assert not is_zero_variance(group, algorithm, MAX_TOKENS)
    # What replaces such groups asks whether all are right or all are wrong.
    assert is_all_alike(group)
    (samples,) = minibatches([group], overlong_cache=4, overlong_penalty=0.5)
    np.testing.assert_allclose([s.advantage for s in samples], shaped - shaped.mean(), atol=1e-6)


def test_unscorable_samples_count_nowhere_and_empty_ones_in_the_mean_and_in_the_number_of_samples():
    plain = sized(0, [4, 5], UNEQUAL)
    rest = sized(1, [3, 6, 0], [1.0, None, 4.0])
    broken = replace(rest.samples[0], logprobs=np.full(3, np.nan, np.float32))
    (expected,) = minibatches([plain], aggregation="sequence_mean")
    unscored = replace(plain, samples=(broken, *plain.samples, rest.samples[1]))
    (found,) = minibatches([unscored], aggregation="sequence_mean")
    assert chosen(found) == [(0, 1), (0, 2)]
    assert [(s.advantage, s.token_weight) for s in found] == [(s.advantage, s.token_weight) for s in expected]
    (found,) = minibatches([replace(plain, samples=(*plain.samples, rest.samples[2]))], aggregation="sequence_mean")
    assert chosen(found) == [(0, 0), (0, 1)]
    assert [s.token_weight for s in found] == pytest.approx([1 / (3 * 4), 1 / (3 * 5)])
    assert found[0].advantage == pytest.approx(1 - 5 / 3)


@pytest.mark.parametrize(
    "algorithm",
    [{"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"loss": "dppo_tv"}, {"loss": "tests.toy_losses:likelihood"}],
    ids=str,
)
def test_samples_without_an_advantage_stay_where_something_else_trains_them(algorithm):
    groups = [sized(0, [4, 6], UNEQUAL), sized(1, [5, 5], EQUAL)]
    (samples,) = minibatches(groups, skip=True, **algorithm)
    assert len(samples) == 4


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.zero_without_advantage])
def test_losses_whose_samples_may_be_left_out_are_zero_without_an_advantage(name):
    tokens = random_tokens(3, "interleaved", 1.0)
    tokens = tokens._replace(advantage_N=np.zeros_like(tokens.advantage_N))

    def term(logprob_N):
        terms = loss_function(name)(tokens._replace(logprob_N=logprob_N), **LOSSES[name].defaults).term_N
        return terms.sum(), terms

    slope, terms = jax.grad(term, has_aux=True)(jnp.asarray(tokens.logprob_N))
    assert not np.any(terms)
    assert not np.any(slope)


def test_staleness_is_counted_in_updates():
    groups = ragged_groups(count=3)
    found = minibatches(groups, step_lags=[0, 2, 1], minibatches=3, num_iterations=2)
    for part, lag in zip(found, [0, 2, 1], strict=True):
        assert {s.staleness for s in part} == {lag * 6.0}


@pytest.mark.parametrize("kind", advantages.KINDS)
def test_equal_rewards_without_an_exact_mean_have_no_advantage_at_all(kind):
    groups = [sized(0, [3] * 8, [0.1] * 8), sized(1, [3] * 3, [0.1, 0.7, 0.2])]
    (samples,) = minibatches(groups, advantages=kind)
    assert {s.advantage for s in samples if s.group == 0} == {0.0}
    assert all(s.advantage for s in samples if s.group == 1)


def test_a_batch_without_a_group_has_no_minibatch():
    assert minibatches([], minibatches=3) == []
