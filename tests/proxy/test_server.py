"""The server's side of HTTP/1.1, byte for byte."""

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.proxy import server as server_module
from grpo_jax.proxy.handlers import refusal
from grpo_jax.proxy.messages import Request, Response
from grpo_jax.proxy.server import Connection, Server
from tests.proxy.harness import cut, eventually, run_async

PARTS = st.sampled_from([
    b"GET / HTTP/1.1\r\n", b"POST /x?y HTTP/1.1\r\n", b"POST /few HTTP/1.1\r\n", b"POST / HTTP/1.0\r\n",
    b"GET / HTTP/2.0\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n", b"Content-Length: 4\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n",
    b"Connection: upgrade\r\n", b"Upgrade: h2c\r\n", b"Expect: 100-continue\r\n", b"a:\r\n", b"\r\n", b"\r\n",
    b"4\r\nabcd\r\n",
    b"0\r\n", b"1;a=b\r\nx\r\n", b"wxyz", b"\n", b"\r",
])  # fmt: skip
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _Echo:
    """Answers with what was asked; `/wait` waits for `release`, `/stream` streams without end."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bytes]] = []
        self.release = asyncio.Event()
        self.cancelled = self.broken = self.written = 0

    async def __call__(self, request: Request) -> Response | None:
        self.asked.append((request.method, request.path, request.body))
        try:
            if request.path == "/wait":
                await self.release.wait()
            if request.path == "/stream":
                request.connection.begin_stream({"x": "y"})
                while True:
                    await request.connection.write(b"z" * 2**16)
                    self.written += 2**16
            if request.path == "/few":
                request.connection.begin_stream({"x": "y"})
                for piece in (b"one", b"", b"two"):
                    await request.connection.write(piece)
                request.connection.end_stream()
                return None
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        except ConnectionResetError:
            self.broken += 1
            raise
        return Response(200, request.path.encode() + b" " + request.body, {"a": "b"})


@asynccontextmanager
async def _served() -> AsyncIterator[tuple[_Echo, Server, asyncio.StreamReader, asyncio.StreamWriter]]:
    echo = _Echo()
    server = Server(echo, refusal)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
    try:
        yield echo, server, reader, writer
    finally:
        writer.close()
        listening.close()
        await server.shutdown(0.0)


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:-2])
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["Content-Length"]))


def _post(path: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: a", f"content-LENGTH: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        self.data = b""
        self.closed = False

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.data += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.binary(max_size=40), st.booleans()), min_size=1, max_size=4),
    st.lists(st.integers(1, 60), max_size=12),
)
def test_requests_are_the_same_however_they_are_framed_and_cut(
    bodies: list[tuple[bytes, bool]], cuts: list[int]
) -> None:
    async def run() -> None:
        echo, data = _Echo(), b""
        for body, chunked in bodies:
            if chunked:
                pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
                data += b"POST /x?q=1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"
            else:
                data += _post("/x", body)
        connection, transport = Connection(Server(echo, refusal)), _Transport()
        connection.connection_made(transport)
        for piece in cut(data, cuts):
            connection.data_received(piece)
            await asyncio.sleep(0)
        for _ in range(3 * len(bodies)):
            await asyncio.sleep(0)
        assert echo.asked == [("POST", "/x", body) for body, _ in bodies]
        expected = [b"%d\r\n\r\n/x %b" % (len(body) + 3, body) for body, _ in bodies]
        at = 0
        for answer in expected:
            at = transport.data.index(answer, at) + len(answer)

    asyncio.run(run())


async def _outcome(pieces: list[bytes]) -> tuple[list[tuple[str, str, bytes]], bytes, bool]:
    """What was asked; the answers; whether the connection was ended."""
    echo, transport = _Echo(), _Transport()
    connection = Connection(Server(echo, refusal))
    connection.connection_made(transport)
    for piece in pieces:
        if not transport.closed:
            connection.data_received(piece)
        while connection.task is not None and not connection.task.done():
            await asyncio.sleep(0)
    return echo.asked, transport.data.replace(CONTINUE, b""), transport.closed


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(PARTS, st.binary(max_size=8)), max_size=16), st.lists(st.integers(1, 40), max_size=12))
def test_whatever_comes_is_a_request_or_is_refused_and_cuts_make_no_difference(
    parts: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(parts)
    assert asyncio.run(_outcome([data])) == asyncio.run(_outcome(cut(data, cuts)))


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/2\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\n\r\n",
        b"CONNECT elsewhere:80 HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 30\r\n\r\n",
        b"GET http://elsewhere/ HTTP/1.1\r\n\r\n",
        b"get / HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\na: b\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\na : b\r\n\r\n",
        b"GET / HTTP/1.1\na: b\n\n",
        b"GET / HTTP/1.1\r\na: b\0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: +5\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5, 5\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;" + b"x" * 70_000,
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 20_000,
        b"GET / HTTP/1.1\r\na: " + b"b" * 70_000,
        b"GET / HTTP/1.1\r\n" + b"b" * 70_000,
        b"GET /" + b"b" * 70_000,
    ],
)
@run_async
async def test_what_can_be_read_in_two_ways_or_in_none_is_refused_and_ends_the_connection(data: bytes) -> None:
    async with _served() as (echo, _, reader, writer):
        writer.write(data + b"GET /smuggled HTTP/1.1\r\n\r\n")
        status, headers, body = await _answer(reader)
        assert (status, headers["Connection"]) == (400, "close")
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        await asyncio.sleep(0.02)
        assert echo.asked == []


@pytest.mark.parametrize("declared", [True, False])
@run_async
async def test_too_large_a_body_is_refused_while_it_is_still_being_sent(
    monkeypatch: pytest.MonkeyPatch, declared: bool
) -> None:
    monkeypatch.setattr(Connection, "_max_body", 100_000)
    async with _served() as (echo, _, reader, writer):
        if declared:
            writer.write(b"POST / HTTP/1.1\r\nContent-Length: 10000000\r\n\r\n")
        else:
            writer.write(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFF\r\n")
        for _ in range(100):
            writer.write(b"x" * 100_000)
        await writer.drain()
        assert (await _answer(reader))[0] == 413
        assert echo.asked == []


@run_async
async def test_a_connection_stays_unless_the_client_wants_it_closed() -> None:
    async with _served() as (_, _, reader, writer):
        for body in (b"one", b"", b"three"):
            writer.write(_post("/x", body))
            status, headers, answer = await _answer(reader)
            assert (status, answer, headers["a"]) == (200, b"/x " + body, "b")
        writer.write(_post("/x", b"last", "Connection: Close"))
        assert (await _answer(reader))[1]["Connection"] == "close"
        assert await asyncio.wait_for(reader.read(), 60) == b""
    async with _served() as (_, _, reader, writer):
        writer.write(_post("/x", b"old", version="1.0"))
        assert (await _answer(reader))[2] == b"/x old"
        assert await asyncio.wait_for(reader.read(), 60) == b""


@run_async
async def test_a_client_that_waits_to_be_told_is_told() -> None:
    async with _served() as (_, _, reader, writer):
        writer.write(_post("/x", b"", "Expect: 100-continue").replace(b": 0\r\n", b": 3\r\n"))
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60) == CONTINUE
        writer.write(b"abc")
        assert (await _answer(reader))[2] == b"/x abc"


@run_async
async def test_requests_that_come_at_once_are_answered_in_turn_whatever_the_last_one_is() -> None:
    for last, status in ((b"nonsense\r\n\r\n", 400), (b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", 413)):
        async with _served() as (echo, _, reader, writer):
            writer.write(_post("/wait", b"one") + _post("/x", b"two") + last)
            await eventually(lambda: echo.asked, "it is asked")
            await asyncio.sleep(0.02)
            echo.release.set()
            for body in (b"/wait one", b"/x two"):
                assert (await _answer(reader))[2] == body
            found, headers, _ = await _answer(reader)
            assert (found, headers["Connection"]) == (status, "close")
    async with _served() as (echo, _, reader, writer):
        writer.write(_post("/wait", b"") + _post("/x", b"", "Expect: 100-continue").replace(b": 0\r\n", b": 3\r\n"))
        await eventually(lambda: echo.asked, "it is asked")
        echo.release.set()
        assert (await _answer(reader))[2] == b"/wait "
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60) == CONTINUE
        writer.write(b"abc")
        assert (await _answer(reader))[2] == b"/x abc"


@run_async
async def test_empty_lines_before_a_request_zeros_before_a_length_and_trailers_mean_nothing() -> None:
    async with _served() as (_, _, reader, writer):
        writer.write(b"\r\n\r\n" + _post("/x", b"one"))
        writer.write(b"POST /x HTTP/1.1\r\nContent-Length: %b3\r\n\r\ntwo" % (b"0" * 5000))
        writer.write(b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nExpect: 100-continue\r\n\r\n")
        writer.write(_post("/x", b"four"))
        for body in (b"one", b"two", b"", b"four"):
            assert (await _answer(reader))[2] == b"/x " + body


@run_async
async def test_a_connection_that_has_ended_leaves_no_cycle() -> None:
    gc.disable()
    try:
        connection = Connection(Server(_Echo(), refusal))
        connection.connection_made(_Transport())
        connection.data_received(_post("/x", b"one") + _post("/x", b"two") + _post("/x", b"half")[:-1])
        while connection.task is not None:
            await asyncio.sleep(0)
        connection.connection_lost(None)
        gone = weakref.ref(connection)
        del connection
        await asyncio.sleep(0)
        assert gone() is None
    finally:
        gc.enable()


@run_async
async def test_a_client_that_goes_away_cancels_its_request() -> None:
    async with _served() as (echo, server, _, writer):
        writer.write(_post("/wait", b""))
        await eventually(lambda: echo.asked, "it is asked")
        writer.close()
        await eventually(lambda: echo.cancelled == 1, "it is cancelled")
        await eventually(lambda: not server.connections, "the connection is forgotten")


@run_async
async def test_a_stream_goes_out_in_chunks_and_leaves_the_connection_usable() -> None:
    async with _served() as (_, _, reader, writer):
        for _ in range(2):
            writer.write(_post("/few", b""))
            head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode()
            assert head.startswith("HTTP/1.1 200 OK\r\nx: y\r\n")
            assert "Transfer-Encoding: chunked" in head
            assert await reader.readexactly(21) == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


@run_async
async def test_a_stream_waits_for_a_client_that_does_not_read_and_ends_with_it() -> None:
    async with _served() as (echo, _, _, writer):
        writer.write(_post("/stream", b""))
        await eventually(lambda: echo.written, "it has begun")
        before = -1
        while before != echo.written:
            before = echo.written
            await asyncio.sleep(0.2)
        assert echo.written < 64 * 2**20
        writer.transport.abort()
        await eventually(lambda: echo.cancelled + echo.broken == 1, "it has ended")


@run_async
async def test_a_client_that_does_not_read_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _served() as (echo, server, _, writer):
        writer.write(_post("/stream", b""))
        await eventually(lambda: any(c._room is not None for c in server.connections), "it does not keep up")
        server.tidy()
        assert server.connections
        monkeypatch.setattr(server_module, "_HALF_SENT_S", -1.0)
        server.tidy()
        await eventually(lambda: echo.cancelled + echo.broken == 1, "its request has ended")


@run_async
async def test_a_stop_lets_answers_out_and_takes_no_more_requests() -> None:
    async with _served() as (echo, server, reader, writer):
        writer.write(_post("/wait", b"") + _post("/x", b"next"))
        await eventually(lambda: echo.asked, "it is asked")
        server.pre_shutdown()
        stopping = asyncio.create_task(server.shutdown(60))
        await asyncio.sleep(0.02)
        assert not stopping.done()
        echo.release.set()
        assert (await _answer(reader))[2] == b"/wait "
        await asyncio.wait_for(stopping, 60)
        assert len(echo.asked) == 1
    async with _served() as (echo, server, reader, writer):
        writer.write(_post("/wait", b""))
        await eventually(lambda: echo.asked, "it is asked")
        server.pre_shutdown()
        await asyncio.wait_for(server.shutdown(0.05), 60)
        assert echo.cancelled == 1
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await _answer(reader)


@run_async
async def test_half_a_request_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _served() as (_, server, _, writer):
        writer.write(b"POST /x HTTP/1.1\r\nContent-Le")
        await eventually(lambda: any(c._begun for c in server.connections), "half of it has come")
        server.tidy()
        assert server.connections
        monkeypatch.setattr(server_module, "_HALF_SENT_S", -1.0)
        server.tidy()
        await eventually(lambda: not server.connections, "it is closed")
