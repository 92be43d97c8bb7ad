import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.algorithms.advantages import group_advantages

KINDS = ("grpo", "dr_grpo", "rloo", "batch_std", "maxrl")
every_kind = pytest.mark.parametrize("kind", KINDS)
few = settings(deadline=None, max_examples=15)
every_ddof = pytest.mark.parametrize("ddof", [0, 1])


@pytest.fixture(scope="module", autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def mean_of(values):
    return sum(values) / len(values)


def std_of(values, ddof):
    """0 where ddof leaves no degree of freedom: every use has a numerator of 0 there, or has advantage 0 by rule."""
    if len(values) <= ddof:
        return 0.0
    return math.sqrt(sum((v - mean_of(values)) ** 2 for v in values) / (len(values) - ddof))


def oracle(rewards, valid, kind, eps, ddof):
    """The formulas, sample by sample."""
    everyone = [float(r) for r in rewards[valid]]
    advantages = np.zeros(rewards.shape)
    for p, g in zip(*np.nonzero(valid), strict=True):
        group = [float(r) for r in rewards[p][valid[p]]]
        n, centred = len(group), float(rewards[p, g]) - mean_of(group)
        if kind == "grpo" and n > ddof:
            advantages[p, g] = centred / (std_of(group, ddof) + eps)
        elif kind == "dr_grpo":
            advantages[p, g] = centred
        elif kind == "rloo" and n > 1:
            advantages[p, g] = n / (n - 1) * centred
        elif kind == "batch_std" and len(everyone) > ddof:
            advantages[p, g] = centred / (std_of(everyone, ddof) + eps)
        elif kind == "maxrl" and mean_of(group) > 0:
            advantages[p, g] = centred / mean_of(group)
    return advantages


def advantages(rewards, valid, kind, eps=0.1, ddof=0, dtype=np.float64):
    return np.asarray(group_advantages(np.asarray(rewards, dtype), np.asarray(valid), kind=kind, eps=eps, ddof=ddof))


# Multiples of 1/8: their sums are exact, so that a mean of zero is one in any order of summation.
REWARDS = st.lists(st.integers(-24, 24), min_size=12, max_size=12).map(lambda x: np.reshape(x, (3, 4)) / 8)
VALID = st.lists(st.booleans(), min_size=12, max_size=12).map(lambda x: np.reshape(x, (3, 4)))


@every_kind
@every_ddof
@settings(deadline=None, max_examples=40)
@given(rewards=REWARDS, valid=VALID)
def test_equals_the_formula(kind, ddof, rewards, valid):
    got = advantages(rewards, valid, kind, 0.1, ddof)
    np.testing.assert_allclose(got, oracle(rewards, valid, kind, 0.1, ddof), rtol=1e-9, atol=1e-12)


@every_kind
@few
@given(rewards=REWARDS, valid=VALID)
def test_the_advantages_of_a_group_sum_to_zero(kind, rewards, valid):
    np.testing.assert_allclose(advantages(rewards, valid, kind).sum(axis=1), 0, atol=1e-9)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "batch_std"])
@few
@given(rewards=REWARDS, valid=VALID, shift=st.integers(-80, 80))
def test_adding_a_constant_to_all_rewards_changes_nothing(kind, rewards, valid, shift):
    shifted = advantages(rewards + shift / 8, valid, kind)
    np.testing.assert_allclose(shifted, advantages(rewards, valid, kind), atol=1e-9)


@every_kind
@few
@given(rewards=REWARDS, valid=VALID)
def test_scaling_the_rewards_scales_what_is_not_normalised_and_nothing_else(kind, rewards, valid):
    scaled = advantages(rewards * 3.0, valid, kind, eps=0.3)
    factor = 3.0 if kind in ("dr_grpo", "rloo") else 1.0
    np.testing.assert_allclose(scaled, factor * advantages(rewards, valid, kind, eps=0.1), atol=1e-9)


@every_kind
@every_ddof
@few
@given(rewards=REWARDS, valid=VALID, poison=st.sampled_from([7.0, np.nan, np.inf, -np.inf]))
def test_what_an_unscorable_sample_holds_does_not_matter(kind, ddof, rewards, valid, poison):
    clean = advantages(rewards, valid, kind, 0.1, ddof)
    np.testing.assert_array_equal(advantages(np.where(valid, rewards, poison), valid, kind, 0.1, ddof), clean)
    assert not clean[~valid].any()


@every_kind
@few
@given(rewards=REWARDS, valid=VALID)
def test_padding_with_unscorable_samples_and_groups_changes_nothing(kind, rewards, valid):
    padded = [np.pad(x, ((0, 1), (0, 3))) for x in (rewards, valid)]
    expected = np.pad(advantages(rewards, valid, kind), ((0, 1), (0, 3)))
    np.testing.assert_allclose(advantages(*padded, kind), expected, atol=1e-12)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "maxrl"])
@few
@given(rewards=REWARDS, valid=VALID)
def test_a_group_does_not_see_the_others(kind, rewards, valid):
    alone = valid & np.array([[False], [True], [False]])
    np.testing.assert_array_equal(advantages(rewards, alone, kind)[1], advantages(rewards, valid, kind)[1])


@every_kind
@every_ddof
@few
@given(valid=VALID, reward=st.sampled_from([-2.0, 0.0, 1.0]))
def test_equal_rewards_have_advantage_zero_even_without_eps(kind, ddof, valid, reward):
    assert not advantages(np.full((3, 4), reward), valid, kind, 0.0, ddof).any()


@every_kind
@every_ddof
@few
@given(rewards=REWARDS, valid=VALID)
def test_nothing_is_ever_nan_without_eps(kind, ddof, rewards, valid):
    assert np.isfinite(advantages(rewards, valid, kind, 0.0, ddof)).all()


@every_kind
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1 / 3])
def test_equal_rewards_have_advantage_zero_where_float32_rounds_their_mean(kind, reward):
    """The mean is then not quite the reward; over a spread as small that would be an advantage of ±1."""
    for count in range(1, 13):
        valid = np.arange(12).reshape(1, 12) < count
        got = advantages(np.full((1, 12), reward), valid, kind, eps=0.0, dtype=np.float32)
        np.testing.assert_allclose(got, 0, atol=1e-6)


@every_kind
@every_ddof
def test_a_single_scorable_sample_has_advantage_zero(kind, ddof):
    single = np.zeros((3, 4), bool)
    single[1, 2] = True
    assert not advantages(np.where(single, 5.0, np.nan), single, kind, 0.0, ddof).any()


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [1.0, -1.0], [-1.0, -3.0]])
def test_maxrl_without_a_positive_mean_has_advantage_zero(rewards):
    assert not advantages([rewards], [[True, True]], "maxrl").any()


def test_the_rewards_of_one_solved_sample_in_four():
    """Worked by hand: mean 1/4, std √3/4 or 1/2."""
    rewards, valid = [[1.0, 0.0, 0.0, 0.0]], np.ones((1, 4), bool)
    assert advantages(rewards, valid, "grpo", 0.0, 0)[0, 0] == pytest.approx(3**0.5)
    assert advantages(rewards, valid, "grpo", 0.0, 1)[0, 0] == pytest.approx(1.5)
    assert advantages(rewards, valid, "dr_grpo")[0, 0] == pytest.approx(0.75)
    assert advantages(rewards, valid, "rloo")[0, 0] == pytest.approx(1.0)
    assert advantages(rewards, valid, "maxrl")[0, 0] == pytest.approx(3.0)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="unknown advantages 'gae'"):
        group_advantages(np.zeros((1, 2)), np.ones((1, 2), bool), kind="gae", eps=0.0, ddof=0)
