"""`python -m tests.faults.agent CONFIG REPLICA WORK_DIR`: a real agent, whose server is the faulty one."""

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_jax.config.schema import Config
from grpo_jax.generator import engines
from grpo_jax.generator.vllm import Command

_real = engines.server_command


def _faulty(*args: Any, **kwargs: Any) -> Command:
    command = _real(*args, **kwargs)
    argv = tuple("tests.faults.replica" if x == "grpo_jax.generator.reference" else x for x in command.argv)
    assert argv != command.argv
    return replace(command, argv=argv)


if __name__ == "__main__":
    engines.server_command = _faulty
    from grpo_jax.generator.agent import run_generator

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    config, replica, work = sys.argv[1:]
    sys.exit(run_generator([Config.model_validate(json.loads(Path(config).read_text()))], replica, Path(work)))
