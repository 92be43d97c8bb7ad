"""The process: how it starts, what it lets out, and how it ends."""

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from grpo_jax.errors import EXIT_DONE, EXIT_RESUMABLE, UsageError
from grpo_jax.proxy import run_end
from grpo_jax.proxy.app import run_proxy
from grpo_jax.proxy.run_end import RunEnd
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter
from tests.fakes.certificate import write_certificate
from tests.proxy.harness import FLEET, RUN, V0, V1, eventually, make_config, run_async
from tests.proxy.replica import FakeAgent, FakeReplica

_MAIN = """
import json, logging, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
from grpo_jax.config.load import parse_config
from grpo_jax.proxy.app import run_proxy
sys.exit(run_proxy(parse_config(json.loads(sys.argv[1]), "test"), "127.0.0.1", int(sys.argv[2])))
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class _Process:
    def __init__(self, process: asyncio.subprocess.Process, url: str, log: Path):
        self.process, self.url, self.log = process, url, log

    async def up(self, session: aiohttp.ClientSession) -> bool:
        assert self.process.returncode is None, self.log.read_text()
        try:
            async with session.get(self.url + "/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False


@asynccontextmanager
async def started_proxy(
    folder: Path, env: dict[str, str] | None = None, port: int | None = None, **sections: Any
) -> AsyncIterator[_Process]:
    config, port, log = make_config(folder / "bucket", **sections), port or free_port(), folder / "log"
    with log.open("w") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _MAIN, config.model_dump_json(), str(port),
            stderr=file, env={**os.environ, **(env or {})}, cwd=Path(__file__).parents[2],
        )  # fmt: skip
    proxy = _Process(process, f"http://127.0.0.1:{port}", log)
    try:
        async with aiohttp.ClientSession() as session:
            await eventually(lambda: proxy.up(session), "the proxy answers", within_s=300)
        yield proxy
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@run_async
async def test_a_signal_ends_it_as_resumable(tmp_path: Path, number: signal.Signals) -> None:
    async with started_proxy(tmp_path) as proxy:
        proxy.process.send_signal(number)
        assert await asyncio.wait_for(proxy.process.wait(), 120) == EXIT_RESUMABLE
        assert "Traceback" not in proxy.log.read_text()


@run_async
async def test_it_ends_with_the_run_after_the_requests_in_flight(tmp_path: Path) -> None:
    bucket = Bucket(str(tmp_path / "bucket"))
    run = RecordWriter(bucket, f"{RUN}/{layout.RUN}", incarnation=1)
    run.write({"run": RUN, "status": "running"})
    release = asyncio.Event()

    async def hold(request: Any, body: dict[str, Any]) -> Any:
        await release.wait()
        return await FakeReplica("x").answer(request, body)

    replica = FakeReplica("a", hold)
    await replica.start()
    agent = FakeAgent(bucket, FLEET, "a", replica.url, proved=[V0])
    try:
        async with started_proxy(tmp_path) as proxy, aiohttp.ClientSession() as session:
            post = session.post(proxy.url + "/v1/completions", json={"model": V0, "prompt": [1]})
            request = asyncio.ensure_future(post)
            await eventually(lambda: replica.requests, "the request arrives")
            run.write({"run": RUN, "status": "finished"})
            await eventually(lambda: "the run is over" in proxy.log.read_text(), "the proxy sees the end of the run")
            assert proxy.process.returncode is None
            release.set()
            response = await request
            assert (response.status, (await response.json())["model"]) == (200, V0)
            assert await asyncio.wait_for(proxy.process.wait(), 120) == EXIT_DONE
    finally:
        await agent.stop()
        await replica.stop()


@pytest.mark.parametrize("status", ["finished", "failed"])
def test_the_end_of_an_earlier_life_is_not_the_end_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setattr(run_end, "POLL_S", 0.0)
    bucket = Bucket(str(tmp_path))
    end = RunEnd(bucket, grace_s=1000.0)
    assert not end.over()
    RecordWriter(bucket, layout.RUN, incarnation=1).write({"status": "failed"})
    assert not end.over()
    assert RunEnd(bucket, grace_s=0.0).over()  # but it is, once nobody has resumed it in time
    resumed = RecordWriter(bucket, layout.RUN, incarnation=2)
    resumed.write({"status": "running"})
    assert not end.over()
    resumed.write({"status": status})
    assert end.over() == (status == "finished"), "somebody may start a learner that has failed again"


def test_a_failure_ends_the_proxy_once_the_learner_is_silent_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_end, "POLL_S", 0.0)
    bucket = Bucket(str(tmp_path))
    end, state = RunEnd(bucket, grace_s=0.5), RecordWriter(bucket, layout.LEARNER_STATE, incarnation=2)
    RecordWriter(bucket, layout.RUN, incarnation=1).write({"status": "failed"})
    for step in range(8):
        state.write({"step": step})
        assert not end.over()
        time.sleep(0.1)
    time.sleep(0.5)
    assert end.over()


def test_beyond_loopback_it_listens_only_where_the_config_says(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(UsageError, match=r"proxy\.host"):
            run_proxy(make_config(tmp_path), host, 0)


def test_a_port_in_use_is_a_usage_error(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(UsageError, match=r"proxy\.port"):
            run_proxy(make_config(tmp_path), "127.0.0.1", listener.getsockname()[1])


def test_it_needs_none_of_the_learners_and_generators_packages() -> None:
    code = "import sys, grpo_jax.proxy.app; print(sorted({'jax', 'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert result.stdout.strip() == "[]"


@run_async
async def test_the_token_goes_to_listed_https_hosts_only_and_never_to_the_log(tmp_path: Path) -> None:
    cert_file, key_file = write_certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert_file, key_file)
    secure, plain = FakeReplica("secure"), FakeReplica("plain")
    await secure.start(tls)
    await plain.start()
    port = secure.url.rsplit(":", 1)[1]
    v2 = "r.v000002.cccccccc"
    bucket = Bucket(str(tmp_path / "bucket"))
    agents = [
        FakeAgent(bucket, FLEET, "listed", f"https://localhost:{port}", proved=[V0]),
        FakeAgent(bucket, FLEET, "unlisted", f"https://127.0.0.1:{port}", proved=[V1]),
        FakeAgent(bucket, FLEET, "plain", plain.url.replace("127.0.0.1", "localhost"), proved=[v2]),
    ]
    env = {"GRPO_JAX_TOKEN": "sesame", "SSL_CERT_FILE": str(cert_file)}
    try:
        async with (
            started_proxy(tmp_path, env, fleet={"allowed_hosts": ["local*"]}) as proxy,
            aiohttp.ClientSession() as client,
        ):
            for model in (V0, V1, v2):
                # What a client sends as its own credentials goes nowhere.
                headers = {"Authorization": "Bearer of-the-client"}
                async with client.post(proxy.url + "/v1/completions", json={"model": model}, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
            async with client.get(proxy.url + "/fleet") as answer:
                assert "sesame" not in await answer.text()
            assert "sesame" not in proxy.log.read_text()
    finally:
        await asyncio.gather(*(agent.stop() for agent in agents))
        await asyncio.gather(secure.stop(), plain.stop())
    sent = {body["model"]: headers.get("Authorization") for _, headers, body in secure.requests + plain.requests}
    assert sent == {V0: "Bearer sesame", V1: None, v2: None}
