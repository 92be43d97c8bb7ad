import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.algorithms import policy_losses
from tests.algorithms import oracle

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
PARAMS = {
    "ppo_clip": CLIP,
    "dual_clip": CLIP | {"cap": 3.0},
    "cispo": {"low": 0.4, "high": 5.0},
    "reinforce_clip": {"clip_high": 0.5},
    "gspo": {"clip_low": 0.02, "clip_high": 0.03},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "decoupled_ppo": CLIP | {"cap": 5.0},
    "a3po": CLIP | {"cap": 1.5},
    "dppo_tv": {"delta": 0.2, "tau": 1e-3},
    "importance_sampling": {},
}
ARRAYS = tuple(name for name in oracle.TokenArrays._fields if name.endswith("logprob_N"))
ARRAYS += ("advantage_N", "staleness_N")
every_loss = pytest.mark.parametrize("name", PARAMS)
every_layout = pytest.mark.parametrize("layout", oracle.LAYOUTS)


pytestmark = pytest.mark.usefixtures("float64")


@functools.partial(jax.jit, static_argnames="name")
def _evaluate(tokens, weight, name, recomputed):
    def total(logprob):
        anchor = jnp.where(recomputed, tokens.anchor_logprob_N, tokens.sampler_logprob_N)
        proximal = jnp.where(recomputed, tokens.proximal_logprob_N, jax.lax.stop_gradient(logprob))
        used = tokens._replace(logprob_N=logprob, anchor_logprob_N=anchor, proximal_logprob_N=proximal)
        loss = getattr(policy_losses, name)(used, **PARAMS[name])
        return (weight * loss.term_N).sum(), loss

    (_, loss), gradient = jax.value_and_grad(total, has_aux=True)(tokens.logprob_N)
    return loss.term_N, gradient, loss.clipped_low_N, loss.clipped_high_N


def evaluate(name, tokens, weight=None, recomputed=True):
    """(term, d Σ weight·term / d log π, clipped_low, clipped_high); a flag that is left out is False everywhere."""
    weight = np.ones(len(tokens.mask_N)) if weight is None else weight
    results = _evaluate(tokens, weight, name, recomputed)
    return [np.zeros(len(tokens.mask_N), bool) if x is None else np.asarray(x) for x in results]


def with_sampler_as_anchor(tokens):
    return tokens._replace(anchor_logprob_N=tokens.sampler_logprob_N, proximal_logprob_N=tokens.logprob_N)


@every_loss
@every_layout
@pytest.mark.parametrize("recomputed", [False, True], ids=["anchor sampler", "anchor recomputed"])
@pytest.mark.parametrize("spread", [0.05, 0.4, 2.0, 100.0])
def test_value_gradient_and_flags_equal_the_formula(name, layout, recomputed, spread):
    for seed in range(3):
        tokens = oracle.random_tokens(seed, layout, spread)
        weight = np.random.default_rng(seed).uniform(0.5, 2, len(tokens.mask_N))
        term, gradient, low, high = evaluate(name, tokens, weight, recomputed)
        held = tokens if recomputed else with_sampler_as_anchor(tokens)
        expected = oracle.policy_loss(getattr(oracle, name), held, **PARAMS[name])
        np.testing.assert_allclose(term, expected[0], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(gradient, weight * expected[1], rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(low, expected[2])
        np.testing.assert_array_equal(high, expected[3])


@every_loss
@pytest.mark.parametrize("field", [*ARRAYS, "all"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_a_masked_token_holds_reaches_neither_value_nor_gradient(name, field, poison):
    tokens = oracle.random_tokens(0, "interleaved", 0.4)
    fields = ARRAYS if field == "all" else (field,)
    poisoned = tokens._replace(**{f: np.where(tokens.mask_N, getattr(tokens, f), poison) for f in fields})
    for clean, dirty in zip(evaluate(name, tokens), evaluate(name, poisoned), strict=True):
        np.testing.assert_array_equal(dirty, clean)
        assert not dirty[~tokens.mask_N].any()


@every_loss
@pytest.mark.parametrize("stray", [-1, 0, 31, 2**31 - 1])
def test_the_sample_id_of_a_masked_token_does_not_matter(name, stray):
    tokens = oracle.random_tokens(0, "interleaved", 0.05)
    strayed = tokens._replace(sample_N=np.where(tokens.mask_N, tokens.sample_N, stray).astype(np.int32))
    for clean, dirty in zip(evaluate(name, tokens), evaluate(name, strayed), strict=True):
        np.testing.assert_array_equal(dirty, clean)


@every_loss
def test_a_batch_without_trained_tokens_has_no_loss(name):
    tokens = oracle.random_tokens(0, "one sample", 0.4)
    for result in evaluate(name, tokens._replace(mask_N=np.zeros_like(tokens.mask_N))):
        assert not result.any()


@every_loss
@every_layout
def test_the_order_of_tokens_does_not_matter(name, layout):
    tokens = oracle.random_tokens(1, layout, 0.4)
    order = np.random.default_rng(0).permutation(len(tokens.mask_N))
    moved = tokens._replace(**{f: getattr(tokens, f)[order] for f in tokens._fields if f != "update"})
    for before, after in zip(evaluate(name, tokens), evaluate(name, moved), strict=True):
        np.testing.assert_allclose(after, before[order], rtol=1e-12)


@every_loss
def test_float32_stays_finite_at_any_ratio(name):
    tokens = oracle.random_tokens(2, "interleaved", 300.0)
    single = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, tokens)
    for result in evaluate(name, single, np.ones(len(tokens.mask_N), np.float32)):
        assert np.isfinite(result).all()


@every_loss
def test_without_an_advantage_there_is_no_loss_but_the_distance_of_dppo_tv(name):
    tokens = oracle.random_tokens(3, "interleaved", 2.0)
    term, gradient, _, _ = evaluate(name, tokens._replace(advantage_N=np.zeros(len(tokens.mask_N))))
    distance = np.where(tokens.mask_N, tokens.logprob_N - tokens.anchor_logprob_N, 0.0)
    tau = PARAMS["dppo_tv"]["tau"] if name == "dppo_tv" else 0.0
    np.testing.assert_allclose(term, tau * distance**2, atol=1e-12)
    np.testing.assert_allclose(gradient, 2 * tau * distance, atol=1e-12)


@every_loss
def test_at_ratio_one_the_gradient_is_that_of_the_policy_gradient(name):
    tokens = oracle.random_tokens(4, "interleaved", 0.4)
    on_policy = tokens._replace(**{f: tokens.logprob_N for f in ARRAYS if f.endswith("logprob_N")})
    np.testing.assert_allclose(evaluate(name, on_policy)[1], np.where(tokens.mask_N, -tokens.advantage_N, 0.0))


@pytest.mark.parametrize("spread", [0.02, 0.4])
def test_the_token_form_of_gspo_has_the_gradient_of_its_sequence_form(spread):
    tokens = oracle.random_tokens(5, "interleaved", spread)
    members = [np.flatnonzero(tokens.mask_N & (tokens.sample_N == i)) for i in range(5)]
    advantage, weight = np.zeros(len(tokens.mask_N)), np.zeros(len(tokens.mask_N))
    for i, tokens_of in enumerate(members):
        advantage[tokens_of], weight[tokens_of] = (-1) ** i * (i + 1.0), 1 / len(tokens_of)

    @jax.jit
    def sequence_form(logprob):
        total = 0.0
        for tokens_of in members:
            s = jnp.exp((logprob - tokens.anchor_logprob_N)[tokens_of].mean())
            a = advantage[tokens_of[0]]
            total -= jnp.minimum(s * a, jnp.clip(s, 1 - 0.02, 1 + 0.03) * a)
        return total

    term, gradient, _, _ = evaluate("gspo", tokens._replace(advantage_N=advantage), weight)
    expected, slope = jax.value_and_grad(sequence_form)(jnp.asarray(tokens.logprob_N))
    np.testing.assert_allclose((weight * term).sum(), expected, rtol=1e-9)
    np.testing.assert_allclose(gradient, slope, rtol=1e-9, atol=1e-12)


def test_the_cap_bounds_the_loss_of_a_negative_advantage():
    tokens = oracle.random_tokens(6, "interleaved", 100.0)
    term, _, _, _ = evaluate("dual_clip", tokens)
    assert (term <= 3.0 * np.abs(tokens.advantage_N) + 1e-12).all()
    assert evaluate("ppo_clip", tokens)[0].max() > 1e6


def test_cispo_clips_the_weight_and_never_the_gradient():
    tokens = oracle.random_tokens(7, "interleaved", 100.0)
    _, gradient, low, high = evaluate("cispo", tokens)
    assert low.any()
    assert high.any()
    np.testing.assert_array_equal(gradient != 0, tokens.mask_N & (tokens.advantage_N != 0))


@pytest.mark.parametrize("update", [0.0, 1.0, 7.0])
def test_at_lag_zero_a3po_is_ppo_against_the_sampler(update):
    tokens = oracle.random_tokens(8, "interleaved", 0.4)
    fresh = tokens._replace(staleness_N=np.zeros(len(tokens.mask_N)), update=np.float64(update))
    for ours, plain in zip(evaluate("a3po", fresh), evaluate("ppo_clip", with_sampler_as_anchor(fresh)), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-12)


def test_before_the_first_update_a3po_only_weights_what_is_stale():
    tokens = oracle.random_tokens(9, "interleaved", 0.4)
    stale = tokens._replace(staleness_N=np.full(len(tokens.mask_N), 3.0), update=np.float64(0))
    _, gradient, low, high = evaluate("a3po", stale)
    weight = np.minimum(np.exp(tokens.logprob_N - tokens.sampler_logprob_N), PARAMS["a3po"]["cap"])
    np.testing.assert_allclose(gradient, np.where(tokens.mask_N, -weight * tokens.advantage_N, 0.0), atol=1e-12)
    assert not (low | high).any()
