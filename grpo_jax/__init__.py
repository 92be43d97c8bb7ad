"""Asynchronous GRPO with LoRA: a JAX learner, vLLM generators in separate jobs, a bucket between them.

`grpo_jax.run("configs/quickstart.yaml", "steps=10")` is the command `grpo-jax run` from Python.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_jax.config.schema import Config
    from grpo_jax.jobs.run import RunResult

__version__ = "0.1.0"


def run(
    config: "str | Path | dict[str, Any] | Config", *overrides: str, dir: str | None = None, fresh: bool = False
) -> "RunResult":
    """Runs a config on this machine, to the end.

    Args:
      config: a YAML file, its content as a dict, or a `Config`.
      overrides: `key=value`, for a file only.
      dir: the run's directory; default `<bucket>/<run>`.
      fresh: delete what there is of this run first.

    Raises:
      UsageError: the config is wrong; nothing was started.
    """
    from grpo_jax.config.load import load_config, parse_config
    from grpo_jax.config.schema import Config
    from grpo_jax.errors import UsageError
    from grpo_jax.jobs.run import execute, place

    if isinstance(config, str | Path):
        config = load_config(config, overrides)
    elif overrides:
        raise UsageError("overrides go with a config file; change the dict or the Config instead")
    if not isinstance(config, Config):
        config = parse_config(config, "config")
    config, run_dir = place(config, dir)
    return execute(config, run_dir, fresh=fresh)
