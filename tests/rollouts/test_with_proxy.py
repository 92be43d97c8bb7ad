"""The worker through the real proxy: what one says of policies, errors and deadlines, the other understands."""

import asyncio
from collections.abc import Callable

import pytest
from aiohttp import web

from grpo_jax.config.schema import Config
from grpo_jax.proxy.app import build_runner
from grpo_jax.rollouts import worker
from tests.rollouts.scripted import ScriptedProxy, eventually, policy_name
from tests.rollouts.simulated import SimulatedLearner

pytestmark = pytest.mark.usefixtures("quick")


class Replica(ScriptedProxy):
    """A server without an agent: the proxy learns from /v1/models what it serves."""

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.get("/v1/models", self._models), web.get("/health", self._models)]

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in self.served]})


def test_a_run_through_the_proxy_in_which_the_replica_restarts(make_config: Callable[..., Config]) -> None:
    async def run() -> SimulatedLearner:
        async with asyncio.timeout(120), Replica() as replica:
            config = make_config(steps=3, fleet={"replicas": [replica.url]})
            learner = SimulatedLearner(config, replica)
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
            return learner

    learner = asyncio.run(run())
    assert learner.indices == list(range(6))
    for group, version in learner.trained:
        assert group.provenance.policy == policy_name(group.version)
        assert group.provenance.replica != "unknown"
        assert 0 <= version - group.version <= 1
