"""The worker as a process: what it imports, and what a signal does."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_jax.config.schema import Config
from tests.rollouts.scripted import Reply, ScriptedProxy, eventually
from tests.rollouts.simulated import SimulatedLearner, record_of

MakeConfig = Callable[..., Config]


def test_a_worker_needs_neither_jax_nor_torch_nor_vllm(model_dir: Path) -> None:
    program = """
import sys
from pathlib import Path
import grpo_jax.rollouts.worker
heavy = {"jax", "jaxlib", "flax", "torch", "vllm"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from grpo_jax.rollouts.tokenizer import load_tokenizer
tokenizer = load_tokenizer(Path(sys.argv[1]))
tokenizer.apply_chat_template([{"role": "user", "content": "word1"}], add_generation_prompt=True)
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program, str(model_dir)], check=True, timeout=240)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_75_whatever_is_in_flight(make_config: MakeConfig, number: signal.Signals) -> None:
    config = make_config(rewards=[{"source": "tests.rollouts.toys:hangs"}])
    program = """
import sys
from grpo_jax.config.schema import Config
from grpo_jax.rollouts.worker import run_worker
sys.exit(run_worker(Config.model_validate_json(sys.argv[1]), sys.argv[2], "w0"))
"""

    async def block_odd(request: dict[str, Any]) -> Reply | None:
        if request["seed"] % 2:
            await asyncio.sleep(1000)
        return None

    async def run() -> None:
        async with asyncio.timeout(200), ScriptedProxy() as proxy:
            proxy.script = block_odd
            learner = SimulatedLearner(config, proxy)
            learning = asyncio.create_task(learner.run())
            command = [sys.executable, "-c", program, config.model_dump_json(), proxy.url]
            process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
            await eventually(lambda: len(proxy.requests) == 4)
            process.send_signal(number)
            _, errors = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 75, errors.decode()
            assert b"Traceback" not in errors
            learning.cancel()
            record = record_of(learner)
            assert record["phase"] == "running"
            assert record["inflight_samples"] == 0

    asyncio.run(run())
