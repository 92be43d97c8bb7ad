"""An HTTP/1.1 server of no more than the proxy needs: whole requests in, whole answers or streams out.

One task for each request; a client that goes away cancels it. A general server costs more than all the rest of a
request through the proxy.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import httptools

from grpo_jax.proxy.messages import STATUS_LINES, Request, Response
from grpo_jax.proxy.parsing import BadHttp, Messages, TooLarge

log = logging.getLogger(__name__)

_LINGER_S = 5.0  # for a client that is still sending what has been refused
_HALF_SENT_S = 60.0
_IDLE_S = 3600.0
_MOST_AHEAD = 2**20  # bytes of further requests that are taken in while one is answered

Handler = Callable[[Request], Awaitable[Response | None]]
"""None: the answer has been streamed. Any exception but ConnectionResetError and CancelledError is a bug."""
Refusal = Callable[[int, str], Response]


class Server:
    """Makes the protocols of an asyncio server. Also what aiohttp's runners expect of a server."""

    def __init__(self, handler: Handler, refuse: Refusal):
        """refuse: the answer to what is no request (its status and why)."""
        self.handler, self.refuse = handler, refuse
        self.connections: set[Connection] = set()
        self.stopping = False

    def __call__(self) -> "Connection":
        return Connection(self)

    def tidy(self) -> None:
        """Closes connections on which nothing has happened for long. Call it now and then."""
        now = time.monotonic()
        for connection in list(self.connections):
            connection.close_if_stale(now)

    def pre_shutdown(self) -> None:
        self.stopping = True
        for connection in list(self.connections):
            connection.close_if_idle()

    async def shutdown(self, timeout: float | None = None) -> None:
        """Lets what is under way end within `timeout` seconds, then cancels it."""
        tasks = [connection.task for connection in self.connections if connection.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for connection in list(self.connections):
            connection.abort()


class Connection(Messages):
    """A client's connection: one request after the other."""

    _max_body = 32 * 2**20

    def __init__(self, server: Server):
        super().__init__()
        self._parser: httptools.HttpRequestParser = httptools.HttpRequestParser(self)
        self._server = server
        self.task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport
        self._begun = False  # a request, which has not come whole
        self._url = b""
        self._head: tuple[str, str, dict[bytes, bytes]]  # method, path, header fields
        self._stays = True  # the connection, after that request
        self._expects = False  # the client, to be told to send the body
        self._requests: deque[tuple[Request, bool]] = deque()  # that have come; and whether the connection stays
        self._refusal: tuple[int, str] | None = None  # of what has come after them
        self._ahead = b""  # what came while one was answered
        self._keep_alive = True
        self._lost = False
        self._changed_at = time.monotonic()
        self._room: asyncio.Future[None] | None = None  # a stream waits for it
        self._unsent = 0  # bytes, at the last look
        self._paused = False

    # ---- called by the server

    def close_if_idle(self) -> None:
        if self.task is None:
            self._transport.close()

    def close_if_stale(self, now: float) -> None:
        if self._room is not None and (unsent := self._transport.get_write_buffer_size()) != self._unsent:
            self._unsent, self._changed_at = unsent, now  # slowly, but the client reads
        limit = _HALF_SENT_S if self._begun or self._room is not None else _IDLE_S
        if (self.task is None or self._room is not None) and now - self._changed_at > limit:
            self._transport.abort()

    def abort(self) -> None:
        self._transport.abort()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        del self._parser  # which refers back to this
        self._server.connections.discard(self)
        if self.task is not None:
            self.task.cancel()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._changed_at = time.monotonic()
        self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self.task is not None:
            self._ahead += data
            if len(self._ahead) > _MOST_AHEAD and not self._paused:
                self._paused = True
                self._transport.pause_reading()
            return
        self._changed_at = time.monotonic()
        self._take(data)

    # ---- called by the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun, self._url = True, b""

    def on_url(self, url: bytes) -> None:
        self._grow_head(len(url))
        self._url += url

    def on_headers_complete(self) -> None:
        self._stays = self._check_head() == "1.1" and self._parser.should_keep_alive()
        if not self._url.startswith(b"/"):
            raise BadHttp("a target that is no path")
        fields, self._fields = self._fields, {}  # what follows the body is no part of them
        self._check_size(int(fields.get(b"content-length", b"0").lstrip(b"0") or 0))
        self._expects = fields.get(b"expect", b"").lower() == b"100-continue"
        path = self._url.partition(b"?")[0].decode("latin-1")
        self._head = self._parser.get_method().decode(), path, fields

    def on_message_complete(self) -> None:
        self._begun = self._expects = False
        self._without_body = 0
        self._requests.append((Request(*self._head, self._take_pieces(), self), self._stays))

    # ---- requests

    def _take(self, data: bytes) -> None:
        try:
            self._feed(data)
        except BadHttp as error:
            self._refusal = 413 if isinstance(error, TooLarge) else 400, f"the request has {error}"
        self._proceed()

    def _proceed(self) -> None:
        """In the order in which all has come: a request that is whole, one that is none, half of one."""
        if self._requests:
            request, self._keep_alive = self._requests.popleft()
            self.task = asyncio.get_running_loop().create_task(self._answer(request))
        elif self._refusal is not None:
            self._refuse(*self._refusal)
        elif self._expects:
            self._expects = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _refuse(self, status: int, why: str) -> None:
        """Answers what is no request, and takes nothing more; what the client is still sending is thrown away."""
        self._keep_alive = False
        self._send(self._server.refuse(status, why))
        asyncio.get_running_loop().call_later(_LINGER_S, self._transport.abort)

    # ---- answers

    async def _answer(self, request: Request) -> None:
        try:
            response = await self._server.handler(request)
        except (asyncio.CancelledError, ConnectionResetError):
            self._transport.abort()
            return
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            self._transport.abort()
            return
        if response is not None:
            self._send(response)
        self.task = None
        self._changed_at = time.monotonic()
        if not self._keep_alive or self._server.stopping or self._lost:
            self._transport.close()
        elif self._ahead and not self._requests and self._refusal is None:
            data, self._ahead = self._ahead, b""
            if self._paused:
                self._paused = False
                self._transport.resume_reading()
            self._take(data)
        else:
            self._proceed()

    def _send(self, response: Response) -> None:
        if not self._lost:
            ending = "\r\n" if self._keep_alive else "Connection: close\r\n\r\n"
            self._transport.write((response.head() + ending).encode("latin-1") + response.body)

    def begin_stream(self, headers: Mapping[str, str]) -> None:
        """Begins an answer 200 whose length is not known."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        ending = "" if self._keep_alive else "Connection: close\r\n"
        self._transport.write(f"{STATUS_LINES[200]}{lines}{ending}Transfer-Encoding: chunked\r\n\r\n".encode("latin-1"))

    async def write(self, data: bytes) -> None:
        """A piece of the stream; waits while the client does not keep up. ConnectionResetError when it has gone."""
        if self._lost:
            raise ConnectionResetError
        if data:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        if self._room is not None:
            await self._room
            if self._lost:
                raise ConnectionResetError

    def end_stream(self) -> None:
        if not self._lost:
            self._transport.write(b"0\r\n\r\n")
