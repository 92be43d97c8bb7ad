"""Tiny models of every family: as transformers makes them (the oracle), and as ours alone where no oracle is needed."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.config import LoraConfig, ModelConfig
from grpo_jax.models.decoder import Decoder, init_params
from grpo_jax.models.lora import init_lora
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
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "llama-biased": {
        "model_type": "llama",
        "hidden_size": 36,
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


@cache
def random_params(name: str, dtype: Any = np.float32) -> Any:
    """A random base of a tiny model as host arrays, drawn once; float64 is a cast, for the sake of speed."""
    params = init_params(jax.random.key(0), tiny_config(name), jnp.float32)
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype), params)


def random_lora(config: ModelConfig, lora: LoraConfig, seed: int = 0) -> Any:
    """An adapter whose B is not zero, as host arrays."""
    described = jax.eval_shape(lambda key: init_lora(key, config, lora), jax.random.key(0))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: 0.2 * rng.standard_normal(leaf.shape).astype(leaf.dtype), described)


@cache
def compiled(decoder: Decoder) -> Callable[..., jax.Array]:
    """The decoder's `apply`, compiled once for all tests that build an equal one."""
    return jax.jit(decoder.apply)


def some_tokens(config: ModelConfig, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, (2, 11))


def plain_rows(tokens_BxT: np.ndarray) -> tuple[np.ndarray, ...]:
    """tokens, positions, prompt and branch ids of rows that hold one sequence each."""
    positions = np.broadcast_to(np.arange(tokens_BxT.shape[1]), tokens_BxT.shape)
    return tokens_BxT, positions, np.ones_like(tokens_BxT), np.zeros_like(tokens_BxT)
