"""A client's connection in HTTP/1.1, for answers from servers that are not trusted.

One request at a time; answers are bounded; nothing is followed, decoded or remembered. A general client does all of
that, and costs several times as much as the rest of a request through the proxy.
"""

import asyncio
from typing import cast

import httptools

from grpo_jax.proxy.parsing import BadHttp, Messages

_HIGH_WATER = 2**20  # bytes of a stream that wait for their reader

_FRAMING = {b"content-length", b"transfer-encoding"}


class Lost(Exception):
    """The connection ended before the answer did."""


class Connection(Messages):
    """Call `request`, then `read` or `read_some` to the end; then, if `reusable`, the next one.

    Raises from each of them: BadHttp, Lost, OSError, or what `fail` was given.
    """

    _max_body = 256 * 2**20  # of an answer that is read as a whole

    def __init__(self) -> None:
        super().__init__()
        self._parser: httptools.HttpResponseParser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._idle = True
        self._begin()

    def _begin(self) -> None:
        self.status = 0  # until the head has come
        self.done = False
        self._error: Exception | None = None
        self._whole = True
        self._keep_alive = False
        self._until_end = False  # of the connection the body goes
        self._without_body = 0
        self._take_pieces()
        self._paused = False

    @property
    def reusable(self) -> bool:
        return self.done and self._keep_alive and not self._closed and self._error is None

    async def request(self, data: bytes, whole: bool) -> int:
        """Sends a request and returns the answer's status: once it is there, or with `whole` once all of it is."""
        assert self._transport is not None
        self._begin()
        self._idle, self._whole = False, whole
        if self._closed:
            raise Lost
        self._transport.write(data)
        while not (self.done if whole else self.status):
            await self._change()
        return self.status

    async def read(self) -> bytes:
        """The rest of the body."""
        self._whole = True
        self._resume()
        while not self.done:
            await self._change()
        return self._take_pieces()

    async def read_some(self) -> bytes:
        """What has come of the body, at least a byte; b"" at its end."""
        while not self._pieces and not self.done:
            await self._change()
        self._resume()
        return self._take_pieces()

    def fail(self, error: Exception) -> None:
        """Ends the connection; whoever waits for it gets `error`."""
        if self._error is None and not self.done:
            self._error = error
        self.close()
        self._wake()

    def close(self) -> None:
        self._closed = True
        if self._transport is not None:
            self._transport.abort()

    def keep(self) -> None:
        """The answer has been read; until the next request the server has nothing to say."""
        self._idle = True

    async def _change(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _resume(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # those of other event loops are of no such class

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        del self._parser  # which refers back to this
        if self._until_end and exc is None:
            self.done = True
        elif not self.done and self._error is None:
            self._error = exc if isinstance(exc, OSError) else Lost()
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._idle or self.done:  # an answer to no request; what it belongs to is anyone's guess
            self.close()
            return
        try:
            self._feed(data)
        except BadHttp as error:
            if not self.done:
                self.fail(error)
                return
            self._keep_alive = False  # for what follows the answer
        if self._size > _HIGH_WATER and not self._whole and not self.done and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if self.done or (self.status and not self._whole):
            self._wake()

    # ---- called by the parser

    def on_message_begin(self) -> None:
        if self.done:
            raise BadHttp("more than an answer")
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._check_head()
        status = self._parser.get_status_code()
        if status < 100:
            raise BadHttp("no status")
        if status >= 200:  # others announce that one
            self.status = status
            self._keep_alive = self._parser.should_keep_alive()
            self._until_end = not _FRAMING & self._fields.keys()

    def on_message_complete(self) -> None:
        self.done = self.status > 0
