"""Tasks and rewards come in by import path, from the config."""

import importlib
from typing import Any

from grpo_jax.errors import UsageError


def import_object(path: str, key: str) -> Any:
    """The object at `package.module:name`. A UsageError names the config `key` and says what could not be imported."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(f"{key}: cannot import {module_name}: {error!r}") from None
    try:
        return getattr(module, name)
    except AttributeError:
        raise UsageError(f"{key}: {module_name} has no {name!r}") from None
