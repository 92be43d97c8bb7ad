import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.config import LoraConfig
from grpo_jax.models.decoder import Decoder, init_params
from grpo_jax.models.logprobs import logits
from grpo_jax.models.lora import init_lora
from tests.models.conftest import TINY, compiled, plain_rows, random_lora, random_params, some_tokens, tiny_config


@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_transformers(name, loaded):
    torch = pytest.importorskip("torch")

    config, params, model = loaded(name)
    tokens = some_tokens(config)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    hidden = compiled(Decoder(config))({"params": params}, *plain_rows(tokens))
    ours = logits(params, hidden, config)
    assert ours.shape == (*tokens.shape, config.vocab_size)
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize("name", TINY)
def test_initialisers_make_the_trees_that_the_decoder_expects(name):
    config, lora = tiny_config(name), LoraConfig(rank=2, alpha=4, targets=("o_proj", "up_proj"))
    keys = {"params": jax.random.key(0), "lora": jax.random.key(1)}
    described = jax.eval_shape(Decoder(config, lora).init, keys, *plain_rows(some_tokens(config)))
    params = jax.eval_shape(lambda key: init_params(key, config, jnp.float32), jax.random.key(0))
    adapter = jax.eval_shape(lambda key: init_lora(key, config, lora), jax.random.key(0))
    # The head belongs to the base, though it is `logits` that uses it.
    assert ("head" in params) == (not config.tie_embeddings)
    params.pop("head", None)
    assert described == {"params": params, "lora": adapter}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_the_compute_dtype_holds_throughout(dtype, x64):
    config, lora = tiny_config("qwen3"), LoraConfig(rank=2, alpha=4)
    rows = plain_rows(some_tokens(config))
    params = jax.eval_shape(lambda key: init_params(key, config, dtype), jax.random.key(0))
    adapter = jax.eval_shape(lambda key: init_lora(key, config, lora), jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    assert {leaf.dtype for leaf in jax.tree.leaves(adapter)} == {jnp.dtype(jnp.float32)}
    apply = Decoder(config, lora, dtype).apply
    hidden = jax.eval_shape(apply, {"params": params, "lora": adapter}, *rows)
    assert hidden.dtype == dtype
    assert jax.eval_shape(lambda *args: logits(*args, config), params, hidden).dtype == jnp.promote_types(dtype, "f4")
    # Neither a silent narrowing of float64 nor, with 64 bits allowed, a silent widening of the others.
    base = str(jax.make_jaxpr(apply)({"params": params}, *rows))
    assert ("f32[" if dtype == jnp.float64 else "f64[") not in base


def test_bfloat16_stays_near_float32():
    config, rows = tiny_config("llama-gqa"), plain_rows(some_tokens(tiny_config("llama-gqa")))
    params = random_params("llama-gqa")
    exact = compiled(Decoder(config))({"params": params}, *rows)
    rough = compiled(Decoder(config, dtype=jnp.bfloat16))({"params": params}, *rows)
    assert np.abs(exact - rough.astype(jnp.float32)).mean() < 0.02 * np.abs(exact).mean()


def test_a_token_outside_the_vocabulary_shows():
    config = tiny_config("llama-gqa")
    tokens = some_tokens(config)
    tokens[0, 4] = config.vocab_size
    hidden = compiled(Decoder(config))({"params": random_params("llama-gqa")}, *plain_rows(tokens))
    assert np.isnan(hidden).all((1, 2)).tolist() == [True, False]


def test_remat_keeps_less_for_the_backward_pass():
    config, lora = tiny_config("llama-gqa"), LoraConfig(rank=2, alpha=4)
    rows = plain_rows(some_tokens(config))

    def kept(remat):
        def pullback(adapter):
            variables = {"params": random_params("llama-gqa"), "lora": adapter}
            return jax.vjp(lambda lora_: decoder.apply({**variables, "lora": lora_}, *rows), adapter)[1]

        decoder = Decoder(config, lora, remat=remat)
        residuals = jax.tree.leaves(jax.eval_shape(pullback, random_lora(config, lora)))
        return sum(leaf.size for leaf in residuals)

    assert kept("full") < 0.7 * kept("none")
