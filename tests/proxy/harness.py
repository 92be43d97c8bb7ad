"""A real proxy on loopback in front of programmable replicas, with heartbeats in a real bucket."""

import asyncio
import functools
import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from grpo_jax.config.schema import Config
from grpo_jax.proxy.app import build_runner
from grpo_jax.storage.bucket import Bucket
from tests.proxy.replica import FakeAgent, FakeReplica

RUN, FLEET = "r", "f"
V0, V1, V2 = "r.v000000.aaaaaaaa", "r.v000001.bbbbbbbb", "r.v000002.cccccccc"
PROBE = "r.probe.dddddddd"
OTHER_RUN = "other.v000009.eeeeeeee"


def run_async(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return wrapped


def make_config(bucket: str | Path, **sections: Any) -> Config:
    fleet = {"name": FLEET, "silent_s": 5.0, **sections.pop("fleet", {})}
    raw = {
        "run": RUN,
        "bucket": str(bucket),
        "model": {"source": "nowhere"},
        "task": {"source": "a:b"},
        "rewards": [{"source": "a:b"}],
        "fleet": fleet,
        **sections,
    }
    return Config.model_validate(raw)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """`data` in pieces of `sizes`, and what is left; none is empty."""
    pieces = []
    for size in [*sizes, len(data)]:
        pieces.append(data[:size])
        data = data[size:]
    return [piece for piece in pieces if piece]


async def eventually(condition: Callable[[], Any], what: str, within_s: float = 60.0) -> None:
    """Waits until `condition()` (a value or a coroutine) is true."""
    end = time.monotonic() + within_s
    while True:
        result = condition()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return
        assert time.monotonic() < end, f"never came true: {what}"
        await asyncio.sleep(0.02)


class Harness:
    """`async with Harness(tmp_path) as h`: add replicas with `h.add`, ask with `h.complete`."""

    def __init__(self, bucket: str | Path, **sections: Any):
        self.config = make_config(bucket, **sections)
        self.bucket = Bucket(str(bucket))
        self.replicas: list[FakeReplica] = []
        self.agents: dict[str, FakeAgent] = {}

    async def __aenter__(self) -> "Harness":
        self.runner, self.proxy = build_runner(self.config)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        self.session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await self.runner.cleanup()
        await asyncio.gather(*(agent.stop() for agent in self.agents.values()))
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    async def add(self, replica: FakeReplica, *proved: str, ready: bool = True, **body: Any) -> FakeReplica:
        """Starts `replica` and its heartbeat, and waits until the proxy has seen it."""
        await replica.start()
        self.replicas.append(replica)
        agent = FakeAgent(self.bucket, FLEET, replica.id, **{"url": replica.url, "proved": list(proved), **body})
        self.agents[replica.id] = agent
        if ready:
            await eventually(lambda: self.is_ready(replica.id), f"{replica.id} is ready")
        return replica

    def is_ready(self, id: str) -> bool:
        known = self.proxy.router.replicas.get(id)
        return known is not None and known.ready

    async def complete(
        self, model: str, deadline_s: float | None = None, path: str = "/v1/completions", **fields: Any
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON, headers with lower-case names) of one completion request."""
        headers = {} if deadline_s is None else {"x-grpo-deadline-s": str(deadline_s)}
        body = {"model": model, "prompt": [1, 2], "max_tokens": 2, **fields}
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            payload = json.loads(await response.read())
            return response.status, payload, {k.lower(): v for k, v in response.headers.items()}

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, json.loads(await response.read())
