import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.algorithms.advantages import group_advantages

KINDS = ("dr_grpo", "grpo")


def oracle(rewards, valid, kind, eps, ddof):
    """The formulas, sample by sample."""
    out = []
    for row, ok in zip(rewards, valid, strict=True):
        kept = [r for r, v in zip(row, ok, strict=True) if v]
        mean = sum(kept) / len(kept) if kept else 0.0
        spread = 1.0
        if kind == "grpo":
            n = max(len(kept) - ddof, 1)
            spread = (sum((r - mean) ** 2 for r in kept) / n) ** 0.5 + eps
        out.append([(r - mean) / spread if v else 0.0 for r, v in zip(row, ok, strict=True)])
    return np.array(out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ddof", [0, 1])
@settings(deadline=None)
@given(
    rewards=st.lists(st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4), min_size=3, max_size=3),
    valid=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=3, max_size=3),
)
def test_equals_the_formula(kind, ddof, rewards, valid):
    got = group_advantages(np.array(rewards), np.array(valid), kind=kind, eps=0.1, ddof=ddof)
    np.testing.assert_allclose(got, oracle(rewards, valid, kind, 0.1, ddof), atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_unscorable_sample_holds_does_not_matter(kind):
    valid = np.array([[True, True, False]])
    results = [
        np.asarray(group_advantages(np.array([[1.0, 0.0, other]]), valid, kind=kind, eps=1e-4, ddof=1))
        for other in (0.0, 7.0, np.nan, np.inf)
    ]
    for result in results:
        assert np.isfinite(result).all()
        assert result[0, 2] == 0
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_scorable_sample_and_none_at_all_have_advantage_zero(kind):
    rewards, valid = np.array([[5.0, np.nan], [np.nan, np.nan]]), np.array([[True, False], [False, False]])
    np.testing.assert_array_equal(group_advantages(rewards, valid, kind=kind, eps=0.0, ddof=1)[0, 1], 0)
    assert np.isfinite(group_advantages(rewards, valid, kind=kind, eps=1e-4, ddof=1)).all()
    assert not np.any(group_advantages(rewards, valid, kind=kind, eps=1e-4, ddof=1))


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="unknown advantages 'gae'"):
        group_advantages(np.zeros((1, 2)), np.ones((1, 2), bool), kind="gae", eps=0.0, ddof=0)
