import json
import math

import pytest

from grpo_jax.errors import UsageError
from grpo_jax.models.config import (
    TARGETS,
    LoraConfig,
    ModelConfig,
    parameter_count,
    projection_shapes,
    resolve_targets,
)
from grpo_jax.models.layout import hf_module_name, param_leaves
from tests.models.conftest import COMMON, TINY, tiny_config

LLAMA = {**COMMON, **TINY["llama-tied"]}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_scaling": {"rope_theta": 1e6, "rope_type": "default"}},
    ],
)
def test_rope_theta_is_found_wherever_transformers_wrote_it(rope):
    assert ModelConfig.from_hf({**LLAMA, **rope}).rope_theta == 1e6


def test_absent_keys_mean_what_transformers_makes_of_them():
    transformers = pytest.importorskip("transformers")
    for family in ("llama", "qwen2", "qwen3"):
        sizes = {**COMMON, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        del sizes["rms_norm_eps"]
        theirs = transformers.AutoConfig.for_model(family, **sizes)
        ours = ModelConfig.from_hf({"model_type": family, **sizes})
        assert ours.norm_eps == theirs.rms_norm_eps
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert ours.tie_embeddings == theirs.tie_word_embeddings
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mixtral"}, ["model_type", "mixtral", "qwen3"]),
        ({"model_type": None}, ["model_type"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling", "llama3"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "linear"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["rope_parameters", "yarn"]),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["rope_parameters", "full_attention"]),
        ({"sliding_window": 4096}, ["sliding_window", "4096"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ({"head_dim": 7}, ["head_dim", "7"]),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(changes, said):
    with pytest.raises(UsageError) as refusal:
        ModelConfig.from_hf({**LLAMA, **changes}, origin="somewhere/config.json")
    for word in ["somewhere/config.json", *said]:
        assert word in str(refusal.value)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_qwen_window_is_refused_only_in_use(family):
    config = {**COMMON, **TINY[family], "sliding_window": 32768}
    ModelConfig.from_hf({**config, "use_sliding_window": False, "layer_types": ["full_attention"] * 3})
    with pytest.raises(UsageError, match="use_sliding_window is True"):
        ModelConfig.from_hf({**config, "use_sliding_window": True})
    with pytest.raises(UsageError, match=r"layer_types is \['sliding_attention'\]"):
        ModelConfig.from_hf({**config, "layer_types": ["full_attention", "sliding_attention"]})


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_an_unreadable_config_file_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)


def test_from_dir_names_its_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_act": "relu"}))
    with pytest.raises(UsageError, match=str(tmp_path)):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("name", TINY)
def test_counts_shapes_and_names_are_those_of_transformers(name, checkpoint):
    directory, model = checkpoint(name)
    config = ModelConfig.from_dir(directory)
    assert config == tiny_config(name)
    theirs = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    ours = {
        leaf.hf_name(layer): leaf.shape[::-1] if leaf.transposed else leaf.shape
        for leaf in param_leaves(config)
        for layer in (range(config.num_layers) if leaf.stacked else [None])
    }
    assert ours == theirs
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())
    for module, shape in projection_shapes(config).items():
        linear = model.get_submodule(hf_module_name(module, 1))
        assert shape == (linear.in_features, linear.out_features)


def test_all_linear_means_all_seven():
    assert resolve_targets("all-linear") == TARGETS
    assert len(TARGETS) == 7


def test_targets_come_once_and_in_the_order_of_the_block():
    assert resolve_targets(["up_proj", "q_proj", "q_proj"]) == ("q_proj", "up_proj")


@pytest.mark.parametrize("targets", ["q_proj", "all_linear", "all-linear ", "", [], None, 7, {"q_proj": 1}])
def test_targets_that_are_no_list_are_refused_whole(targets):
    with pytest.raises(UsageError, match="all-linear") as refusal:
        resolve_targets(targets)
    assert repr(targets) in str(refusal.value)


@pytest.mark.parametrize("name", ["a", "lm_head", "self_attn.q_proj", 3])
def test_an_unknown_target_is_named_with_the_valid_ones(name):
    with pytest.raises(UsageError) as refusal:
        resolve_targets(["q_proj", name])
    for word in [repr(name), *TARGETS]:
        assert word in str(refusal.value)


def test_lora_scale():
    assert LoraConfig(rank=16, alpha=32).scale == 2
    assert LoraConfig(rank=16, alpha=32, rslora=True).scale == 32 / math.sqrt(16)
    assert LoraConfig(rank=1, alpha=1).targets == TARGETS
    with pytest.raises(UsageError, match="rank 0"):
        LoraConfig(rank=0, alpha=1)
