"""Tiny models of every family: as transformers makes them (the oracle), and as ours alone where no oracle is needed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.models.config import ModelConfig
from grpo_jax.models.weights import load_params

COMMON = {"vocab_size": 97, "num_hidden_layers": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
# No two sizes of a model are equal, so that a transposed matrix cannot fit.
TINY: dict[str, dict[str, Any]] = {
    "llama-tied": {
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "tie_word_embeddings": True,
    },
    "llama-gqa": {
        "model_type": "llama",
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "llama-biased": {
        "model_type": "llama",
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "qwen2": {
        "model_type": "qwen2",
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
}


def torch_model(name: str) -> Any:
    """A transformers model with random values in every parameter, norm scales and biases included."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**COMMON, **TINY[name]), dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if "norm" in key else noise * parameter.shape[-1] ** -0.5)
    return model.eval()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """name -> (directory, torch model), made once a session."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in made:
            model, directory = torch_model(name), tmp_path_factory.mktemp(name)
            model.save_pretrained(directory)
            made[name] = directory, model
        return made[name]

    return make


@pytest.fixture
def loaded(checkpoint) -> Callable[[str], tuple[ModelConfig, Any, Any]]:
    """name -> (config, our float32 parameters, torch model)."""

    def load(name: str) -> tuple[ModelConfig, Any, Any]:
        directory, model = checkpoint(name)
        config = ModelConfig.from_dir(directory)
        return config, load_params(directory, config, jnp.float32), model

    return load


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit jax for one test; compiled functions are cached by the setting, so nothing leaks into others."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def tiny_config(name: str) -> ModelConfig:
    return ModelConfig.from_hf({**COMMON, **TINY[name]})
