"""From a config to what the learner computes with: base, adapter shape and compiled step."""

import logging
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.algorithms.objectives import dual_clip
from grpo_jax.cache import cache_dir
from grpo_jax.config.schema import Config
from grpo_jax.learner.optimizer import build_optimizer
from grpo_jax.learner.step import Step, build_step, rounded
from grpo_jax.models.config import LoraConfig, ModelConfig, resolve_targets
from grpo_jax.models.lora import init_lora
from grpo_jax.models.source import base_digest, resolve_model
from grpo_jax.models.weights import load_params

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trainer:
    model: ModelConfig
    lora: LoraConfig
    base: Any
    base_digest: str
    step: Step
    dtype: Any
    seed: int

    def initial_lora(self) -> Any:
        return init_lora(jax.random.key(self.seed), self.model, self.lora)

    def published_form(self, lora: Any) -> Any:
        return rounded(lora, self.dtype)


def lora_config(config: Config) -> LoraConfig:
    targets = resolve_targets(config.lora.targets)
    return LoraConfig(config.lora.rank, config.lora.alpha, config.lora.rslora, targets)


def build_trainer(config: Config) -> Trainer:
    """Loads the base (on every device whole) and builds the step; compiles nothing yet."""
    enable_compilation_cache()
    directory = resolve_model(config.model.source)
    model, lora = ModelConfig.from_dir(directory), lora_config(config)
    dtype = jnp.dtype(config.model.dtype)
    base = load_params(directory, model, dtype)
    algorithm = config.algorithm
    step = build_step(
        model,
        lora,
        build_optimizer(config.optimizer, config.steps),
        partial(dual_clip, clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, cap=algorithm.dual_clip),
        dtype=dtype,
        temperature=config.sampling.temperature,
    )
    return Trainer(model, lora, base, base_digest(directory), step, dtype, config.seed)


def enable_compilation_cache() -> None:
    """Keeps compiled steps in the user's cache, so that a second start need not compile again."""
    folder: Path = cache_dir() / "xla"
    os.makedirs(folder, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
