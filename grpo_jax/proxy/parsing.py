"""What both ends of HTTP/1.1 ask of a message beyond what llhttp asks: limits, and that it can be read in one way."""

import asyncio

import httptools

MAX_HEAD = 64 * 2**10  # bytes of a head with its trailers; also of what stands between two pieces of a body


class BadHttp(Exception):
    """The other side does not keep to the protocol or the limits. The message names what it sent and quotes nothing."""


class TooLarge(BadHttp):
    pass


class Messages(asyncio.Protocol):
    """A connection that `_parser` reads, message after message."""

    _parser: httptools.HttpRequestParser | httptools.HttpResponseParser
    _max_body: int  # bytes that may wait for `_take_pieces`

    def __init__(self) -> None:
        self._fields: dict[bytes, bytes] = {}  # by lower-case name; of several with one name the first
        self._head_size = 0
        self._pieces: list[bytes] = []  # of the body
        self._size = 0  # of the pieces
        self._without_body = 0  # bytes that have come since the last piece of a body, about

    def _feed(self, data: bytes) -> None:
        """Calls the methods below for what `data` holds. BadHttp, also theirs: then no more can be read."""
        self._without_body += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:  # one of llhttp's own phrases
            raise BadHttp(f"malformed HTTP ({error})") from None
        if self._without_body > MAX_HEAD:  # what is not complete yet is with the parser, which has no limit
            raise BadHttp("too long a head")

    def _check_head(self) -> str:
        """The version of HTTP."""
        if self._parser.should_upgrade():
            raise BadHttp("an upgrade to another protocol")
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise BadHttp("another version of HTTP")
        return version

    def _grow_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > MAX_HEAD:
            raise BadHttp("too long a head")

    def _check_size(self, size: int) -> None:
        if size > self._max_body:
            raise TooLarge(f"more than {self._max_body >> 20} MiB")

    def _take_pieces(self) -> bytes:
        pieces, self._pieces, self._size = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # ---- called by the parser

    def on_message_begin(self) -> None:
        self._fields, self._head_size = {}, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of the head, and of what may follow a chunked body."""
        self._grow_head(len(name) + len(value))
        name, value = name.lower(), value.rstrip(b" \t")
        if name == b"transfer-encoding" and (name in self._fields or value.lower() != b"chunked"):
            raise BadHttp("an unknown transfer coding")
        self._fields.setdefault(name, value)

    def on_body(self, body: bytes) -> None:
        self._without_body = 0
        self._pieces.append(body)
        self._size += len(body)
        self._check_size(self._size)
