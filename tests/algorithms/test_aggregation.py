import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.algorithms.aggregation import token_weights

KINDS = ("sequence_mean", "token_mean", "constant", "token_sum", "prompt_mean")
MAX_LENGTH = 64
every_kind = pytest.mark.parametrize("kind", KINDS)


def oracle(lengths, valid, kind):
    """The weight of a token of each sample, from the formulas, sample by sample."""
    samples = [(p, g) for p in range(len(valid)) for g in range(len(valid[p])) if valid[p][g]]
    tokens = sum(lengths[s] for s in samples)
    prompts = {p for p, g in samples if lengths[p, g] > 0}
    weight = np.zeros(lengths.shape)
    for p, g in samples:
        if lengths[p, g] > 0:
            weight[p, g] = {
                "sequence_mean": 1 / len(samples) / lengths[p, g],
                "token_mean": 1 / tokens,
                "constant": 1 / (len(samples) * MAX_LENGTH),
                "token_sum": 1 / len(samples),
                "prompt_mean": 1 / len(prompts) / sum(lengths[s] for s in samples if s[0] == p),
            }[kind]
    return weight


def weights(lengths, valid, kind):
    return token_weights(np.asarray(lengths), np.asarray(valid), kind=kind, max_length=MAX_LENGTH)


@st.composite
def batches(draw):
    """(lengths, valid) of up to four prompts with up to four samples each; empty and invalid samples are common."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    size = shape[0] * shape[1]
    lengths = draw(st.lists(st.integers(0, MAX_LENGTH), min_size=size, max_size=size))
    valid = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return np.array(lengths).reshape(shape), np.array(valid).reshape(shape)


@every_kind
@settings(deadline=None, max_examples=40)
@given(batch=batches())
def test_what_each_token_weighs_equals_the_formula(kind, batch):
    lengths, valid = batch
    got = weights(lengths, valid, kind)
    assert got.dtype == np.float64
    assert got.shape == lengths.shape
    assert np.isfinite(got).all()
    assert not got[~valid].any()
    # An empty sample has no token to weigh.
    np.testing.assert_allclose(np.where(lengths > 0, got, 0), oracle(lengths, valid, kind), rtol=1e-12)


@every_kind
@settings(deadline=None, max_examples=40)
@given(batch=batches())
def test_the_mean_of_ones_over_a_batch_is_what_the_name_says(kind, batch):
    lengths, valid = batch
    total = (weights(lengths, valid, kind) * lengths).sum()
    if not lengths[valid].any():
        assert total == 0
        return
    mean_length = lengths[valid].mean()
    expected = {
        "sequence_mean": (lengths[valid] > 0).mean(),  # an empty sample counts, and adds nothing
        "token_mean": 1,
        "constant": mean_length / MAX_LENGTH,
        "token_sum": mean_length,
        "prompt_mean": 1,
    }[kind]
    np.testing.assert_allclose(total, expected, rtol=1e-12)


def test_the_token_mean_is_over_the_tokens_of_the_whole_batch():
    # 100 tokens at 2.0 and 900 at 0.5: a mean of the two means would be 1.25.
    lengths, sums = np.array([[100], [900]]), np.array([[100 * 2.0], [900 * 0.5]])
    valid = np.ones((2, 1), bool)
    value = {kind: (token_weights(lengths, valid, kind=kind, max_length=1000) * sums).sum() for kind in KINDS}
    assert value == pytest.approx(
        {"sequence_mean": 1.25, "token_mean": 0.65, "constant": 0.325, "token_sum": 325.0, "prompt_mean": 1.25}
    )


def test_the_prompt_mean_is_over_the_tokens_of_a_prompt_and_then_over_prompts():
    got = weights([[10, 30], [5, 0], [7, 9]], [[True, True], [True, True], [False, False]], "prompt_mean")
    np.testing.assert_allclose(got[[0, 0, 1], [0, 1, 0]], [1 / 80, 1 / 80, 1 / 10])


@every_kind
@settings(deadline=None, max_examples=40)
@given(batch=batches(), other=st.integers(0, 10**6))
def test_the_length_of_an_invalid_sample_does_not_matter(kind, batch, other):
    lengths, valid = batch
    changed = np.where(valid, lengths, other)
    np.testing.assert_array_equal(weights(changed, valid, kind), weights(lengths, valid, kind))


@every_kind
@settings(deadline=None, max_examples=40)
@given(batch=batches())
def test_invalid_columns_and_prompts_can_be_added_without_effect(kind, batch):
    lengths, valid = batch
    padded = [np.pad(x, ((0, 2), (0, 3))) for x in (lengths, valid)]
    expected = np.pad(weights(lengths, valid, kind), ((0, 2), (0, 3)))
    np.testing.assert_allclose(weights(*padded, kind), expected, rtol=1e-12)


@every_kind
@settings(deadline=None, max_examples=40)
@given(batch=batches(), seed=st.integers(0, 99))
def test_the_order_of_prompts_and_of_samples_within_them_does_not_matter(kind, batch, seed):
    lengths, valid = batch
    rng = np.random.default_rng(seed)
    index = np.ix_(rng.permutation(lengths.shape[0]), rng.permutation(lengths.shape[1]))
    expected = weights(lengths, valid, kind)[index]
    np.testing.assert_allclose(weights(lengths[index], valid[index], kind), expected, rtol=1e-12)


@every_kind
def test_a_batch_without_anything_valid_weighs_nothing(kind):
    assert not weights([[3, 0]], [[False, False]], kind).any()
    assert np.isfinite(weights([[0, 5]], [[True, False]], kind)).all()


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="mean_of_means"):
        weights([[1]], [[True]], "mean_of_means")
