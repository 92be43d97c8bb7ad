import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.config import PROJECTIONS, LoraConfig
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.layout import hf_module_name
from grpo_jax.models.logprobs import logits
from grpo_jax.models.lora import init_lora, low_rank
from tests.models.conftest import (
    TINY,
    compiled,
    plain_rows,
    random_lora,
    random_params,
    some_tokens,
    tiny_config,
    torch_model,
)


def forward(config, lora, params, adapter=None):
    variables = {"params": params} if adapter is None else {"params": params, "lora": adapter}
    hidden = compiled(Decoder(config, lora))(variables, *plain_rows(some_tokens(config)))
    return logits(params, hidden, config)


class Peft:
    """The oracle: a transformers model with peft's LoRA around it."""

    def __init__(self, name, lora):
        peft = pytest.importorskip("peft")
        self.config, self.lora = tiny_config(name), lora
        options = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora}
        self.model = peft.get_peft_model(
            torch_model(name), peft.LoraConfig(target_modules=list(lora.targets), lora_dropout=0.0, **options)
        )

    def logits(self, adapter):
        import torch

        with torch.no_grad():
            for module in filter(self.lora.adapts, PROJECTIONS):
                block, _, leaf = module.partition(".")
                for layer in range(self.config.num_layers):
                    linear = self.model.get_submodule(f"base_model.model.{hf_module_name(module, layer)}")
                    ours = adapter["layers"][block][leaf]
                    linear.lora_A["default"].weight.copy_(torch.tensor(ours["a"][layer].T))
                    linear.lora_B["default"].weight.copy_(torch.tensor(ours["b"][layer].T))
            return self.model(torch.tensor(some_tokens(self.config))).logits.numpy()


def assert_close(found, expected):
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_peft(name, loaded):
    config, params, _ = loaded(name)
    lora = LoraConfig(rank=3, alpha=5)
    adapter = random_lora(config, lora)
    assert_close(forward(config, lora, params, adapter), Peft(name, lora).logits(adapter))


def test_each_module_alone_does_what_it_does_in_peft(loaded):
    config, params, _ = loaded("llama-gqa")
    lora = LoraConfig(rank=3, alpha=5)
    oracle, base = Peft("llama-gqa", lora), forward(config, lora, params)
    for module in PROJECTIONS:
        adapter = random_lora(config, lora)
        for other in set(PROJECTIONS) - {module}:
            block, _, leaf = other.partition(".")
            adapter["layers"][block][leaf]["b"][:] = 0
        found = forward(config, lora, params, adapter)
        assert_close(found, oracle.logits(adapter))
        assert np.abs(found - base).max() > 0.02 * np.abs(base).max()


def test_some_targets_and_rank_stabilised_scale_are_those_of_peft(loaded):
    config, params, _ = loaded("llama-gqa")
    lora = LoraConfig(rank=4, alpha=3, rslora=True, targets=("k_proj", "down_proj"))
    adapter = random_lora(config, lora)
    assert_close(forward(config, lora, params, adapter), Peft("llama-gqa", lora).logits(adapter))


def test_without_the_collection_the_same_decoder_computes_the_base():
    config, lora, params = tiny_config("llama-gqa"), LoraConfig(rank=3, alpha=5), random_params("llama-gqa")
    base = forward(config, None, params)
    np.testing.assert_array_equal(forward(config, lora, params), base)
    fresh = init_lora(jax.random.key(1), config, lora)
    np.testing.assert_allclose(forward(config, lora, params, fresh), base, atol=1e-5)
    assert np.abs(forward(config, lora, params, random_lora(config, lora)) - base).max() > 0.1


def test_a_fresh_adapter_is_drawn_as_peft_draws_it():
    config = tiny_config("llama-tied")
    tree = init_lora(jax.random.key(0), config, LoraConfig(rank=8, alpha=8))
    for part in tree["layers"].values():
        for matrices in part.values():
            bound = matrices["a"].shape[1] ** -0.5
            assert 0.95 * bound < np.abs(matrices["a"]).max() <= bound
            assert abs(np.mean(matrices["a"])) < 0.1 * bound
            assert not np.any(matrices["b"])


def test_adding_a_target_leaves_the_others_unchanged():
    config, key = tiny_config("llama-tied"), jax.random.key(0)
    few, many = (init_lora(key, config, LoraConfig(8, 8, targets=t)) for t in (("v_proj",), ("q_proj", "v_proj")))
    np.testing.assert_array_equal(*(tree["layers"]["self_attn"]["v_proj"]["a"] for tree in (few, many)))


@pytest.mark.parametrize(
    ("built_for", "passed"),
    [
        (("q_proj", "v_proj"), ("q_proj",)),
        (("q_proj",), ("q_proj", "v_proj")),
        (("q_proj",), None),
        (None, ("q_proj",)),
    ],
)
def test_an_adapter_of_other_modules_is_refused(built_for, passed):
    """Never the base by accident: a missing module, a superfluous one and an empty collection all raise."""
    config = tiny_config("llama-gqa")
    lora = built_for and LoraConfig(rank=2, alpha=4, targets=built_for)
    adapter = random_lora(config, LoraConfig(rank=2, alpha=4, targets=passed)) if passed else {}
    with pytest.raises(ValueError, match='"lora" holds'):
        forward(config, lora, random_params("llama-gqa"), adapter)


def test_an_adapter_of_another_rank_is_refused():
    config = tiny_config("llama-gqa")
    adapter = random_lora(config, LoraConfig(rank=4, alpha=4))
    with pytest.raises(ValueError, match="shapes"):
        forward(config, LoraConfig(rank=2, alpha=4), random_params("llama-gqa"), adapter)


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_the_written_out_gradient_is_the_derived_one(shape):
    with jax.enable_x64(True):
        x, a, b, dy = (
            jax.random.normal(jax.random.key(i), size, jnp.float64)
            for i, size in enumerate([(*shape, 7), (7, 3), (3, 4), (*shape, 4)])
        )

        def plain(x, a, b):
            return jnp.vdot(dy, x @ a @ b * 1.7)

        def ours(x, a, b):
            return jnp.vdot(dy, low_rank(x, a, b, 1.7))

        expected, found = (jax.value_and_grad(f, argnums=(0, 1, 2))(x, a, b) for f in (plain, ours))
        jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=1e-12, atol=1e-12), found, expected)


def test_gradients_of_the_matrices_are_summed_in_float32_whatever_the_compute_dtype():
    # 4096 ones and one 2^-10 a token: in bfloat16 a running sum of 256 would no longer grow by 1.
    x = jnp.ones((4096, 1), jnp.bfloat16)
    gradient = jax.grad(lambda b: low_rank(x, jnp.ones((1, 1)), b, 1.0).astype(jnp.float32).sum())(jnp.zeros((1, 1)))
    assert gradient.dtype == jnp.float32
    assert float(gradient[0, 0]) == 4096
