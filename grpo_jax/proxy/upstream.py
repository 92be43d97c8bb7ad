"""One request to one replica: time limits, the token, no redirects, and every failure of transport is a fault."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
from yarl import URL

from grpo_jax.proxy.addresses import may_be_sent_token
from grpo_jax.proxy.answers import ReplicaFault, check_completion, parse_json

TOKEN_VARIABLE = "GRPO_JAX_TOKEN"

_CONNECT_TIMEOUT_S = 5.0
_MODELS_TIMEOUT_S = 5.0
# Below uvicorn's 5 s: a request on a connection that the server is just closing would look like a fault of the replica.
_KEEPALIVE_S = 3.0
_MAX_FIRST_EVENT = 4 * 2**20  # bytes

_TRANSPORT_ERRORS = (aiohttp.ClientError, TimeoutError, OSError)


class Answer:
    """A replica's answer whose head has arrived. Its methods raise ReplicaFault when the rest does not."""

    def __init__(self, response: aiohttp.ClientResponse):
        self._response = response
        self.status = response.status

    async def body(self) -> bytes:
        try:
            return await self._response.read()
        except _TRANSPORT_ERRORS as error:
            raise _fault(error) from None

    async def chunk(self) -> bytes:
        """The next bytes of a stream, b"" at its end."""
        try:
            return await self._response.content.readany()
        except _TRANSPORT_ERRORS as error:
            raise _fault(error) from None

    async def first_event(self, policy: str) -> bytes:
        """The stream's bytes up to its first event at least, which must be a piece of a completion of `policy`."""
        head = b""
        while len(head) <= _MAX_FIRST_EVENT:
            chunk = await self.chunk()
            if not chunk:
                break
            head += chunk
            for line in head.split(b"\n")[:-1]:  # whole lines only
                if line.startswith(b"data:"):
                    check_completion(_parse_event(line[5:]), policy)
                    return head
        raise ReplicaFault("answered 200 without an event stream")


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
    async def post(self, url: URL, path: str, body: bytes) -> AsyncIterator[Answer]:
        """POSTs JSON to `path` below `url`; ReplicaFault if no answer begins. Leaving early closes the connection."""
        headers = {"Content-Type": "application/json", **self._headers(url)}
        try:
            response = await self._session.post(
                _join(url, path), data=body, headers=headers, allow_redirects=False, timeout=self._timeout
            )
        except _TRANSPORT_ERRORS as error:
            raise _fault(error) from None
        async with response:
            yield Answer(response)

    async def models(self, url: URL) -> list[str]:
        """The names in the server's `/v1/models`; ReplicaFault if it does not answer with a list of models."""
        timeout = aiohttp.ClientTimeout(total=_MODELS_TIMEOUT_S)
        target = _join(url, "/v1/models")
        try:
            async with self._session.get(
                target, headers=self._headers(url), allow_redirects=False, timeout=timeout
            ) as response:
                payload = parse_json(await response.read()) if response.status == 200 else None
            return [str(model["id"]) for model in payload["data"]]  # type: ignore[index]
        except _TRANSPORT_ERRORS as error:
            raise _fault(error) from None
        except (ValueError, TypeError, KeyError):
            raise ReplicaFault(f"answered {response.status} without a list of models") from None

    def _headers(self, url: URL) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity"}
        if self._token and may_be_sent_token(url, self._allowed_hosts):
            headers["Authorization"] = f"Bearer {self._token}"
        return headers


def _join(url: URL, path: str) -> URL:
    return url.with_path(url.raw_path.rstrip("/") + path, encoded=True)


def _parse_event(data: bytes) -> object:
    try:
        return parse_json(data)
    except ValueError:
        raise ReplicaFault("answered 200 with a stream that is not JSON") from None


def _fault(error: Exception) -> ReplicaFault:
    """Named by its class and the system's words only: texts of protocol errors quote what was received."""
    system = getattr(error, "os_error", error)
    detail = getattr(system, "strerror", None)
    before_sending = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    lost = not before_sending and not isinstance(error, TimeoutError)
    kind = "did not answer in time" if isinstance(error, TimeoutError) else f"failed with {type(error).__name__}"
    return ReplicaFault(f"{kind} ({detail})" if detail else kind, lost=lost)
