"""A real HTTP server in the place of the proxy. It answers as a proxy does, unless a test scripts something else."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from aiohttp import web

from grpo_jax.adapters.names import parse_policy

Reply = tuple[int, Any]
Script = Callable[[dict[str, Any]], Awaitable[Reply | None]]


def policy_name(version: int, run: str = "toy") -> str:
    return f"{run}.v{version:06d}.{version:08x}"


def error(message: str = "no", code: str = "x") -> dict[str, Any]:
    return {"error": {"message": message, "type": "t", "param": None, "code": code}}


def choice(index: int, seed: int, max_tokens: int) -> dict[str, Any]:
    """A sound choice that depends on the seed alone, as vLLM's sample i of a request depends on seed + i."""
    rng = np.random.default_rng(seed + index)
    tokens = rng.integers(3, 20, size=rng.integers(1, max_tokens + 1)).tolist()
    return {
        "index": index,
        "text": " ".join(f"t{token}" for token in tokens),
        "token_ids": tokens,
        "logprobs": {"token_logprobs": (-rng.exponential(size=len(tokens))).tolist()},
        "finish_reason": "length" if len(tokens) == max_tokens else "stop",
    }


def completions(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": request["model"],
        "choices": [choice(i, request["seed"], request["max_tokens"]) for i in range(request["n"])],
    }


class ScriptedProxy:
    """Serves the policies in `served`, `current` the newest of them (None: 503).

    Attributes:
      script: called with each completions request; None means the ordinary answer. A test may replace it at any time.
      requests: all completions requests, in order; `headers` theirs, `policy_headers` those of questions for a policy.
    """

    def __init__(self, current: str | None = None):
        self.current = current
        self.served: set[str] = {current} if current else set()
        self.script: Script | None = None
        self.policy_reply: Reply | None = None
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.policy_headers: list[Any] = []
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def policy_requests(self) -> int:
        return len(self.policy_headers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def publish(self, name: str) -> None:
        self.current = name
        self.served.add(name)

    async def __aenter__(self) -> "ScriptedProxy":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/policy", self._policy), web.post("/v1/completions", self._completions)]

    async def start(self) -> None:
        """Listens on the port it had before, if there is one."""
        app = web.Application()
        app.router.add_routes(self.routes())
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Cuts every connection."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _policy(self, request: web.Request) -> web.Response:
        self.policy_headers.append(request.headers.copy())
        if self.policy_reply is not None:
            return _response(self.policy_reply)
        if self.current is None:
            return _response((503, error("nothing is proved")))
        version = parse_policy(self.current).version
        return _response((200, {"policy": self.current, "version": version, "replica": "r0"}))

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(request.headers.copy())
        reply = await self.script(body) if self.script is not None else None
        if reply is None:
            known = body["model"] in self.served
            reply = (200, completions(body)) if known else (404, error(f"no policy {body['model']}"))
        return _response(reply)


def _response(reply: Reply) -> web.Response:
    status, body = reply
    headers = {"x-grpo-replica": "r7"}
    if isinstance(body, bytes):
        return web.Response(status=status, body=body, headers=headers)
    return web.json_response(body, status=status, headers=headers)


async def eventually(condition: Callable[[], Any], timeout_s: float = 100.0) -> None:
    """Waits until `condition()`; fails the test when that takes too long."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
