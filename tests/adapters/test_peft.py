"""An exported adapter means the same to peft as to us: every target module, whose shapes are not square."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.adapters.manifest import AdapterError
from grpo_jax.adapters.peft import adapter_files, read_adapter
from grpo_jax.models.config import PROJECTIONS, TARGETS, LoraConfig, ModelConfig
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.logprobs import logits
from grpo_jax.models.lora import init_lora
from grpo_jax.models.weights import load_params
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def random_lora(model, lora):
    tree = init_lora(jax.random.key(0), model, lora)
    return jax.tree.map(lambda x: 0.2 * jax.random.normal(jax.random.key(x.shape[-1]), x.shape), tree)


def write(folder, tree, lora, base):
    folder.mkdir()
    files = adapter_files(tree, rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora, base_model=str(base))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("targets", [TARGETS, *((t,) for t in TARGETS)], ids=["all", *TARGETS])
def test_peft_computes_our_logits(model_dir, tmp_path, targets, rslora):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import LlamaForCausalLM

    model, lora = ModelConfig.from_dir(model_dir), LoraConfig(4, 12.0, rslora, targets)
    tree = random_lora(model, lora)
    folder = write(tmp_path / "adapter", jax.device_get(tree), lora, model_dir)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 11))
    reference = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    base = reference(torch.tensor(tokens)).logits.detach().numpy()
    adapted = peft.PeftModel.from_pretrained(reference, folder)(torch.tensor(tokens)).logits.detach().numpy()

    params = load_params(model_dir, model, jnp.float32)
    ids = np.ones_like(tokens)
    hidden = Decoder(model, lora, jnp.float32).apply(
        {"params": params, "lora": tree}, tokens, np.arange(11)[None].repeat(2, 0), ids, ids * 0
    )
    ours = np.asarray(logits(params, hidden, model))
    assert np.abs(ours - adapted).max() <= 1e-4 * np.abs(adapted).max()
    assert np.abs(ours - base).max() > 1e-2 * np.abs(base).max()


def test_what_is_written_is_read_back_and_equal_trees_give_equal_bytes(tmp_path):
    model = ModelConfig.from_dir(write_tiny_model(tmp_path / "model"))
    lora = LoraConfig(4, 8.0)
    tree = jax.device_get(random_lora(model, lora))
    folder = write(tmp_path / "adapter", tree, lora, "some/model")
    back, config = read_adapter(folder, model.num_layers)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    assert config["target_modules"] == sorted(TARGETS)
    again = write(tmp_path / "again", back, lora, "some/model")
    for file in folder.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes()


def test_keys_that_match_no_module_are_named(tmp_path):
    from safetensors.numpy import load, save

    model = ModelConfig.from_dir(write_tiny_model(tmp_path / "model"))
    lora = LoraConfig(4, 8.0)
    folder = write(tmp_path / "adapter", jax.device_get(random_lora(model, lora)), lora, "some/model")
    file = folder / "adapter_model.safetensors"
    tensors = load(file.read_bytes())
    key = f"base_model.model.model.layers.0.{PROJECTIONS[0]}.lora_A.weight"
    tensors["model.layers.0.self_attn.q_proj.lora_A.weight"] = tensors.pop(key)
    file.write_bytes(save(tensors))
    with pytest.raises(AdapterError, match="which matches no module"):
        read_adapter(folder, model.num_layers)
    tensors.pop("model.layers.0.self_attn.q_proj.lora_A.weight")
    file.write_bytes(save(tensors))
    with pytest.raises(AdapterError, match=r"lacks layers of self_attn\.q_proj"):
        read_adapter(folder, model.num_layers)
