"""One request to one replica: time limits, the token, no redirects, and every failure of transport is a fault."""

import ssl
from collections.abc import Sequence

from yarl import URL

from grpo_jax.proxy.addresses import may_be_sent_token
from grpo_jax.proxy.answers import ReplicaFault, check_completion, parse_json
from grpo_jax.proxy.http1 import Connection, Lost
from grpo_jax.proxy.parsing import BadHttp
from grpo_jax.proxy.pool import Pool

_MAX_FIRST_EVENT = 4 * 2**20  # bytes
_FAILURES = (OSError, BadHttp, Lost, ReplicaFault)


class Answer:
    """A replica's answer whose head has arrived. Its methods raise ReplicaFault when the rest does not. Close it."""

    def __init__(self, pool: Pool, connection: Connection):
        self._pool, self._connection = pool, connection
        self.status = connection.status

    async def body(self) -> bytes:
        try:
            return await self._connection.read()
        except _FAILURES as error:
            raise _fault(error) from None

    async def chunk(self) -> bytes:
        """The next bytes of a stream, b"" at its end."""
        try:
            return await self._connection.read_some()
        except _FAILURES as error:
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

    def close(self) -> None:
        """Also ends the request if the answer has not been read to its end."""
        self._pool.give_back(self._connection)


class Upstream:
    """The HTTP client towards all replicas. Create and close it on the event loop."""

    def __init__(self, request_timeout_s: float, token: str | None, allowed_hosts: Sequence[str]):
        self._token, self._allowed_hosts = token, tuple(allowed_hosts)
        self._timeout_s = request_timeout_s
        self._tls = ssl.create_default_context()
        self._pools: dict[URL, Pool] = {}
        self._heads: dict[tuple[URL, str], bytes] = {}

    async def close(self) -> None:
        for pool in self._pools.values():
            pool.fail("was left: the proxy stops")
            pool.close_idle(0.0)

    async def post(self, url: URL, path: str, body: bytes, whole: bool = True) -> Answer:
        """POSTs JSON to `path` below `url`; ReplicaFault if no answer comes, all of it if `whole`, else its head."""
        head = self._heads.get((url, path))
        if head is None:
            head = self._heads[url, path] = self._head("POST", url, path) + b"Content-Type: application/json\r\n"
        request = b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
        return await self._ask(url, request, whole)

    def abandon(self, url: URL, why: str) -> None:
        """Ends all requests to the server at `url` with ReplicaFault(why)."""
        pool = self._pools.get(url)
        if pool is not None:
            pool.fail(why)

    def tidy(self) -> None:
        """Ends what is late, closes what has been idle for long, forgets servers that are talked to no more.

        Call it about once a second: time limits are that precise.
        """
        for url, pool in list(self._pools.items()):
            pool.end_late()
            pool.close_idle()
            if pool.empty:
                del self._pools[url]
                self._heads = {key: head for key, head in self._heads.items() if key[0] != url}

    async def _ask(self, url: URL, request: bytes, whole: bool) -> Answer:
        pool = self._pools.get(url)
        if pool is None:
            pool = self._pools[url] = Pool(url, self._tls)
        try:
            connection = await pool.take(self._timeout_s)
        except (OSError, UnicodeError) as error:
            raise _unreachable(error) from None
        try:
            await connection.request(request, whole)
        except BaseException as error:
            pool.give_back(connection)
            if isinstance(error, _FAILURES):
                raise _fault(error) from None
            raise
        return Answer(pool, connection)

    def _head(self, method: str, url: URL, path: str) -> bytes:
        lines = [
            f"{method} {url.raw_path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {url.raw_authority}",
            "Accept-Encoding: identity",
            "User-Agent: grpo-jax",
        ]
        if self._token and may_be_sent_token(url, self._allowed_hosts):
            lines.append(f"Authorization: Bearer {self._token}")
        return "".join(f"{line}\r\n" for line in lines).encode("ascii")


def _parse_event(data: bytes) -> object:
    try:
        return parse_json(data)
    except ValueError:
        raise ReplicaFault("answered 200 with a stream that is not JSON") from None


def _unreachable(error: OSError | UnicodeError) -> ReplicaFault:
    """Named by the system's words only; nothing has been sent."""
    if isinstance(error, TimeoutError):
        return ReplicaFault("could not be connected to in time")
    detail = getattr(error, "strerror", None) or type(error).__name__
    return ReplicaFault(f"could not be connected to ({detail})")


def _fault(error: Exception) -> ReplicaFault:
    if isinstance(error, ReplicaFault):
        return error
    if isinstance(error, TimeoutError):
        return ReplicaFault("did not answer in time")
    if isinstance(error, BadHttp):
        return ReplicaFault(f"answered with {error}")
    return ReplicaFault("lost the connection", lost=True)
