import numpy as np

from grpo_jax.algorithms.aggregation import token_mean_weights


def test_the_mean_is_over_the_tokens_of_the_whole_batch():
    # 100 tokens at 2.0 and 900 at 0.5: a mean of the two means would be 1.25.
    weights = token_mean_weights(np.array([100, 900]), np.array([True, True]))
    assert np.isclose(weights @ np.array([100 * 2.0, 900 * 0.5]), 0.65)


def test_samples_that_are_not_scorable_weigh_nothing_and_do_not_count():
    weights = token_mean_weights(np.array([10, 999, 30]), np.array([True, False, True]))
    np.testing.assert_allclose(weights, [1 / 40, 0, 1 / 40])


def test_a_batch_without_tokens_has_finite_weights():
    assert np.isfinite(token_mean_weights(np.array([0, 5]), np.array([True, False]))).all()
