import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.config import LoraConfig
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.logprobs import logits, token_logprobs
from tests.models.conftest import plain_rows, random_lora, random_params, some_tokens, tiny_config


def case(name, count, dtype=np.float32):
    config, rng = tiny_config(name), np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((count, config.hidden_size)), dtype)
    return config, random_params(name, dtype), hidden, rng.integers(0, config.vocab_size, count)


@pytest.mark.parametrize(
    ("name", "temperature", "chunk"),
    [("llama-tied", 1.0, 4), ("llama-tied", 0.7, 64), ("llama-gqa", 0.7, 1), ("llama-gqa", 2.0, 13)],
)
def test_the_chunked_result_is_the_plain_one(name, temperature, chunk):
    config, params, hidden, targets = case(name, 13)
    found, entropy = token_logprobs(params, hidden, targets, config=config, temperature=temperature, chunk=chunk)
    expected = jax.nn.log_softmax(logits(params, hidden, config) / temperature)
    np.testing.assert_allclose(found, expected[jnp.arange(13), targets], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, -jnp.sum(jnp.exp(expected) * expected, -1), rtol=1e-5, atol=1e-5)


def test_the_gradient_is_the_plain_one():
    config, params, hidden, targets = case("llama-gqa", 13)

    def chunked(hidden):
        return token_logprobs(params, hidden, targets, config=config, temperature=0.7, chunk=5)[0] @ np.arange(13.0)

    def plain(hidden):
        scores = jax.nn.log_softmax(logits(params, hidden, config) / 0.7)
        return scores[np.arange(13), targets] @ np.arange(13.0)

    found, expected = (jax.jit(jax.grad(function))(hidden) for function in (chunked, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_logits_of_bfloat16_states_are_accumulated_in_float32():
    config, params, hidden, targets = case("llama-gqa", 5, jnp.bfloat16)
    exact = np.asarray(hidden, np.float32) @ params["head"]["kernel"].astype(np.float32)
    np.testing.assert_allclose(logits(params, hidden, config), exact, rtol=1e-5, atol=1e-5)
    found, entropy = token_logprobs(params, hidden, targets, config=config, temperature=1.0, chunk=2)
    assert found.dtype == entropy.dtype == jnp.float32


def test_large_logits_stay_finite():
    config, params, hidden, targets = case("llama-tied", 13)
    found, entropy = token_logprobs(params, 1e4 * hidden, targets, config=config, temperature=1.0, chunk=4)
    assert np.isfinite(found).all()
    assert np.isfinite(entropy).all()
    assert (entropy >= 0).all()


def test_no_gradient_flows_through_the_entropy():
    config, params, hidden, targets = case("llama-tied", 6)

    def entropy(hidden):
        return token_logprobs(params, hidden, targets, config=config, temperature=1.0, chunk=4)[1].sum()

    assert not np.any(jax.jit(jax.grad(entropy))(hidden))


def test_a_target_outside_the_vocabulary_shows():
    config, params, hidden, targets = case("llama-tied", 13)
    targets[1] = config.vocab_size
    found, _ = token_logprobs(params, hidden, targets, config=config, temperature=1.0, chunk=4)
    assert np.isnan(found).tolist() == [index == 1 for index in range(13)]


def test_only_chunks_without_a_counted_position_are_skipped():
    config, params, hidden, targets = case("llama-tied", 13)
    mask = np.arange(13) < 6

    def score(hidden, mask):
        found, entropy = token_logprobs(params, hidden, targets, mask, config=config, temperature=1.0, chunk=4)
        return found.sum(), (found, entropy)

    results = jax.jit(jax.grad(score, has_aux=True))
    found, expected = (jax.tree.leaves(results(hidden, which)) for which in (mask, np.ones(13, bool)))
    for some, every in zip(found, expected, strict=True):
        np.testing.assert_array_equal(some[:8], every[:8])
        assert not np.any(some[8:])
        assert np.all(np.any(np.reshape(every, (13, -1)), axis=1))


@pytest.mark.parametrize(("temperature", "chunk"), [(0.0, 4), (-1.0, 4), (1.0, 0)])
def test_senseless_arguments_raise(temperature, chunk):
    config, params, hidden, targets = case("llama-tied", 3)
    with pytest.raises(ValueError, match="positive"):
        token_logprobs(params, hidden, targets, config=config, temperature=temperature, chunk=chunk)


def test_remat_and_chunk_change_neither_logprobs_nor_gradients(x64):
    config, lora = tiny_config("llama-gqa"), LoraConfig(rank=2, alpha=4, targets=("v_proj", "down_proj"))
    params, adapter = random_params("llama-gqa", np.float64), random_lora(config, lora)
    tokens, targets = some_tokens(config), some_tokens(config, seed=1).reshape(-1)

    def score(remat, chunk):
        def mean(adapter):
            variables = {"params": params, "lora": adapter}
            hidden = Decoder(config, lora, jnp.float64, remat).apply(variables, *plain_rows(tokens))
            flat = hidden.reshape(-1, config.hidden_size)
            found, _ = token_logprobs(params, flat, targets, config=config, temperature=0.9, chunk=chunk)
            return found.mean(), found

        wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), adapter)
        return jax.jit(jax.grad(mean, has_aux=True))(wide)

    expected = score("none", len(targets))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-9), score("full", 5), expected)


def test_the_gradient_through_the_entropy_is_its_slope(x64):
    config, params, hidden, targets = case("llama-tied", 6, np.float64)
    weights = np.arange(1.0, 7.0)

    def total(hidden):
        found, entropy = token_logprobs(
            params, hidden, targets, config=config, temperature=0.7, chunk=4, entropy_gradient=True
        )
        return weights @ (entropy + 0.1 * found)

    slope, eps = jax.jit(jax.grad(total))(hidden), 1e-6
    value = jax.jit(total)
    for seed in range(3):
        direction = np.random.default_rng(seed).standard_normal(hidden.shape)
        found = (value(hidden + eps * direction) - value(hidden - eps * direction)) / (2 * eps)
        np.testing.assert_allclose(found, np.sum(slope * direction), rtol=1e-6)
