"""The user's cache: converted models and compiled steps. Everything in it can be deleted and comes again."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$GRPO_JAX_CACHE`, else `grpo_jax` in `$XDG_CACHE_HOME` or `~/.cache`. Not created."""
    own = os.environ.get("GRPO_JAX_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "grpo_jax"
