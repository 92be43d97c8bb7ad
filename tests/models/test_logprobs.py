import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.config import LoraConfig
from grpo_jax.models.decoder import Decoder, init_params
from grpo_jax.models.logprobs import logits, token_logprobs
from tests.models.conftest import tiny_config
from tests.models.test_decoder import plain_row, some_tokens
from tests.models.test_lora import random_lora


def case(name, count, dtype=jnp.float32):
    config = tiny_config(name)
    params = init_params(jax.random.key(0), config, dtype)
    hidden = jax.random.normal(jax.random.key(1), (count, config.hidden_size), dtype)
    targets = jax.random.randint(jax.random.key(2), (count,), 0, config.vocab_size)
    return config, params, hidden, targets


@pytest.mark.parametrize("name", ["llama-tied", "llama-gqa"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 4, 13, 64])
def test_the_chunked_result_is_the_plain_one(name, temperature, chunk):
    config, params, hidden, targets = case(name, 13)
    found, entropy = token_logprobs(params, hidden, targets, config=config, temperature=temperature, chunk=chunk)
    expected = jax.nn.log_softmax(logits(params, hidden, config) / temperature)
    np.testing.assert_allclose(found, expected[jnp.arange(13), targets], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, -jnp.sum(jnp.exp(expected) * expected, -1), rtol=1e-5, atol=1e-5)


def test_logits_of_bfloat16_states_are_accumulated_in_float32():
    config, params, hidden, targets = case("llama-gqa", 5, jnp.bfloat16)
    exact = hidden.astype(jnp.float32) @ params["head"]["kernel"].astype(jnp.float32)
    np.testing.assert_allclose(logits(params, hidden, config), exact, rtol=1e-5, atol=1e-5)
    found, entropy = token_logprobs(params, hidden, targets, config=config, temperature=1.0, chunk=2)
    assert found.dtype == entropy.dtype == jnp.float32


def test_large_logits_stay_finite():
    config, params, hidden, targets = case("llama-tied", 6)
    found, entropy = token_logprobs(params, 1e4 * hidden, targets, config=config, temperature=1.0, chunk=4)
    assert np.isfinite(found).all()
    assert np.isfinite(entropy).all()
    assert (entropy >= 0).all()


def test_no_gradient_flows_through_the_entropy():
    config, params, hidden, targets = case("llama-tied", 6)

    def entropy(hidden):
        return token_logprobs(params, hidden, targets, config=config, temperature=1.0, chunk=4)[1].sum()

    assert not np.any(jax.grad(entropy)(hidden))


def test_a_target_outside_the_vocabulary_shows():
    config, params, hidden, targets = case("llama-tied", 3)
    found, _ = token_logprobs(
        params, hidden, targets.at[1].set(config.vocab_size), config=config, temperature=1.0, chunk=3
    )
    assert np.isnan(found).tolist() == [False, True, False]


@pytest.mark.parametrize(("temperature", "chunk"), [(0.0, 4), (-1.0, 4), (1.0, 0)])
def test_senseless_arguments_raise(temperature, chunk):
    config, params, hidden, targets = case("llama-tied", 3)
    with pytest.raises(ValueError, match="positive"):
        token_logprobs(params, hidden, targets, config=config, temperature=temperature, chunk=chunk)


@pytest.mark.parametrize(("remat", "chunk"), [("none", 7), ("full", 22), ("full", 5)])
def test_remat_and_chunk_change_neither_logprobs_nor_gradients(remat, chunk, x64):
    config, lora = tiny_config("qwen3"), LoraConfig(rank=2, alpha=4)
    params = init_params(jax.random.key(0), config, jnp.float64)
    tokens, targets = some_tokens(config), some_tokens(config, seed=1).reshape(-1)

    def score(remat, chunk):
        def mean(adapter):
            variables = {"params": params, "lora": adapter}
            hidden = Decoder(config, lora, jnp.float64, remat).apply(variables, tokens, *plain_row(tokens))
            flat = hidden.reshape(-1, config.hidden_size)
            found, _ = token_logprobs(params, flat, targets, config=config, temperature=0.9, chunk=chunk)
            return found.mean(), found

        return jax.grad(mean, has_aux=True)(random_lora(config, lora))

    expected_gradient, expected = score("none", len(targets))
    gradient, found = score(remat, chunk)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    # The masters are float32, and so is their gradient.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), gradient, expected_gradient)


def test_remat_keeps_less_for_the_backward_pass():
    config, lora = tiny_config("llama-gqa"), LoraConfig(rank=2, alpha=4)
    params = init_params(jax.random.key(0), config, jnp.float32)
    tokens = some_tokens(config)

    def residuals(remat):
        def total(adapter):
            variables = {"params": params, "lora": adapter}
            return Decoder(config, lora, remat=remat).apply(variables, tokens, *plain_row(tokens)).sum()

        _, pullback = jax.vjp(total, random_lora(config, lora))
        return sum(leaf.size for leaf in jax.tree.leaves(pullback) if leaf.ndim >= 3)

    assert residuals("full") < 0.7 * residuals("none")
