import functools

import jax
import numpy as np
import pytest

from grpo_jax.algorithms import off_policy
from tests.algorithms import oracle

PARAMS = {
    "token_tis": {"cap": 2.0},
    "sequence_tis": {"cap": 3.0},
    "token_mis": {"low": 0.5, "high": 5.0},
    "sequence_mis": {"cap": 3.0},
    "geometric_mask": {"low": 0.9, "high": 1.1},
    "outlier_veto": {"low": 0.3, "high": 3.0},
}
OF_A_SEQUENCE = ("sequence_tis", "sequence_mis", "geometric_mask", "outlier_veto")
LOGPROBS = ("logprob_N", "sampler_logprob_N", "anchor_logprob_N", "proximal_logprob_N")
every_weight = pytest.mark.parametrize("name", PARAMS)
every_layout = pytest.mark.parametrize("layout", oracle.LAYOUTS)


pytestmark = pytest.mark.usefixtures("float64")


@functools.partial(jax.jit, static_argnames="name")
def _evaluate(tokens, name):
    return getattr(off_policy, name)(tokens, **PARAMS[name])


def evaluate(name, tokens):
    return np.asarray(_evaluate(tokens, name))


@every_weight
@every_layout
@pytest.mark.parametrize("spread", [0.05, 0.4, 2.0, 100.0])
def test_the_weight_equals_the_formula(name, layout, spread):
    for seed in range(5):
        tokens = oracle.random_tokens(seed, layout, spread)
        expected = oracle.off_policy_weight(getattr(oracle, name), tokens, **PARAMS[name])
        got = evaluate(name, tokens)
        assert np.issubdtype(got.dtype, np.floating)
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


@every_weight
def test_the_ratio_is_of_the_proximal_policy_and_not_of_the_anchor_or_the_current_one(name):
    tokens = oracle.random_tokens(0, "interleaved", 0.4)
    other = tokens._replace(logprob_N=tokens.logprob_N - 1.0, anchor_logprob_N=tokens.sampler_logprob_N)
    np.testing.assert_array_equal(evaluate(name, other), evaluate(name, tokens))


@every_weight
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_a_masked_token_holds_does_not_matter(name, poison):
    tokens = oracle.random_tokens(0, "interleaved", 0.05)
    clean = evaluate(name, tokens)
    for fields in (*((f,) for f in LOGPROBS), LOGPROBS):
        poisoned = tokens._replace(**{f: np.where(tokens.mask_N, getattr(tokens, f), poison) for f in fields})
        np.testing.assert_array_equal(evaluate(name, poisoned), clean)
    for stray in (-1, 0, 31, 2**31 - 1):
        strayed = tokens._replace(sample_N=np.where(tokens.mask_N, tokens.sample_N, stray).astype(np.int32))
        np.testing.assert_array_equal(evaluate(name, strayed), clean)
    assert not clean[~tokens.mask_N].any()


@every_weight
@pytest.mark.parametrize("spread", [0.05, 100.0])
def test_no_gradient_passes_through_a_weight(name, spread):
    tokens = oracle.random_tokens(0, "interleaved", spread)

    @jax.jit
    def total(logprobs):
        return getattr(off_policy, name)(tokens._replace(**logprobs), **PARAMS[name]).sum()

    for gradient in jax.grad(total)({f: getattr(tokens, f) for f in LOGPROBS}).values():
        np.testing.assert_array_equal(gradient, 0)


@every_weight
@every_layout
def test_where_the_sampler_is_the_policy_every_trained_token_weighs_one(name, layout):
    tokens = oracle.random_tokens(0, layout, 0.4)
    same = tokens._replace(proximal_logprob_N=tokens.sampler_logprob_N)
    np.testing.assert_allclose(evaluate(name, same), tokens.mask_N)


@every_weight
@every_layout
def test_the_order_of_tokens_does_not_matter(name, layout):
    tokens = oracle.random_tokens(1, layout, 0.1)
    order = np.random.default_rng(0).permutation(len(tokens.mask_N))
    moved = tokens._replace(**{f: getattr(tokens, f)[order] for f in tokens._fields if f != "update"})
    np.testing.assert_allclose(evaluate(name, moved), evaluate(name, tokens)[order], rtol=1e-12)


@pytest.mark.parametrize("name", OF_A_SEQUENCE)
@pytest.mark.parametrize("spread", [0.05, 0.4])
def test_the_tokens_of_a_sample_share_one_weight(name, spread):
    tokens = oracle.random_tokens(2, "interleaved", spread)
    weight = evaluate(name, tokens)
    for i in range(5):
        assert len(np.unique(weight[tokens.mask_N & (tokens.sample_N == i)])) == 1


@pytest.mark.parametrize("name", OF_A_SEQUENCE)
@pytest.mark.parametrize("shift", [-30.0, 30.0])
def test_one_token_far_off_changes_its_own_sample_only(name, shift):
    tokens = oracle.random_tokens(3, "interleaved", 0.05)
    victim = np.flatnonzero(tokens.mask_N)[0]
    far = tokens.proximal_logprob_N.copy()
    far[victim] += shift
    before, after = evaluate(name, tokens), evaluate(name, tokens._replace(proximal_logprob_N=far))
    np.testing.assert_array_equal(before != after, tokens.mask_N & (tokens.sample_N == tokens.sample_N[victim]))


@every_weight
def test_float32_stays_finite_at_any_ratio(name):
    tokens = oracle.random_tokens(4, "interleaved", 300.0)
    single = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, tokens)
    weight = evaluate(name, single)
    assert np.isfinite(weight).all()
    assert (weight >= 0).all()
