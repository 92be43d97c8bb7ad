"""A worker's surroundings in one process: real proxy, real servers of which some misbehave, a simulated learner."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from grpo_jax.config.load import parse_config
from grpo_jax.config.schema import Config
from grpo_jax.generator.reference_engine import Adapter, Engine
from grpo_jax.models.config import LoraConfig
from grpo_jax.proxy.app import build_runner
from grpo_jax.rollouts import worker
from grpo_jax.rollouts.sample import Group
from grpo_jax.storage.bucket import Bucket
from tests.faults.replica import MARK, Faults, FaultyServer
from tests.generator.stand_in import StandIn
from tests.proxy.replica import FakeAgent
from tests.rollouts.simulated import SimulatedLearner

LORA = LoraConfig(rank=4, alpha=8.0)
REQUEST_TIMEOUT_S = 2.0


class Weights:
    """One engine for all servers, and the adapter of each version."""

    def __init__(self, model_dir: Path, folder: Path):
        self.model_dir, self._folder = model_dir, folder
        self.engine = Engine(model_dir, dtype="float32", max_model_len=64, max_lora_rank=8)
        self._learner = StandIn(str(folder / "bucket"), "faults", model_dir, LORA)
        self._adapters: dict[str, Adapter] = {}

    def adapter(self, name: str) -> Adapter:
        if name not in self._adapters:
            folder = self._folder / name
            folder.mkdir(parents=True)
            version = int(name.split(".v")[1][:6])
            for file, data in self._learner.files(self._learner.version(version, size=0.3)).items():
                (folder / file).write_bytes(data)
            self._adapters[name] = self.engine.read_adapter(name, folder)
        return self._adapters[name]

    def error(self, group: Group) -> float:
        """How far a group's log-probabilities are from those of the policy that it names, at most."""
        adapter, prompt = self.adapter(group.provenance.policy), group.prompt_tokens.tolist()
        worst = 0.0
        for sample in group.samples:
            if len(sample.tokens):
                scored = self.engine.score(adapter, prompt + sample.tokens.tolist()).result(60)
                worst = max(worst, float(np.abs(np.array(scored[len(prompt) - 1 :]) - sample.logprobs).max()))
        return worst


class Fleet:
    """`publish` loads a policy on every server and says in their heartbeats that it is proved."""

    def __init__(self, config: Config, weights: Weights, faults: dict[str, Faults]):
        self.config, self._weights = config, weights
        self.servers = {
            id: FaultyServer(weights.engine, weights.model_dir, seed=i, max_loras=8, faults=fault)
            for i, (id, fault) in enumerate(faults.items())
        }
        self._agents: dict[str, FakeAgent] = {}
        self._runners: list[Any] = []

    async def __aenter__(self) -> "Fleet":
        bucket = Bucket(self.config.bucket)
        for id, server in self.servers.items():
            url = await self._serve(web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0.1))
            self._agents[id] = FakeAgent(bucket, self.config.fleet_name, id, url)
        runner, _ = build_runner(self.config)
        self.url = await self._serve(runner)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(agent.stop() for agent in self._agents.values()))
        for runner in reversed(self._runners):
            await runner.cleanup()

    def publish(self, name: str) -> None:
        adapter = self._weights.adapter(name)
        for id, server in self.servers.items():
            server._adapters[name] = adapter
            self._agents[id].body["proved"] = [*self._agents[id].body["proved"], name]

    async def _serve(self, runner: Any) -> str:
        await runner.setup()
        self._runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"


def fleet_config(model_dir: Path, bucket: Path, **sections: Any) -> Config:
    return parse_config(
        {
            "run": "toy",  # as the simulated learner names its policies
            "bucket": str(bucket),
            "steps": 3,
            "model": {"source": str(model_dir)},
            "task": {"source": "experiments.tasks.addition:one_digit"},
            "rewards": [{"source": "tests.plugins:even_first_token"}],
            "sampling": {"max_tokens": 4},
            "batch": {"prompts_per_step": 3, "group_size": 3, "row_tokens": 64},
            "rollouts": {"request_timeout_s": REQUEST_TIMEOUT_S, "retry_deadline_s": 60.0, "max_redraws": 50},
            **sections,
        },
        "test",
    )


def run_beside(weights: Weights, bucket: Path, ill: Faults) -> tuple[SimulatedLearner, FaultyServer]:
    """A whole run on a sound replica and one with `ill`."""
    config = fleet_config(weights.model_dir, bucket)

    async def run() -> tuple[SimulatedLearner, FaultyServer]:
        async with asyncio.timeout(120), Fleet(config, weights, {"sound": Faults(()), "ill": ill}) as fleet:
            learner = SimulatedLearner(config, fleet)  # type: ignore[arg-type]
            learning = asyncio.create_task(learner.run())
            assert await worker.work(config, fleet.url, "w0", asyncio.Event()) == 0
            await learning
            return learner, fleet.servers["ill"]

    return asyncio.run(run())


def marked(group: Group) -> bool:
    return any(MARK in sample.text for sample in group.samples)
