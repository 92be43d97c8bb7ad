"""What a job has to install: each role's modules import without what the role does not need."""

import pkgutil
import subprocess
import sys

import pytest

import grpo_jax

LEARNER = ("grpo_jax.learner", "grpo_jax.models", "grpo_jax.algorithms", "grpo_jax.adapters", "grpo_jax.storage")
NO_JAX = (
    "grpo_jax.generator",
    "grpo_jax.proxy",
    "grpo_jax.rollouts",
    "grpo_jax.storage",
    "grpo_jax.adapters",
    "grpo_jax.config",
    "grpo_jax.jobs.processes",
    "grpo_jax.jobs.local",
    "grpo_jax.jobs.launch_commands",
    "grpo_jax.jobs.huggingface",
    "grpo_jax.jobs.trainer",
    "grpo_jax.observability",
    "grpo_jax.cli",
)
# The engine of the reference server is the one part of a generator that computes with jax, and the CPU LoRA layer is
# imported only inside vLLM's own processes.
LAZY = {"grpo_jax.generator.reference_engine", "grpo_jax.generator.cpu_lora"}


def modules_of(packages: tuple[str, ...]) -> list[str]:
    found = [m.name for m in pkgutil.walk_packages(grpo_jax.__path__, "grpo_jax.")]
    return [m for m in found if m not in LAZY and any(m == p or m.startswith(f"{p}.") for p in packages)]


@pytest.mark.parametrize(
    ("packages", "absent"), [(LEARNER, ("torch", "vllm")), (NO_JAX, ("jax", "flax", "optax", "torch", "vllm"))]
)
def test_modules_import_without(packages, absent):
    names = modules_of(packages)
    assert len(names) > 15
    program = (
        "import importlib, sys\n"
        f"for name in {absent!r}: sys.modules[name] = None\n"  # importing it raises ImportError
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
