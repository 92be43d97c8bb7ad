"""A tiny model, a stand-in for the learner, and agents that are ended whatever happens."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_jax.config.schema import Config
from grpo_jax.models.config import LoraConfig
from tests.generator.agents import AgentProcess
from tests.generator.stand_in import StandIn
from tests.tiny_model import write_tiny_model

LORA = LoraConfig(rank=4, alpha=8.0)


def make_config(bucket: Path, model_dir: Path, run: str = "tiny", **sections: Any) -> Config:
    raw: dict[str, Any] = {
        "run": run,
        "bucket": str(bucket),
        "max_staleness": 1,
        "model": {"source": str(model_dir), "dtype": "float32"},
        "lora": {"rank": LORA.rank, "alpha": LORA.alpha},
        "task": {"source": "tests.plugins:none"},
        "rewards": [{"source": "tests.plugins:even_first_token"}],
        "batch": {"row_tokens": 64},
        # What one server has compiled, the next one finds.
        "generator": {"engine": "reference", "start_timeout_s": 120, "env": _compile_cache(model_dir.parent / "xla")},
    }
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values}
    return Config.model_validate(raw)


def _compile_cache(folder: Path) -> dict[str, str]:
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


@pytest.fixture(scope="package")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def learner(tmp_path: Path, tiny_dir: Path) -> StandIn:
    return StandIn(str(tmp_path / "bucket"), "tiny", tiny_dir, LORA)


@pytest.fixture
def start_agent(tmp_path: Path, tiny_dir: Path) -> Iterator[Callable[..., AgentProcess]]:
    """Starts agents of the bucket that `learner` writes to; keyword arguments are sections of the config."""
    agents: list[AgentProcess] = []

    def start(replica: str = "r0", **sections: Any) -> AgentProcess:
        config = make_config(tmp_path / "bucket", tiny_dir, **sections)
        agents.append(AgentProcess(config, replica, tmp_path / replica))
        return agents[-1]

    yield start
    for agent in agents:
        agent.end()
