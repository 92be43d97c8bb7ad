"""The metrics of a step's tokens, each against its definition."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_jax.learner.diagnostics import TokenRecord, token_metrics

FULL = TokenRecord(
    logprob_N=np.log([0.5, 0.2, 0.1, 0.4, 0.3]),
    proximal_N=np.log([0.5, 0.2, 0.1, 0.4, 0.3]),
    reference_N=np.zeros(0),
    sampler_N=np.log([0.5, 0.1, 0.2, 0.4, 0.3]),
    advantage_N=np.array([1.0, 2.0, -1.0, -1.0, 0.0]),
    entropy_N=np.array([1.0, 2.0, 3.0, 4.0, 5.0]),
    factor_N=np.ones(5),
    clipped_N=np.array([0, 1, -1, -1, 0], np.int8),
    step_lag_N=np.array([0, 0, 0, 2, 2]),
)


def test_a_step_without_a_token_has_no_metrics():
    assert token_metrics(TokenRecord(*(np.zeros(0) for _ in range(9))), weighted=False) == {}


def test_means_of_tokens():
    metrics = token_metrics(FULL, weighted=False)
    ratios = np.array([1, 2, 0.5, 1, 1])
    assert metrics["entropy"] == pytest.approx(3.0)
    assert metrics["ratio"] == pytest.approx(ratios.mean())
    assert metrics["kl"] == pytest.approx(np.mean(1 / ratios - 1 + np.log(ratios)))
    assert metrics["mismatch/max"] == pytest.approx(np.log(2))
    assert metrics["mismatch/mean"] == pytest.approx(2 * np.log(2) / 5)
    assert metrics["clip_ratio/low"] == pytest.approx(2 / 5)
    assert metrics["clip_ratio/high"] == pytest.approx(1 / 5)


def test_the_kl_to_the_base_is_there_if_the_base_was_scored():
    assert "kl_ref" not in token_metrics(FULL, weighted=False)
    same = token_metrics(replace(FULL, reference_N=FULL.logprob_N), weighted=False)
    apart = token_metrics(replace(FULL, reference_N=FULL.logprob_N - np.log(2)), weighted=False)
    assert same["kl_ref"] == 0
    assert apart["kl_ref"] == pytest.approx(0.5 - 1 + np.log(2))


@pytest.mark.parametrize(
    ("factors", "positive", "negative"),
    [([1, 1, 1, 1, 1], 0, 0), ([0, 1, 1, 1, 1], 0.5, 0), ([1, 1, 0, 0, 0], 0, 1), ([0, 0, 2, 0, 1], 1, 0.5)],
)
def test_masked_fractions_are_of_the_tokens_with_that_sign(factors, positive, negative):
    metrics = token_metrics(replace(FULL, factor_N=np.array(factors, float)), weighted=True)
    assert metrics["masked/positive"] == positive
    assert metrics["masked/negative"] == negative


def test_a_sign_without_a_token_has_nothing_masked():
    metrics = token_metrics(replace(FULL, advantage_N=np.ones(5), factor_N=np.zeros(5)), weighted=True)
    assert (metrics["masked/positive"], metrics["masked/negative"]) == (1.0, 0.0)


def effective(weights):
    return np.sum(weights) ** 2 / (len(weights) * np.sum(np.square(weights)))


def test_the_effective_sample_size_is_of_the_weights_or_of_mask_times_ratio():
    factors = np.array([1.0, 2.0, 0.0, 1.0, 0.5])
    record = replace(FULL, factor_N=factors)
    assert token_metrics(record, weighted=True)["ess"] == pytest.approx(effective(factors))
    ratios = np.array([1, 2, 0.5, 1, 1])
    assert token_metrics(record, weighted=False)["ess"] == pytest.approx(effective(factors * ratios))
    assert token_metrics(replace(FULL, sampler_N=FULL.logprob_N), weighted=False)["ess"] == pytest.approx(1.0)
    assert token_metrics(replace(FULL, factor_N=np.zeros(5)), weighted=True)["ess"] == 0.0


def test_the_ratio_of_mismatch_and_sample_size_is_of_the_policy_that_the_batch_met():
    moved = replace(FULL, logprob_N=FULL.logprob_N - 1.0, proximal_N=FULL.sampler_N)
    metrics = token_metrics(moved, weighted=False)
    assert metrics["mismatch/max"] == 0
    assert metrics["ess"] == pytest.approx(1.0)
    assert metrics["ratio"] < 0.5


def test_every_lag_that_occurs_has_metrics_of_its_own():
    metrics = token_metrics(FULL, weighted=False)
    lags = {key.split("/")[1] for key in metrics if "/lag" in key}
    assert lags == {"lag0", "lag2"}
    for name in ("clip_ratio/{}low", "clip_ratio/{}high", "masked/{}positive", "masked/{}negative", "mismatch/{}p99"):
        assert {name.format(lag) for lag in ("", "lag0/", "lag2/")} <= set(metrics)
    assert {"ess", "ess/lag0", "ess/lag2"} <= set(metrics)
    assert metrics["clip_ratio/lag0/low"] == pytest.approx(1 / 3)
    assert metrics["clip_ratio/lag2/low"] == pytest.approx(1 / 2)
    assert metrics["mismatch/lag2/max"] == 0
    assert metrics["ess/lag2"] == pytest.approx(1.0)


def test_a_probability_of_zero_stays_finite():
    metrics = token_metrics(replace(FULL, sampler_N=np.full(5, -1e4)), weighted=False)
    assert all(np.isfinite(value) for value in metrics.values())
