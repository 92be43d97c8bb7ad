"""The connection to a replica, against a server that sends what it is told, byte for byte."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.proxy.http1 import Connection, Lost
from grpo_jax.proxy.parsing import MAX_HEAD, BadHttp
from tests.proxy.harness import cut, run_async

REQUEST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi"
OK = b"HTTP/1.1 200 OK\r\n"
PARTS = st.sampled_from([
    b"HTTP/1.1 100 Continue\r\n\r\n", OK, OK, b"HTTP/1.1 204 No\r\n", b"HTTP/1.1 101 No\r\n", b"HTTP/1.0 200\r\n",
    b"Content-Length: 4\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n",
    b"Connection: upgrade\r\n", b"Upgrade: h2c\r\n", b"a:\r\n", b"\r\n", b"\r\n", b"4\r\nabcd\r\n", b"0\r\n",
    b"1;a=b\r\nx\r\n", b"wxyz", b"\n", b"\r",
])  # fmt: skip


def _chunked(body: bytes, sizes: list[int]) -> bytes:
    data, at = b"", 0
    for size in sizes:
        piece = body[at : at + size]
        at += size
        if piece:
            data += b"%x;a=b\r\n%b\r\n" % (len(piece), piece)
    if body[at:]:
        data += b"%X\r\n%b\r\n" % (len(body[at:]), body[at:])
    return data + b"0\r\nSome: trailer\r\n\r\n"


def _answer(framing: str, body: bytes, sizes: list[int]) -> bytes:
    head = OK + b"Content-Type: text/plain\r\n"
    if framing == "length":
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    if framing == "chunked":
        return head + b"Transfer-Encoding: Chunked\r\n\r\n" + _chunked(body, sizes)
    return head + b"Connection: close\r\n\r\n" + body


class _Transport(asyncio.Transport):
    """What a connection does to its transport."""

    def __init__(self) -> None:
        self.aborted = self.paused = False
        self.pauses = 0

    def write(self, data: object) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.paused = True
        self.pauses += 1

    def resume_reading(self) -> None:
        self.paused = False


async def _feed(pieces: list[bytes], whole: bool, end: bool = False) -> tuple[Connection, bytes]:
    connection, transport = Connection(), _Transport()
    connection.connection_made(transport)
    asking = asyncio.ensure_future(connection.request(REQUEST, whole))
    await asyncio.sleep(0)
    for piece in pieces:
        connection.data_received(piece)
        await asyncio.sleep(0)
    if end:
        connection.connection_lost(None)
    assert await asyncio.wait_for(asking, 10) == 200
    body = b""
    if whole:
        return connection, await asyncio.wait_for(connection.read(), 10)
    while piece := await asyncio.wait_for(connection.read_some(), 10):
        body += piece
    return connection, body


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["length", "chunked", "close"]),
    st.binary(max_size=80),
    st.lists(st.integers(1, 30), max_size=5),
    st.lists(st.integers(1, 40), max_size=12),
    st.booleans(),
)
def test_the_body_is_the_same_however_it_is_framed_and_cut(
    framing: str, body: bytes, chunks: list[int], cuts: list[int], whole: bool
) -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\n" + _answer(framing, body, chunks)
    connection, found = asyncio.run(_feed(cut(data, cuts), whole, end=framing == "close"))
    assert found == body
    assert connection.reusable == (framing != "close")


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/0.9 200 OK\r\n\r\n",
        b"HTTP/1.1 20\r\n\r\n",
        b"HTTP/1.1 000 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: xyz\r\n\r\nxyz",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        OK + b"no colon\r\n\r\n",
        OK + b" folded: x\r\n\r\n",
        OK + b"a: b\r\n folded: x\r\n\r\n",
        OK + b"name : x\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 1e3\r\n\r\n",
        OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\n",
        OK + b"Content-Length: 99999999999999999999\r\n\r\n",
        OK + b"Transfer-Encoding: gzip\r\n\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        OK + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
        OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\nab\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 17,
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * MAX_HEAD,
        OK + b"Transfer-Encoding: chunked\r\n\r\n5;" + b"x" * MAX_HEAD,
        OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * MAX_HEAD,
        OK + b"x: " + b"y" * MAX_HEAD,
        OK + b"x: " + b"y" * MAX_HEAD + b"\r\nContent-Length: 1\r\n\r\nz",
        OK + b"y" * MAX_HEAD,
        b"HTTP/1.1 200 " + b"y" * MAX_HEAD,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 5000,
        b"\r\n" * MAX_HEAD,
    ],
)
@pytest.mark.parametrize("size", [1000, 2**30])
@run_async
async def test_what_is_no_sound_answer_is_refused_and_not_quoted(data: bytes, size: int) -> None:
    connection, transport = Connection(), _Transport()
    connection.connection_made(transport)
    asking = asyncio.ensure_future(connection.request(REQUEST, True))
    await asyncio.sleep(0)
    while data and not transport.aborted:
        connection.data_received(data[:size])
        data = data[size:]
    assert transport.aborted
    with pytest.raises(BadHttp) as error:
        await asyncio.wait_for(asking, 10)
    assert not connection.reusable
    assert not any(word in str(error.value) for word in ("xyz", "SSH", "gzip", "folded"))


async def _outcome(pieces: list[bytes]) -> tuple[int, bytes] | type[Exception]:
    """What comes of an answer after which the connection ends."""
    connection = Connection()
    connection.connection_made(_Transport())
    asking = asyncio.ensure_future(connection.request(REQUEST, True))
    await asyncio.sleep(0)
    for piece in pieces:
        connection.data_received(piece)
    connection.connection_lost(None)
    try:
        return await asyncio.wait_for(asking, 10), await connection.read()
    except (BadHttp, Lost) as error:
        return type(error)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(PARTS, st.binary(max_size=8)), max_size=16), st.lists(st.integers(1, 40), max_size=12))
def test_whatever_comes_is_an_answer_or_is_refused_and_cuts_make_no_difference(
    parts: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(parts)
    assert asyncio.run(_outcome([data])) == asyncio.run(_outcome(cut(data, cuts)))


@run_async
async def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "_max_body", 1000)
    for head in (b"Content-Length: 1001\r\n\r\n", b"\r\n"):
        with pytest.raises(BadHttp, match="more than"):
            await _feed([OK + head, b"x" * 600, b"x" * 600], whole=True)


@pytest.mark.parametrize(
    "data", [b"", b"HTTP/1.1 200", OK + b"Content-Length: 5\r\n\r\nabc",
             OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n"]
)  # fmt: skip
@run_async
async def test_an_answer_that_breaks_off_is_lost(data: bytes) -> None:
    with pytest.raises(Lost):
        await _feed([data] if data else [], whole=True, end=True)


@run_async
async def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    answer = _answer("length", b"abc", [])
    connection, body = await _feed([answer + b"HTTP/1.1 200 OK\r\n"], whole=True)
    assert body == b"abc"
    assert not connection.reusable
    connection, body = await _feed([answer + b"nonsense"], whole=True)
    assert body == b"abc"
    assert not connection.reusable
    connection, _ = await _feed([answer], whole=True)
    assert connection.reusable
    connection.keep()
    connection.data_received(answer)
    assert not connection.reusable
    with pytest.raises(Lost):
        await connection.request(REQUEST, True)


@run_async
async def test_a_stream_that_nobody_reads_is_held_back() -> None:
    connection, transport = Connection(), _Transport()
    connection.connection_made(transport)
    asking = asyncio.ensure_future(connection.request(REQUEST, False))
    await asyncio.sleep(0)
    connection.data_received(OK + b"\r\n")
    assert await asking == 200
    sent = 0
    while not transport.paused:
        connection.data_received(b"x" * 2**16)
        sent += 2**16
        assert sent <= 2**21
    assert len(await connection.read_some()) == sent
    assert not transport.paused


async def _with_server(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    use: Callable[[Connection], Awaitable[None]],
) -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
        await use(connection)
        connection.close()


@run_async
async def test_one_connection_carries_one_request_after_the_other() -> None:
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while await reader.readuntil(b"hi"):
            asked += 1
            framing = ["length", "chunked"][asked % 2]
            writer.write(_answer(framing, b"%d" % asked, [1]))

    async def use(connection: Connection) -> None:
        for i in range(1, 6):
            assert await connection.request(REQUEST, i % 3 != 0) == 200
            assert await connection.read() == b"%d" % i
            assert connection.reusable
            connection.keep()

    await _with_server(serve, use)


@run_async
async def test_who_waits_is_told_when_the_connection_is_ended() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def use(connection: Connection) -> None:
        asking = asyncio.ensure_future(connection.request(REQUEST, True))
        await asyncio.sleep(0.05)
        connection.fail(TimeoutError())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asking, 10)
        assert not connection.reusable

    await _with_server(serve, use)


@run_async
async def test_it_understands_a_real_server() -> None:
    async def echo(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/whole":
            return web.Response(body=body * 1000)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(body)
        return response

    app = web.Application()
    app.router.add_post("/{path}", echo)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
        for path in (b"/whole", b"/parts", b"/whole"):
            head = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello" % path
            assert await connection.request(head, path == b"/parts") == 200
            assert await connection.read() == b"hello" * 1000
            assert connection.reusable
            connection.keep()
        connection.close()
    finally:
        await runner.cleanup()


@run_async
async def test_a_connection_that_has_ended_leaves_no_cycle() -> None:
    gc.disable()
    try:
        for whole in (True, False):
            connection, _ = await _feed([_answer("chunked", b"abc", [1])], whole, end=True)
            gone = weakref.ref(connection)
            del connection
            await asyncio.sleep(0)
            assert gone() is None
    finally:
        gc.enable()
