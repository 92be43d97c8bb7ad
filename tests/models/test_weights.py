import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_jax.errors import UsageError
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.weights import load_params


@pytest.fixture
def copy(checkpoint, tmp_path):
    """A checkpoint to spoil: (directory, config, tensors), and a way to write it back."""
    directory, _ = checkpoint("qwen3")
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    return tmp_path, ModelConfig.from_dir(tmp_path), load_file(tmp_path / "model.safetensors")


def test_shards_give_the_same_tree_as_one_file(checkpoint, tmp_path):
    directory, model = checkpoint("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    config = ModelConfig.from_dir(tmp_path)
    one, many = (load_params(path, config, jnp.float32) for path in (directory, tmp_path))
    jax.tree.map(np.testing.assert_array_equal, one, many)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_stored_and_wanted_dtype_are_independent(stored, copy):
    directory, config, tensors = copy
    tensors = {name: tensor.astype(stored) for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    params = load_params(directory, config, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    expected = tensors["model.layers.2.mlp.up_proj.weight"].T.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(params["layers"]["mlp"]["up_proj"]["kernel"][2], expected)


def test_every_leaf_is_placed_once_and_lies_contiguous(copy):
    directory, config, _ = copy
    placed = {}

    def place(path, array):
        assert array.flags.c_contiguous
        assert path not in placed
        placed[path] = array.shape
        return array

    params = load_params(directory, config, np.float32, place=place)
    assert placed["layers", "self_attn", "q_norm", "scale"] == (3, 16)
    assert len(placed) == len(jax.tree.leaves(params))


def test_derived_tensors_are_ignored(copy):
    directory, config, tensors = copy
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(tensors, directory / "model.safetensors")
    load_params(directory, config, jnp.float32)


def test_the_head_of_tied_embeddings_is_ignored(checkpoint, tmp_path):
    directory, _ = checkpoint("llama-tied")
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": np.ones((97, 48), np.float32)}, tmp_path / "model.safetensors")
    assert "head" not in load_params(tmp_path, ModelConfig.from_dir(tmp_path), jnp.float32)


NAME = "model.layers.1.self_attn.v_proj.weight"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({NAME: None}, [NAME, "missing"]),
        ({"model.layers.3.mlp.up_proj.weight": np.ones((56, 40), np.float32)}, ["model.layers.3.mlp.up_proj.weight"]),
        ({"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}, ["self_attn.q_proj.bias"]),
        ({NAME: np.ones((40, 32), np.float32)}, [NAME, "(40, 32)", "(32, 40)"]),
        ({NAME: np.ones((32, 40), np.int8)}, [NAME, "I8"]),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(changes, said, copy):
    directory, config, tensors = copy
    tensors = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UsageError) as refusal:
        load_params(directory, config, jnp.float32)
    for word in [str(directory / "model.safetensors"), *said]:
        assert word in str(refusal.value)


@pytest.mark.parametrize("content", [None, b"", b"no safetensors at all"])
def test_a_broken_or_missing_file_is_named(content, copy):
    directory, config, _ = copy
    (directory / "model.safetensors").unlink()
    if content is not None:
        (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match="safetensors"):
        load_params(directory, config, jnp.float32)


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": {"a": 1}}', "{"])
def test_a_broken_index_is_named(index, copy):
    directory, config, _ = copy
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UsageError, match=r"model\.safetensors\.index\.json"):
        load_params(directory, config, jnp.float32)


def test_a_missing_shard_is_named(copy):
    directory, config, tensors = copy
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    weight_map = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
    weight_map[NAME] = "model-00002-of-00002.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UsageError, match=r"model-00002-of-00002\.safetensors"):
        load_params(directory, config, jnp.float32)
