"""The proxy's process is killed and started again in the middle of requests."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from grpo_jax.config.schema import Rollouts, Sampling
from grpo_jax.rollouts.client import Client
from grpo_jax.storage.bucket import Bucket
from tests.proxy.harness import FLEET, RUN, V0, eventually, run_async
from tests.proxy.replica import FakeAgent, FakeReplica
from tests.proxy.test_run_proxy import free_port, started_proxy
from tests.rollouts.scripted import completions

GROUPS, GROUP = 12, 4


@pytest.mark.slow
@run_async
async def test_a_restart_of_the_proxy_loses_no_sample(tmp_path: Path) -> None:
    hold = asyncio.Event()
    hold.set()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await hold.wait()
        return web.json_response(completions(body))

    bucket, port = Bucket(str(tmp_path / "bucket")), free_port()
    replicas = [FakeReplica(id, answer) for id in "ab"]
    for replica in replicas:
        await replica.start()
    agents = [FakeAgent(bucket, FLEET, replica.id, replica.url, proved=[V0]) for replica in replicas]
    try:
        async with Client(f"http://127.0.0.1:{port}", RUN, Rollouts()) as client:

            async def group(seed: int) -> list[list[int]]:
                name, _ = await client.current_policy()
                answer = await client.sample(name, [1, 2, seed], GROUP, 100 * seed, Sampling(max_tokens=5))
                assert answer.failures == ()
                return [choice.tokens.tolist() for choice in answer.choices if choice is not None]

            async with started_proxy(tmp_path, port=port):
                before = await group(0)
            hold.clear()
            async with started_proxy(tmp_path, port=port) as proxy:
                groups = [asyncio.create_task(group(seed)) for seed in range(GROUPS)]
                await eventually(lambda: sum(len(r.requests) for r in replicas) == 1 + GROUPS, "all are under way")
                proxy.process.kill()
                await asyncio.wait_for(proxy.process.wait(), 120)
            assert not any(task.done() for task in groups)
            hold.set()
            async with started_proxy(tmp_path, port=port):
                found = await asyncio.wait_for(asyncio.gather(*groups), 120)
        assert len(found) == GROUPS
        assert all(len(samples) == GROUP for samples in found)
        assert found[0] == before  # the same request, so the same seeds
    finally:
        await asyncio.gather(*(agent.stop() for agent in agents))
        await asyncio.gather(*(replica.stop() for replica in replicas))
