"""One request to one replica: time limits, the token, no redirects, and every failure as a ReplicaFault."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
from yarl import URL

from grpo_jax.proxy.addresses import may_be_sent_token
from grpo_jax.proxy.answers import ReplicaFault, check_completion, parse_json

TOKEN_VARIABLE = "GRPO_JAX_TOKEN"

_CONNECT_TIMEOUT_S = 5.0
_MODELS_TIMEOUT_S = 5.0
# Below uvicorn's 5 s: a connection that the server is just closing would look like a fault of the replica.
_KEEPALIVE_S = 3.0
_MAX_FIRST_EVENT = 4 * 2**20  # bytes


class Upstream:
    """The HTTP client towards all replicas. Create and close it on the event loop."""

    def __init__(self, request_timeout_s: float, token: str | None, allowed_hosts: Sequence[str]):
        self._token, self._allowed_hosts = token, tuple(allowed_hosts)
        self._timeout = aiohttp.ClientTimeout(total=request_timeout_s, connect=_CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._session.close()

    @asynccontextmanager
    async def post(self, url: URL, path: str, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """POSTs JSON to `url` + `path`. ReplicaFault if there is no answer, also while the caller reads it."""
        headers = {"Content-Type": "application/json", **self._headers(url)}
        with transport_faults():
            async with self._session.post(
                _join(url, path), data=body, headers=headers, allow_redirects=False, timeout=self._timeout
            ) as response:
                yield response

    async def models(self, url: URL) -> list[str]:
        """The names in the server's `/v1/models`."""
        timeout = aiohttp.ClientTimeout(total=_MODELS_TIMEOUT_S)
        async with self._session.get(
            _join(url, "/v1/models"), headers=self._headers(url), allow_redirects=False, timeout=timeout
        ) as response:
            if response.status != 200:
                raise ReplicaFault(f"answered {response.status}")
            payload = parse_json(await response.read())
        return [model["id"] for model in payload["data"] if isinstance(model["id"], str)]

    def _headers(self, url: URL) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity"}
        if self._token and may_be_sent_token(url, self._allowed_hosts):
            headers["Authorization"] = f"Bearer {self._token}"
        return headers
