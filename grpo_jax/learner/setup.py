"""From a config to what the learner computes with: mesh, base, adapter shape and compiled step."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from grpo_jax.adapters.initial import initial_adapter
from grpo_jax.adapters.publisher import AdapterSpec
from grpo_jax.algorithms.objective import Objective
from grpo_jax.algorithms.registry import bound_loss, factor_function
from grpo_jax.cache import cache_dir
from grpo_jax.config.schema import Algorithm, Config
from grpo_jax.errors import UsageError
from grpo_jax.learner.optimizer import build_optimizer
from grpo_jax.learner.packing import MicroBatch, TrainSample, pack
from grpo_jax.learner.probe import canary_tokens
from grpo_jax.learner.sharding import check_divisible, make_mesh, param_shardings, place, row_shards
from grpo_jax.learner.step import Step, build_step, rounded
from grpo_jax.models.attention_backends import choose, self_test
from grpo_jax.models.config import LoraConfig, ModelConfig, resolve_targets
from grpo_jax.models.lora import init_lora
from grpo_jax.models.quantize_error import quantization_error
from grpo_jax.models.source import base_digest, resolve_model
from grpo_jax.models.weights import load_params

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """How samples lie in rows: what `pack` is told."""

    row_tokens: int
    rows: int
    shards: int
    share_prompt: bool

    def pack(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        return pack(
            samples, row_tokens=self.row_tokens, rows=self.rows, shards=self.shards, share_prompt=self.share_prompt
        )


@dataclass(frozen=True)
class Trainer:
    model: ModelConfig
    lora: LoraConfig
    base: Any
    base_digest: str
    step: Step
    objective: Objective
    dtype: Any
    seed: int
    layout: Layout
    init_from: str | None = None

    def initial_lora(self) -> Any:
        """B = 0, so that v0 is the base."""
        return init_lora(jax.random.key(self.seed), self.model, self.lora)

    def given_lora(self) -> Any | None:
        """The adapter that the run starts from in place of it, on the host, if the config names one.

        BucketError while it cannot be had, UsageError if it does not fit. Only a run without a checkpoint needs it.
        """
        if self.init_from is None:
            return None
        like = jax.eval_shape(self.initial_lora)
        return initial_adapter(self.init_from, like, rank=self.lora.rank, scale=self.lora.scale)

    def published_form(self, lora: Any) -> Any:
        return rounded(lora, self.dtype)


def lora_config(config: Config) -> LoraConfig:
    targets = resolve_targets(config.lora.targets)
    return LoraConfig(config.lora.rank, config.lora.alpha, config.lora.rslora, targets)


def objective_of(algorithm: Algorithm) -> Objective:
    """The composed objective. A loss of the user's own that cannot be used is a UsageError, see `bound_loss`."""
    return Objective(
        loss=bound_loss(algorithm.loss, algorithm.loss_numbers),
        factors=tuple(partial(factor_function(name), **numbers) for name, numbers in algorithm.factors.items()),
        anchor=algorithm.anchor,
        kl_coef=algorithm.kl_coef,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
    )


def choose_attention(config: Config, model: ModelConfig, platform: str) -> tuple[str, bool]:
    """(backend, whether samples share their prompt's tokens); UsageError when what is asked for cannot be honoured.

    `share_prompt: auto` shares where the backend can; `attention: auto` goes by the platform, unless sharing is asked
    for, which then decides.
    """
    requested, share = config.learner.attention, config.batch.share_prompt
    pick = partial(
        choose,
        requested,
        platform=platform,
        dtype=jnp.dtype(config.model.dtype),
        head_dim=model.head_dim,
        row_tokens=config.batch.row_tokens,
    )
    try:
        backend = pick(shared_prompts=share is True)
    except ValueError as error:
        raise UsageError(f"learner.attention: {error}") from None
    return backend, backend == "xla" if share == "auto" else share


def layout_of(config: Config, shards: int, share_prompt: bool) -> Layout:
    batch = config.batch
    return Layout(batch.row_tokens, batch.rows_per_micro_batch, shards, share_prompt)


def step_of(config: Config, model: ModelConfig, lora: LoraConfig, mesh: Mesh, attention: str) -> Step:
    """The compiled step that a config asks for; compiles nothing yet."""
    return build_step(
        model,
        lora,
        build_optimizer(config.optimizer),
        objective_of(config.algorithm),
        dtype=jnp.dtype(config.model.dtype),
        temperature=config.sampling.temperature,
        mesh=mesh,
        remat=config.learner.remat,
        attention=attention,
        quantization=config.learner.quantization,
    )


def adapter_spec(config: Config, trainer: Trainer) -> AdapterSpec:
    """What all adapters that a run publishes have in common."""
    return AdapterSpec(
        run=config.run,
        rank=trainer.lora.rank,
        alpha=trainer.lora.alpha,
        rslora=trainer.lora.rslora,
        scale=trainer.lora.scale,
        base_model=config.model.source,
        base_digest=trainer.base_digest,
    )


def build_trainer(config: Config) -> Trainer:
    """Loads the base, each device its own part, and builds the step; compiles nothing yet but the self-test of a flash
    kernel.

    Raises:
      UsageError: the config asks for what this machine, this model or this backend cannot do.
    """
    enable_compilation_cache()
    directory = resolve_model(config.model.source)
    model, lora = ModelConfig.from_dir(directory), lora_config(config)
    sizes, dtype = config.learner.mesh, jnp.dtype(config.model.dtype)
    mesh = make_mesh(sizes.data, sizes.fsdp, sizes.tensor)
    scheme = config.learner.quantization
    check_divisible(mesh.shape, model, scheme)
    attention, share_prompt = choose_attention(config, model, jax.default_backend())
    log.info(
        "%d %s devices as %s, attention %s, prompts %s",
        mesh.size,
        jax.default_backend(),
        " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
        attention,
        "shared" if share_prompt else "not shared",
    )
    if attention != "xla":
        error = self_test(
            attention,
            dtype=dtype,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            row_tokens=config.batch.row_tokens,
        )
        log.info("attention %s differs from xla by %.1e of the largest value on the self-test", attention, error)
    if scheme != "none":
        lost = quantization_error(directory, model, scheme, canary_tokens(model), dtype=dtype)
        log.warning(
            "the base is quantised to %s; on the canary its log-probabilities are off by %.3f on average and %.3f at "
            "most, KL %.4f. Generators serve the full base: mismatch/lag0 shows the difference on real samples",
            scheme,
            lost.mean_abs,
            lost.max_abs,
            lost.mean_kl,
        )
    shardings = flatten_dict(param_shardings(mesh, model, scheme))
    base = load_params(
        directory, model, dtype, quantization=scheme, place=lambda path, array: place(array, shardings[path])
    )
    step = step_of(config, model, lora, mesh, attention)
    return Trainer(
        model=model,
        lora=lora,
        base=base,
        base_digest=base_digest(directory),
        step=step,
        objective=objective_of(config.algorithm),
        dtype=dtype,
        seed=config.seed,
        layout=layout_of(config, row_shards(mesh), share_prompt),
        init_from=config.lora.init_from,
    )


def enable_compilation_cache() -> None:
    """Keeps compiled steps in the user's cache, so that a second start need not compile again."""
    folder: Path = cache_dir() / "xla"
    os.makedirs(folder, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
