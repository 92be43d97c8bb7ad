"""`python -m experiments.chaos.command CONFIG --dir RUN`: `grpo-jax run`, but the worker reaches its proxy by a relay.

The relay's URL is in the environment; all the rest is the real command.
"""

import os
import sys
from typing import Any

from grpo_jax import cli
from grpo_jax.jobs import local, run

RELAY = "GRPO_JAX_CHAOS_RELAY"


class _ThroughRelay(local.Supervisor):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for role in self.roles:
            if role.name == "worker":
                role.argv = [os.environ[RELAY] if word == self.proxy_url else word for word in role.argv]


if __name__ == "__main__":
    run.Supervisor = _ThroughRelay  # type: ignore[misc]
    sys.exit(cli.main(["run", *sys.argv[1:]]))
