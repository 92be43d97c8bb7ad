"""Whether a flavor can do what its role needs, and its memory holds it, by the plan of `check`."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from grpo_jax.config.plan import Plan
from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.generator.vllm import problem_on_gpu
from grpo_jax.jobs.launch_spec import GENERATOR, LEARNER
from grpo_jax.models.config import parameter_count

_UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12}
# Of what a flavor has, the share that is there for weights and their work: the rest goes to contexts and libraries.
_USABLE = 0.9
_STORED = {"none": 1.0, "int8": 0.5, "nf4": 0.25}  # at least
_PARALLEL = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")


def memory_problems(
    config: Config, plan: Plan | None, hardware: Sequence[Any], *, compile: bool
) -> tuple[list[str], list[str]]:
    """(Problems, what was not checked).

    Args:
      plan: None if the config could not be checked.
      hardware: what the Hub says of its flavors (`HfApi.list_jobs_hardware`).
      compile: see `preflight`.
    """
    problems, notes, flavors = [], [], {flavor.name: flavor for flavor in hardware}
    for role, name in ((LEARNER, config.jobs.learner.flavor), (GENERATOR, config.jobs.generator.flavor)):
        flavor = flavors.get(name)
        if flavor is None:
            problems.append(f"jobs.{role}.flavor: the Hub has no {name!r}; it has {', '.join(sorted(flavors))}")
            continue
        if role == GENERATOR and flavor.accelerator is not None and (problem := problem_on_gpu(config)):
            problems.append(problem)
        per_device, devices = _memory(flavor)
        if plan is None or plan.model is None or per_device is None:
            notes.append(f"the memory of the {role}'s flavor {name}")
            continue
        try:
            needed, what = (_learner if role == LEARNER else _generator)(config, plan, devices, compile)
        except UsageError as error:
            problems.append(str(error))
            continue
        if needed > _USABLE * per_device:
            problems.append(
                f"jobs.{role}.flavor: {name} has {per_device / 1e9:.0f} GB a device, and {what} {needed / 1e9:.1f} GB"
            )
    return problems, notes


def _learner(config: Config, plan: Plan, devices: int, compile: bool) -> tuple[float, str]:
    """(Bytes on each device, and what takes them)."""
    mesh = config.learner.mesh
    asked = mesh.fsdp * mesh.tensor * max(mesh.data, 1)
    if devices and (asked > devices or (mesh.data == -1 and devices % asked)):
        raise UsageError(f"learner.mesh: {asked} devices are asked for, {config.jobs.learner.flavor} has {devices}")
    if devices == 0 or not compile:  # a CPU: all in one memory, and nothing worth half a minute of compiling
        stored = _weights(config, plan) * _STORED[config.learner.quantization]
        return stored / (mesh.fsdp * mesh.tensor), "the learner's weights alone take"
    from grpo_jax.learner.estimate import force_host_devices, memory_estimate

    assert plan.model is not None
    force_host_devices(config.learner.mesh)
    estimate = memory_estimate(config, plan.model)
    if estimate.peak is None:
        return float(estimate.base + estimate.adapter + estimate.optimizer), "the learner's weights and optimizer take"
    return float(estimate.peak), "the learner's compiled step takes (by this machine's compiler)"


def _generator(config: Config, plan: Plan, devices: int, compile: bool) -> tuple[float, str]:
    words = [word for argument in config.generator.extra_args for word in argument.split("=")]
    shards = 1
    for flag, value in pairwise(words):
        if flag in _PARALLEL and value.isdigit():
            shards *= int(value)
    if devices and shards > devices:
        flavor = config.jobs.generator.flavor
        raise UsageError(f"generator.extra_args: {shards} devices are asked for, {flavor} has {devices}")
    cache = (config.generator.kv_cache_memory_gb or 0.0) * 1e9
    return _weights(config, plan) / shards + cache, "a generator's weights and cache take"


def _weights(config: Config, plan: Plan) -> float:
    assert plan.model is not None
    return parameter_count(plan.model) * (4.0 if config.model.dtype == "float32" else 2.0)


def _memory(flavor: Any) -> tuple[float | None, int]:
    """(Bytes of a device, devices): accelerators, or (main memory, 0) where there are none."""
    accelerator = flavor.accelerator
    if accelerator is None:
        return _bytes(flavor.ram), 0
    total = _bytes(accelerator.vram)
    quantity = int(accelerator.quantity) if str(accelerator.quantity).isdigit() else 1
    return (None if total is None else total / max(quantity, 1)), max(quantity, 1)


def _bytes(text: str) -> float | None:
    found = re.match(r"\s*(\d+(?:\.\d+)?)\s*([MGT]B)", str(text))
    return float(found[1]) * _UNITS[found[2]] if found else None
