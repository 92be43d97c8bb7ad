import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.config import LoraConfig
from grpo_jax.models.decoder import Decoder, init_params
from grpo_jax.models.logprobs import logits
from grpo_jax.models.lora import init_lora
from tests.models.conftest import TINY, tiny_config

ROWS, LENGTH = 2, 11


def plain_row(tokens_BxT):
    """Positions and ids of rows that hold one sequence each."""
    shape = tokens_BxT.shape
    return jnp.broadcast_to(jnp.arange(shape[1]), shape), jnp.ones(shape, jnp.int32), jnp.zeros(shape, jnp.int32)


def some_tokens(config, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, (ROWS, LENGTH))


@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_transformers(name, loaded):
    import torch

    config, params, model = loaded(name)
    tokens = some_tokens(config)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    hidden = jax.jit(Decoder(config).apply)({"params": params}, tokens, *plain_row(tokens))
    ours = logits(params, hidden, config)
    assert ours.shape == (ROWS, LENGTH, config.vocab_size)
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize("name", TINY)
def test_initialisers_make_the_trees_that_the_decoder_expects(name):
    config, lora = tiny_config(name), LoraConfig(rank=2, alpha=4, targets=["o_proj", "up_proj"])
    tokens = some_tokens(config)
    keys = {"params": jax.random.key(0), "lora": jax.random.key(1)}
    described = jax.eval_shape(Decoder(config, lora).init, keys, tokens, *plain_row(tokens))
    params = jax.eval_shape(lambda key: init_params(key, config, jnp.float32), jax.random.key(0))
    adapter = jax.eval_shape(lambda key: init_lora(key, config, lora), jax.random.key(0))
    # The head belongs to the base, though it is `logits` that uses it.
    assert ("head" in params) == (not config.tie_embeddings)
    params.pop("head", None)
    assert described == {"params": params, "lora": adapter}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_the_compute_dtype_holds_throughout(dtype, x64):
    config, lora = tiny_config("qwen3"), LoraConfig(rank=2, alpha=4)
    tokens = some_tokens(config)
    params = init_params(jax.random.key(0), config, dtype)
    adapter = init_lora(jax.random.key(1), config, lora)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    assert {leaf.dtype for leaf in jax.tree.leaves(adapter)} == {jnp.dtype(jnp.float32)}
    hidden = Decoder(config, lora, dtype).apply({"params": params, "lora": adapter}, tokens, *plain_row(tokens))
    assert hidden.dtype == dtype
    assert logits(params, hidden, config).dtype == jnp.promote_types(dtype, jnp.float32)
    text = str(jax.make_jaxpr(Decoder(config, lora, dtype).apply)({"params": params}, tokens, *plain_row(tokens)))
    if dtype == jnp.float64:
        assert "f32[" not in text
    else:
        assert "f64[" not in text


def test_bfloat16_stays_near_float32():
    config = tiny_config("llama-gqa")
    tokens = some_tokens(config)
    params = init_params(jax.random.key(0), config, jnp.float32)
    exact = Decoder(config).apply({"params": params}, tokens, *plain_row(tokens))
    rough = Decoder(config, dtype=jnp.bfloat16).apply({"params": params}, tokens, *plain_row(tokens))
    assert np.abs(exact - rough.astype(jnp.float32)).mean() < 0.02 * np.abs(exact).mean()


def test_a_token_outside_the_vocabulary_shows():
    config = tiny_config("llama-tied")
    params = init_params(jax.random.key(0), config, jnp.float32)
    tokens = jnp.full((1, 2), config.vocab_size)
    assert jnp.isnan(Decoder(config).apply({"params": params}, tokens, *plain_row(tokens))).all()
