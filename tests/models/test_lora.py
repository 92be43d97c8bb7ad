import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.config import PROJECTIONS, TARGETS, LoraConfig
from grpo_jax.models.decoder import Decoder, init_params
from grpo_jax.models.layout import hf_module_name
from grpo_jax.models.logprobs import logits
from grpo_jax.models.lora import init_lora
from tests.models.conftest import TINY, tiny_config, torch_model
from tests.models.test_decoder import plain_row, some_tokens


def random_lora(config, lora, seed=0):
    """An adapter whose B is not zero."""
    tree = init_lora(jax.random.key(seed), config, lora)
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    return structure.unflatten([0.2 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


def forward(config, lora, variables):
    tokens = some_tokens(config)
    hidden = Decoder(config, lora).apply(variables, tokens, *plain_row(tokens))
    return logits(variables["params"], hidden, config)


@pytest.mark.parametrize(
    ("name", "targets", "rslora"),
    [
        *(("llama-gqa", [target], False) for target in TARGETS),
        ("llama-gqa", ["q_proj"], True),
        *((name, "all-linear", False) for name in TINY),
    ],
)
def test_logits_are_those_of_peft(name, targets, rslora, loaded):
    import torch

    peft = pytest.importorskip("peft")
    config, params, base = loaded(name)
    lora = LoraConfig(rank=3, alpha=5, rslora=rslora, targets=targets)
    adapter = random_lora(config, lora)
    theirs = peft.get_peft_model(
        torch_model(name),
        peft.LoraConfig(r=3, lora_alpha=5, use_rslora=rslora, target_modules=list(lora.targets), lora_dropout=0.0),
    )
    adapted = 0
    with torch.no_grad():
        for module in filter(lora.adapts, PROJECTIONS):
            parent, _, leaf = module.partition(".")
            for layer in range(config.num_layers):
                linear = theirs.get_submodule(f"base_model.model.{hf_module_name(module, layer)}")
                ours = adapter["layers"][parent][leaf]
                linear.lora_A["default"].weight.copy_(torch.tensor(np.asarray(ours["a"][layer]).T))
                linear.lora_B["default"].weight.copy_(torch.tensor(np.asarray(ours["b"][layer]).T))
                adapted += 1
        assert adapted == sum("lora_A" in key for key, _ in theirs.named_parameters())
        tokens = torch.tensor(some_tokens(config))
        expected, unadapted = theirs(tokens).logits.numpy(), base(tokens).logits.numpy()
    found = forward(config, lora, {"params": params, "lora": adapter})
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    assert np.abs(unadapted - expected).max() > 0.02 * np.abs(expected).max()


def test_without_the_collection_the_same_decoder_computes_the_base():
    config, lora = tiny_config("qwen2"), LoraConfig(rank=2, alpha=4)
    params = init_params(jax.random.key(0), config, jnp.float32)
    base = forward(config, None, {"params": params})
    np.testing.assert_array_equal(forward(config, lora, {"params": params}), base)
    fresh = init_lora(jax.random.key(1), config, lora)
    np.testing.assert_array_equal(forward(config, lora, {"params": params, "lora": fresh}), base)
    assert np.abs(forward(config, lora, {"params": params, "lora": random_lora(config, lora)}) - base).max() > 0.1


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
    few = init_lora(key, config, LoraConfig(rank=2, alpha=4, targets=["v_proj"]))
    many = init_lora(key, config, LoraConfig(rank=2, alpha=4))
    np.testing.assert_array_equal(few["layers"]["self_attn"]["v_proj"]["a"], many["layers"]["self_attn"]["v_proj"]["a"])


@pytest.mark.parametrize(
    ("built_for", "passed"),
    [(["q_proj", "v_proj"], ["q_proj"]), (["q_proj"], ["q_proj", "v_proj"]), (None, ["q_proj"]), (["q_proj"], None)],
)
def test_an_adapter_of_other_modules_is_refused(built_for, passed):
    """Never the base by accident: an empty collection, a missing module and a superfluous one all raise."""
    config = tiny_config("llama-tied")
    params = init_params(jax.random.key(0), config, jnp.float32)
    lora = built_for and LoraConfig(rank=2, alpha=4, targets=built_for)
    adapter = init_lora(jax.random.key(1), config, LoraConfig(rank=2, alpha=4, targets=passed)) if passed else {}
    with pytest.raises(ValueError, match='"lora" holds'):
        forward(config, lora, {"params": params, "lora": adapter})


def test_an_adapter_of_another_rank_is_refused():
    config = tiny_config("llama-tied")
    params = init_params(jax.random.key(0), config, jnp.float32)
    adapter = init_lora(jax.random.key(1), config, LoraConfig(rank=4, alpha=4))
    with pytest.raises(ValueError, match="shapes"):
        forward(config, LoraConfig(rank=2, alpha=4), {"params": params, "lora": adapter})
