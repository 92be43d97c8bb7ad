"""The connections to one server: those in use, and those that wait for their next request."""

import asyncio
import ssl
import time

from yarl import URL

from grpo_jax.proxy.answers import ReplicaFault
from grpo_jax.proxy.http1 import Connection

CONNECT_TIMEOUT_S = 5.0
# Below uvicorn's 5 s: a request on a connection that the server is just closing would look like a fault of the replica.
KEEPALIVE_S = 3.0


class Pool:
    """Any number of connections to the host of `url`. For one event loop."""

    def __init__(self, url: URL, tls: ssl.SSLContext):
        assert url.raw_host is not None
        assert url.port is not None  # http and https have one by default
        self._host, self._port = url.raw_host, url.port
        self._tls = tls if url.scheme == "https" else None
        self._idle: list[tuple[float, Connection]] = []  # since when; the last used last
        self._busy: dict[Connection, float] = {}  # and when their answers are due
        self._connecting = 0

    @property
    def empty(self) -> bool:
        return not self._idle and not self._busy and not self._connecting

    async def take(self, timeout_s: float) -> Connection:
        """A connection for one request, which `end_late` ends after `timeout_s`.

        OSError (TimeoutError and ssl.SSLError are such) or UnicodeError if the server cannot be reached.
        """
        now = time.monotonic()
        connection = None
        while self._idle and connection is None:
            since, waiting = self._idle.pop()
            if waiting.reusable and since > now - KEEPALIVE_S:
                connection = waiting
            else:
                waiting.close()
        if connection is None:
            connection = await self._connect()
            now = time.monotonic()
        self._busy[connection] = now + timeout_s
        return connection

    async def _connect(self) -> Connection:
        self._connecting += 1
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    Connection,
                    self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._host if self._tls else None,
                )
        finally:
            self._connecting -= 1
        return connection

    def give_back(self, connection: Connection) -> None:
        self._busy.pop(connection, None)
        if connection.reusable:
            connection.keep()
            self._idle.append((time.monotonic(), connection))
        else:
            connection.close()

    def fail(self, why: str) -> None:
        """Ends all that is under way with ReplicaFault(why)."""
        for connection in list(self._busy):
            connection.fail(ReplicaFault(why))

    def end_late(self) -> None:
        """Ends with TimeoutError what should have ended by now. One look for all is cheaper than a timer for each."""
        now = time.monotonic()
        for connection in [connection for connection, due in self._busy.items() if due <= now]:
            connection.fail(TimeoutError())

    def close_idle(self, older_than_s: float = KEEPALIVE_S) -> None:
        limit = time.monotonic() - older_than_s
        kept = []
        for since, connection in self._idle:
            if since > limit and connection.reusable:
                kept.append((since, connection))
            else:
                connection.close()
        self._idle = kept
