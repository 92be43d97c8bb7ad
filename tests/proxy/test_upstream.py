"""The client towards replicas: what it keeps of them, and how it lets go."""

import asyncio

import pytest
from yarl import URL

from grpo_jax.proxy.answers import ReplicaFault
from grpo_jax.proxy.pool import Pool
from grpo_jax.proxy.upstream import Upstream
from tests.proxy.harness import V0, eventually, run_async
from tests.proxy.replica import FakeReplica

BODY = b'{"model": "%b"}' % V0.encode()


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


@run_async
async def test_what_is_just_being_connected_to_is_not_forgotten() -> None:
    """Else nobody could end the request: neither its time limit nor `abandon` would reach it."""
    async with await asyncio.start_server(_silent, "127.0.0.1", 0) as server:
        url = URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        upstream = Upstream(1000.0, None, [])
        asking = asyncio.create_task(upstream.post(url, "/", BODY))
        for _ in range(20):  # at every stage of connecting
            await asyncio.sleep(0)
            upstream.tidy()
        await asyncio.sleep(0.05)
        upstream.abandon(url, "is given up")
        with pytest.raises(ReplicaFault, match="is given up"):
            await asyncio.wait_for(asking, 60)
        await upstream.close()


@run_async
async def test_a_server_that_is_talked_to_no_more_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = FakeReplica("a")
    await replica.start()
    upstream, url = Upstream(60.0, None, []), URL(replica.url)
    for _ in range(3):
        answer = await upstream.post(url, "/v1/completions", BODY)
        assert answer.status == 200
        answer.close()
    upstream.tidy()
    assert len(upstream._pools) == len(upstream._heads) == 1
    assert len(upstream._pools[url]._idle) == 1  # three requests, one connection
    monkeypatch.setattr(Pool.close_idle, "__defaults__", (0.0,))
    upstream.tidy()
    assert not upstream._pools
    assert not upstream._heads
    await upstream.close()
    await replica.stop()


@run_async
async def test_an_idle_connection_that_the_server_has_closed_is_not_used() -> None:
    replica = FakeReplica("a")
    await replica.start()
    upstream, url = Upstream(60.0, None, []), URL(replica.url)
    (await upstream.post(url, "/v1/completions", BODY)).close()
    await replica.stop()
    await eventually(lambda: not upstream._pools[url]._idle[0][1].reusable, "the end of the connection is seen")
    with pytest.raises(ReplicaFault, match="could not be connected to") as fault:
        await upstream.post(url, "/v1/completions", BODY)
    assert not fault.value.lost  # nothing was sent, so the request cannot be what ended the server
    await upstream.close()
