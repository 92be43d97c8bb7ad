"""Servers without an agent: what the proxy loads on them, what it believes of them, and what it tells them."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_jax.generator.process import free_port
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader, RecordWriter
from tests.generator.injections import edited, renamed
from tests.generator.settings import LORA
from tests.generator.settings import make_config as agent_config
from tests.generator.stand_in import StandIn
from tests.proxy import harness
from tests.proxy.harness import FLEET, Harness, run_async
from tests.proxy.replica import FakeReplica, answer_always
from tests.tiny_model import write_tiny_model


@pytest.fixture(autouse=True)
def _polls(_frequent_polls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as a server that computes on the same core can bear."""
    monkeypatch.setattr("grpo_jax.proxy.fleet.STATIC_POLL_S", 0.2)
    monkeypatch.setattr("grpo_jax.proxy.fleet.HEARTBEAT_POLL_S", 0.2)
    monkeypatch.setattr("grpo_jax.proxy.fleet._SOONEST_POLL_S", 0.2)


async def eventually(condition: Callable[[], Any], what: str) -> None:
    await harness.eventually(condition, what, within_s=150.0)


class Stock:
    """The reference server as somebody else would start it."""

    def __init__(self, folder: Path):
        self.port, self._folder = free_port("127.0.0.1"), folder
        self.id, self.url = f"127.0.0.1-{self.port}", f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, model_dir: Path) -> None:
        env = agent_config(self._folder, model_dir).generator.env
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "grpo_jax.generator.reference", "--model", str(model_dir)),
                *("--port", str(self.port), "--max-model-len", "64", "--max-lora-rank", "8"),
            ],
            env={**os.environ, **env, "JAX_PLATFORMS": "cpu"},
        )

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two bases."""
    folder = tmp_path_factory.mktemp("bases")
    return write_tiny_model(folder / "right"), write_tiny_model(folder / "wrong", seed=1)


@pytest.fixture
def learner(tmp_path: Path, models: tuple[Path, Path]) -> StandIn:
    return StandIn(str(tmp_path / "bucket"), "r", models[0], LORA)


@pytest.fixture
def stock(tmp_path: Path) -> Iterator[Stock]:
    stock = Stock(tmp_path)
    yield stock
    stock.kill()


def _harness(learner: StandIn, url: str, **fleet: Any) -> Harness:
    return Harness(
        learner.root,
        fleet={"replicas": [url], **fleet},
        model={"source": str(learner.model_dir), "dtype": "float32"},
        lora={"rank": LORA.rank, "alpha": LORA.alpha},
    )


def _proved(h: Harness) -> set[str]:
    return set(h.proxy.router.policies())


async def _row(h: Harness) -> dict[str, Any]:
    return (await h.get("/fleet"))[1]["replicas"][0]


async def _score(h: Harness, policy: str, tokens: list[int]) -> list[float]:
    status, answer, _ = await h.complete(policy, prompt=tokens, max_tokens=1, prompt_logprobs=0)
    assert status == 200, answer
    given = answer["choices"][0]["prompt_logprobs"][1:]
    return [position[str(token)]["logprob"] for position, token in zip(given, tokens[1:], strict=True)]


@pytest.mark.slow
@run_async
async def test_a_mounted_bucket_is_reconciled_proved_and_acknowledged(learner, stock, models) -> None:
    v0 = learner.start()
    trees = {version: learner.version(version) for version in (1, 2)}
    v1, v2 = (learner.publish(version, tree) for version, tree in trees.items())
    learner.point(v2, v1, v0)
    stock.start(models[0])
    # What a proxy left there whose clock has been set back by an hour since.
    bucket, key = Bucket(learner.root), layout.replica(FLEET, stock.id)
    earlier = RecordWriter(bucket, key, int((time.time() + 3600) * 1000))
    earlier.write({"id": stock.id, "url": stock.url, "state": "ready", "proved": [], "loaded": []})
    reader = RecordReader(bucket, key)
    assert reader.read() is not None
    async with _harness(learner, stock.url, mount=learner.root, reproof_s=0.2) as h:
        await eventually(lambda: _proved(h) == {v0, v1, v2}, "the window is proved")
        tokens = learner.tokens.tolist()
        for policy, version in ((v1, 1), (v2, 2)):
            np.testing.assert_allclose(await _score(h, policy, tokens), learner.logprobs(trees[version]), atol=5e-4)
        assert (await h.get("/v1/policy"))[1] == {"policy": v2, "version": 2, "replica": stock.id}
        row = await _row(h)
        assert (row["source"], row["state"], row["error"], row["quarantined"]) == ("static", "ready", None, {})

        def heartbeat(field: str) -> Any:
            record = reader.read()
            return record[field] if record is not None else None

        await eventually(lambda: set(heartbeat("proved") or ()) == {v0, v1, v2}, "the heartbeat says so")
        assert set(heartbeat("loaded")) >= {v0, v1, v2}
        assert heartbeat("url") == stock.url
        proofs = heartbeat("proofs")
        await eventually(lambda: heartbeat("proofs") > proofs, "proofs are repeated")
        window = [learner.publish(i, learner.version(i)) for i in (3, 4, 5, 6)][::-1]
        learner.point(*window)
        await eventually(lambda: set(window) <= _proved(h), "the window has moved")
        assert not {v0, v1, v2} & _proved(h)
        # Their files may still be read: they are named until the server was seen without them for a while.
        assert v2 in (await _row(h))["loaded"]
        await eventually(lambda: not {v0, v1, v2} & set(heartbeat("loaded")), "they are let go of")
    assert reader._bucket.read_or_none(layout.replica(FLEET, stock.id)) is None


@pytest.mark.slow
@run_async
async def test_after_a_restart_everything_is_proved_again_and_another_base_serves_nothing(
    learner, stock, models
) -> None:
    v0 = learner.start()
    v1 = learner.publish(1, learner.version(1))
    learner.point(v1, v0)
    stock.start(models[0])
    async with _harness(learner, stock.url, mount=learner.root) as h:
        await eventually(lambda: _proved(h) == {v0, v1}, "proved")
        stock.kill()
        await eventually(lambda: not _proved(h), "what is gone has proved nothing")
        stock.start(models[0])
        await eventually(lambda: _proved(h) == {v0, v1}, "proved again")
        assert (await h.complete("latest"))[1]["model"] == v1
        stock.kill()
        stock.start(models[1])
        await eventually(lambda: v1 in h.proxy.router.replicas[stock.id].quarantined, "the wrong base is noticed")
        assert not _proved(h)
        assert (await h.complete(v1, deadline_s=0))[0] == 503
        assert "this replica has not proved the probe" in (await _row(h))["quarantined"][v1]


@pytest.mark.slow
@run_async
async def test_without_a_mount_only_what_a_server_lists_and_really_serves_is_routed_to(
    learner, stock, models, tmp_path
) -> None:
    v0 = learner.start()
    trees = {version: learner.version(version) for version in (1, 2, 3, 4)}
    v1, v2, v3, absent = (learner.publish(version, tree) for version, tree in trees.items())
    learner.point(absent, v3, v2, v1, v0)
    on_disk = {
        v1: learner.files(trees[1]),
        v2: learner.files(trees[1]),  # the previous policy under the new name
        v3: learner.files(trees[3], alpha=16.0),
    }
    stock.start(models[0])
    async with _harness(learner, stock.url) as h:
        await eventually(lambda: h.is_ready(stock.id), "the server answers")
        assert not _proved(h)
        for name, files in on_disk.items():
            (tmp_path / name).mkdir()
            for file, data in files.items():
                (tmp_path / name / file).write_bytes(data)
            body = {"lora_name": name, "lora_path": str(tmp_path / name)}
            async with h.session.post(f"{stock.url}/v1/load_lora_adapter", json=body) as response:
                assert response.status == 200
        await eventually(lambda: len(h.proxy.router.replicas[stock.id].quarantined) == 2, "two are refused")
        await eventually(lambda: _proved(h) == {v1}, "one is proved")
        for name in (v2, v3, absent):
            assert (await h.complete(name, deadline_s=0))[0] in (404, 503)
        assert (await h.complete("latest"))[1]["model"] == v1
        row = await _row(h)
        assert set(row["loaded"]) == {v1, v2, v3}  # ours to judge, not to unload
        assert all("differ from the learner's" in reason for reason in row["quarantined"].values())


@pytest.mark.slow
@run_async
async def test_a_mistake_of_the_exporter_is_no_policy_here_either(learner, stock, models) -> None:
    v0 = learner.start()
    tree = learner.version(1001, size=0.3)
    learner.probe = learner.publish(None, tree, files=edited(learner.files(tree), renamed))
    learner.point(v0)
    stock.start(models[0])
    async with _harness(learner, stock.url, mount=learner.root) as h:
        await eventually(lambda: v0 in h.proxy.router.replicas[stock.id].quarantined, "it is refused")
        assert not _proved(h)


@pytest.mark.slow
@run_async
async def test_a_bucket_that_hangs_holds_up_neither_requests_nor_the_exit(
    learner, stock, models, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    v0 = learner.start()
    stock.start(models[0])
    try:
        async with _harness(learner, stock.url, mount=learner.root) as h:
            await eventually(lambda: _proved(h) == {v0}, "proved")
            v1 = learner.publish(1, learner.version(1))
            read = Bucket.read

            def hanging(self: Bucket, key: str, *args: Any) -> bytes:
                if v1 in key:
                    release.wait(60)
                return read(self, key, *args)

            monkeypatch.setattr(Bucket, "read", hanging)
            learner.point(v1, v0)
            await asyncio.sleep(0.5)
            assert (await h.complete(v0, deadline_s=0))[0] == 200
            assert v1 not in _proved(h)
        assert not release.is_set()
    finally:
        release.set()


@run_async
async def test_the_token_is_not_sent_in_the_clear(learner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_JAX_TOKEN", "hf_secret")
    learner.start()
    server = FakeReplica("stock", answer_always(200, "{}"))
    await server.start()
    try:
        async with _harness(learner, server.url, mount=learner.root, allowed_hosts=["*"]) as h:
            await eventually(lambda: any(path == "/v1/load_lora_adapter" for path, _, _ in server.requests), "asked")
            await eventually(lambda: h.is_ready(server.url.removeprefix("http://").replace(":", "-")), "ready")
        assert not any("Authorization" in headers for _, headers, _ in server.requests)
    finally:
        await server.stop()
