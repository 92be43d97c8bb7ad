"""A tiny model, a stand-in for the learner, and agents that are ended whatever happens."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_jax.generator.vllm import vllm_version
from tests.generator.agents import AgentProcess
from tests.generator.served import Served
from tests.generator.settings import LORA, VLLM_START_S, make_config
from tests.generator.stand_in import StandIn
from tests.tiny_model import write_tiny_model


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


@pytest.fixture(scope="session")
def vllm_model_dir(request: pytest.FixtureRequest) -> Path:
    """A model that vLLM can serve here."""
    if vllm_version() is None:
        pytest.skip("vLLM is not installed")
    return request.getfixturevalue("smollm2_dir")


@pytest.fixture(scope="package")
def vllm_agent(vllm_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An agent with a vLLM in float32, which joins late: five versions are there before it starts."""
    served = Served(
        tmp_path_factory.mktemp("vllm-agent"),
        vllm_model_dir,
        versions=5,
        batch={"row_tokens": 256},
        generator={"engine": "vllm", "block_size": 16, "start_timeout_s": VLLM_START_S},
        fleet={"reproof_s": 5.0},
    )
    try:
        served.joined = served.agent.proved(*served.learner.window, wait_s=VLLM_START_S)
        yield served
    finally:
        served.agent.end()
