"""A programmable OpenAI-like server, and the heartbeat of the agent that it would have."""

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

BEAT_S = 0.05


def completion(model: str, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": "5", "token_ids": [7, 2], "finish_reason": "stop"}
    return {"id": "cmpl-1", "object": "text_completion", "model": model, "choices": [choice], **fields}


async def answer_well(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response(completion(body["model"]))


def answer_always(status: int, text: str, **headers: str) -> Answer:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, text=text, content_type="application/json", headers=headers)

    return answer


def openai_error(message: str) -> str:
    return json.dumps({"error": {"message": message, "type": "SomeError", "param": None, "code": 1}})


class FakeReplica:
    """Serves on loopback; records the requests that it gets (path, headers, body) and how many were cancelled."""

    def __init__(self, id: str, answer: Answer = answer_well, models: list[str] | None = None):
        self.id, self.answer, self.models = id, answer, models or []
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.cancelled = 0
        self.url = ""

    @property
    def served(self) -> list[str]:
        """The models of the requests so far."""
        return [body["model"] for _, _, body in self.requests]

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/{path:.*}", self._post)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, dict(request.headers), body))
        try:
            return await self.answer(request, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class FakeAgent:
    """Writes the heartbeat of one replica every BEAT_S until stopped. Change `body` to change what it says."""

    def __init__(self, bucket: Bucket, fleet: str, id: str, url: str, **body: Any):
        self.body: dict[str, Any] = {
            "id": id, "url": url, "state": "ready", "runs": ["r"], "base_digest": "0" * 64, "engine": "reference",
            "engine_version": "1", "dtype": "float32", "proved": [], "quarantined": {}, "loaded": [], "running": 0,
            "waiting": 0, "restarts": 0, "started_at": 0.0, "error": None, **body,
        }  # fmt: skip
        self._writer = RecordWriter(bucket, layout.replica(fleet, id), incarnation=1)
        self._task = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            self._writer.write(self.body)
            await asyncio.sleep(BEAT_S)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
