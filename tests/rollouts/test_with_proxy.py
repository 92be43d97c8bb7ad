"""The worker through the real proxy: what one says of policies, errors and deadlines, the other understands."""

import asyncio
from collections.abc import Callable

import pytest
from aiohttp import web

from grpo_jax.config.schema import Config
from grpo_jax.proxy.app import build_runner
from grpo_jax.rollouts import worker
from grpo_jax.storage.bucket import Bucket
from tests.proxy.replica import FakeAgent
from tests.rollouts.scripted import ScriptedProxy, eventually, policy_name
from tests.rollouts.simulated import SimulatedLearner

pytestmark = pytest.mark.usefixtures("quick")


class Replica(ScriptedProxy):
    """Its agent proves at once what is published."""

    def __init__(self) -> None:
        super().__init__()
        self.proved: list[str] = []

    def publish(self, name: str) -> None:
        super().publish(name)
        self.proved.append(name)


def test_a_run_through_the_proxy_in_which_the_replica_restarts(make_config: Callable[..., Config]) -> None:
    async def run() -> SimulatedLearner:
        async with asyncio.timeout(120), Replica() as replica:
            config = make_config(steps=3)
            learner = SimulatedLearner(config, replica)
            agent = FakeAgent(Bucket(config.bucket), config.fleet_name, "a", replica.url, proved=replica.proved)
            runner, _ = build_runner(config)
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                learning = asyncio.create_task(learner.run())
                working = asyncio.create_task(worker.work(config, url, "w0", asyncio.Event()))
                await eventually(lambda: learner.step == 1)
                await replica.stop()
                await asyncio.sleep(0.2)
                await replica.start()
                assert await working == 0
                await learning
            finally:
                await runner.cleanup()
                await agent.stop()
            return learner

    learner = asyncio.run(run())
    assert learner.indices == list(range(6))
    for group, version in learner.trained:
        assert group.provenance.policy == policy_name(group.version)
        assert group.provenance.replica != "unknown"
        assert 0 <= version - group.version <= 1
