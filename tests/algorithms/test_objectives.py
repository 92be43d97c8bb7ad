import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.algorithms.objectives import TokenArrays, dual_clip

LOW, HIGH, CAP = 0.2, 0.28, 3.0


def oracle(logprob, sampler, advantage):
    """One token, from the formula, in float64: (loss, d loss / d logprob)."""
    delta = logprob - sampler
    ratio = np.exp(np.clip(delta, -20, 20))
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    surrogate, slope = ratio * advantage, ratio * advantage
    if clipped * advantage < surrogate:
        surrogate, slope = clipped * advantage, 0.0
    if advantage < 0 and surrogate < CAP * advantage:
        surrogate, slope = CAP * advantage, 0.0
    return -surrogate, -slope if abs(delta) < 20 else 0.0


def loss_and_gradient(logprob, sampler, advantage, mask=None):
    mask = np.ones(len(logprob), bool) if mask is None else mask

    def total(x):
        term = dual_clip(TokenArrays(x, sampler, advantage, mask), clip_low=LOW, clip_high=HIGH, cap=CAP)
        return term.sum(), term

    (_, term), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(logprob))
    return np.asarray(term), np.asarray(gradient)


# Log-ratios inside the clip range, beyond each side, beyond the cap, and far beyond what exp can hold.
DELTAS = np.array([0.0, 0.1, -0.1, 0.5, -0.5, 1.0, 1.5, -3.0, 5.0, 30.0, -30.0, 300.0])


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0, 2.5, -0.3])
def test_value_and_gradient_equal_the_formula(advantage):
    sampler = np.linspace(-4, -0.1, len(DELTAS))
    with jax.enable_x64(True):
        got = loss_and_gradient(sampler + DELTAS, sampler, np.full(len(DELTAS), advantage))
    expected = np.array([oracle(s + d, s, advantage) for s, d in zip(sampler, DELTAS, strict=True)]).T
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-9)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-9, atol=1e-12)


def test_the_loss_of_a_negative_advantage_is_bounded():
    term, _ = loss_and_gradient(np.array([0.0]), np.array([-50.0]), np.array([-2.0]))
    assert term[0] == pytest.approx(CAP * 2)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_a_masked_token_holds_reaches_neither_value_nor_gradient(poison):
    mask = np.array([True, False])
    bad = np.array([-1.0, poison], np.float32)
    clean = np.array([-1.0, 0.0], np.float32)
    for arrays in ((bad, clean, clean), (clean, bad, clean), (clean, clean, bad), (bad, bad, bad)):
        term, gradient = loss_and_gradient(*arrays, mask)
        assert np.isfinite([*term, *gradient]).all()
        assert (term[1], gradient[1]) == (0, 0)
