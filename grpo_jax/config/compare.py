"""Which keys of a run's config may change when it is resumed."""

from typing import Any

from pydantic import ValidationError

from grpo_jax.config.schema import Config

# What decides neither what is sampled nor what is trained; `steps` may grow, `run` and `bucket` only say where it lies.
# A run may go on with other devices and other rows: they move a gradient by rounding alone.
CHANGEABLE = (
    "steps",
    "fleet",
    "evaluation",
    "proxy",
    "generator",
    "checkpoints",
    "retention",
    "logging",
    "local",
    "jobs",
    "optimizer.stop_at_reward",
    "run",
    "bucket",
    "learner.mesh",
    "learner.remat",
    "learner.attention",
    "batch.rows_per_micro_batch",
    "batch.share_prompt",
    "rollouts.keep",
)


def differing_keys(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Dotted keys, outside of `CHANGEABLE`, whose values differ between two resolved configs.

    A key that is younger than the record of a run has its default there, which is what was done before there was one.
    """
    return sorted(_differing(_completed(old), _completed(new), ""))


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    try:
        return Config.model_validate(config).model_dump(mode="json")
    except ValidationError:  # of a later version, or not whole
        return config


def _differing(old: Any, new: Any, path: str) -> list[str]:
    if path in CHANGEABLE:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        keys = old.keys() | new.keys()
        return [k for key in keys for k in _differing(old.get(key), new.get(key), f"{path}.{key}" if path else key)]
    return [] if old == new else [path]
