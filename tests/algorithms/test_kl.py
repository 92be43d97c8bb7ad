import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.algorithms.kl import kl_terms

ESTIMATORS = ("k1", "k2", "k3", "k3_value_k2_gradient")
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)


pytestmark = pytest.mark.usefixtures("float64")


def oracle(logprob, reference, estimator):
    """One token: (term, d term / d log π)."""
    k1 = logprob - reference
    inside = min(max(k1, -20.0), 20.0)
    ratio = math.exp(-inside)
    k3 = ratio - 1 + inside
    return {
        "k1": (k1, 1.0),
        "k2": (k1 * k1 / 2, k1),
        "k3": (k3, 1 - ratio if abs(k1) < 20 else 0.0),
        "k3_value_k2_gradient": (k3, k1),
    }[estimator]


@functools.partial(jax.jit, static_argnames="estimator")
def _evaluate(logprob, reference, mask, weight, estimator):
    def total(x):
        term = kl_terms(x, reference, mask, estimator=estimator)
        return (weight * term).sum(), term

    (_, term), gradient = jax.value_and_grad(total, has_aux=True)(logprob)
    return term, gradient


def term_and_gradient(logprob, reference, mask, weight, estimator):
    return [np.asarray(x) for x in _evaluate(logprob, reference, mask, weight, estimator)]


def random_pair(seed, spread, n=64):
    rng = np.random.default_rng(seed)
    middle = rng.uniform(-3, 0, n)
    logprob, reference = -np.abs(middle + spread * rng.normal(size=(2, n)))
    return logprob, reference, rng.random(n) < 0.8, rng.uniform(0.5, 2, n)


@every_estimator
@pytest.mark.parametrize("spread", [1e-3, 0.3, 3.0, 100.0])
def test_value_and_gradient_equal_the_formula(estimator, spread):
    logprob, reference, mask, weight = random_pair(0, spread)
    term, gradient = term_and_gradient(logprob, reference, mask, weight, estimator)
    for i in range(len(mask)):
        value, slope = oracle(logprob[i], reference[i], estimator) if mask[i] else (0.0, 0.0)
        np.testing.assert_allclose(term[i], value, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(gradient[i], weight[i] * slope, rtol=1e-9, atol=1e-12)


@every_estimator
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_a_masked_token_holds_reaches_neither_value_nor_gradient(estimator, poison):
    logprob, reference, mask, weight = random_pair(1, 0.3)
    dirty = [np.where(mask, x, poison) for x in (logprob, reference)]
    clean = term_and_gradient(logprob, reference, mask, weight, estimator)
    for pair in ((dirty[0], reference), (logprob, dirty[1]), dirty):
        for before, after in zip(clean, term_and_gradient(*pair, mask, weight, estimator), strict=True):
            np.testing.assert_array_equal(after, before)
            assert not after[~mask].any()


@every_estimator
def test_a_policy_equal_to_its_reference_has_no_kl(estimator):
    logprob, _, mask, weight = random_pair(2, 0.3)
    term, gradient = term_and_gradient(logprob, logprob, mask, weight, estimator)
    np.testing.assert_array_equal(term, 0)
    np.testing.assert_allclose(gradient, np.where(mask, weight, 0) if estimator == "k1" else 0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_value_k2_gradient"])
def test_no_term_is_negative_but_of_k1(estimator):
    logprob, reference, mask, weight = random_pair(3, 2.0)
    assert (term_and_gradient(logprob, reference, mask, weight, estimator)[0] >= 0).all()


@every_estimator
def test_float32_stays_finite_at_any_ratio(estimator):
    logprob, reference, mask, weight = random_pair(4, 300.0)
    single = [x.astype(np.float32) for x in (logprob, reference)]
    for result in term_and_gradient(*single, mask, weight.astype(np.float32), estimator):
        assert np.isfinite(result).all()


@pytest.mark.parametrize(
    ("estimator", "objective"),
    [
        ("k1", lambda p, q: 0.0 * p.sum()),
        ("k2", lambda p, q: (p * jnp.log(p / q)).sum()),
        ("k3", lambda p, q: (q * jnp.log(q / p)).sum()),
        ("k3_value_k2_gradient", lambda p, q: (p * jnp.log(p / q)).sum()),
    ],
)
def test_the_expected_gradient_under_the_policy_is_that_of_the_documented_divergence(estimator, objective):
    """k1: none at all, k2 and the straight-through form: KL(π‖ref), k3: KL(ref‖π)."""
    logits, reference = np.random.default_rng(5).normal(size=(2, 7))
    q = jax.nn.softmax(reference)

    @jax.jit
    def expected_term(logits):
        logprob = jax.nn.log_softmax(logits)
        term = kl_terms(logprob, jnp.log(q), jnp.ones(7, bool), estimator=estimator)
        return (jax.lax.stop_gradient(jnp.exp(logprob)) * term).sum()

    expected = jax.grad(jax.jit(lambda logits: objective(jax.nn.softmax(logits), q)))(logits)
    np.testing.assert_allclose(jax.grad(expected_term)(logits), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_value_k2_gradient"])
def test_the_expected_value_under_the_policy_is_the_kl(estimator):
    logits, reference = np.random.default_rng(6).normal(size=(2, 7))
    p, q = jax.nn.softmax(logits), jax.nn.softmax(reference)
    term = kl_terms(jnp.log(p), jnp.log(q), jnp.ones(7, bool), estimator=estimator)
    np.testing.assert_allclose((p * term).sum(), (p * jnp.log(p / q)).sum(), rtol=1e-9)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k9"):
        kl_terms(np.zeros(1), np.zeros(1), np.ones(1, bool), estimator="k9")
