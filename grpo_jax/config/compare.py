"""Which keys of a run's config may change when it is resumed."""

from typing import Any

# What decides neither what is sampled nor what is trained; `steps` may grow, `run` and `bucket` only say where it lies.
CHANGEABLE = ("steps", "fleet", "evaluation", "proxy", "generator", "checkpoints", "local", "run", "bucket")


def differing_keys(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Dotted keys, outside of `CHANGEABLE`, whose values differ between two resolved configs."""
    return sorted(_differing(_without(old), _without(new), ""))


def _without(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in CHANGEABLE}


def _differing(old: Any, new: Any, path: str) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = old.keys() | new.keys()
        return [k for key in keys for k in _differing(old.get(key), new.get(key), f"{path}.{key}" if path else key)]
    return [] if old == new else [path]
