"""What the proxy believes about its replicas, from real records in real buckets."""

import asyncio
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from grpo_jax.errors import UsageError
from grpo_jax.proxy import heartbeats
from grpo_jax.proxy.app import build_runner
from grpo_jax.proxy.heartbeats import HeartbeatReader
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter, seal
from tests.proxy.harness import FLEET, PROBE, V0, V1, V2, Harness, eventually, make_config, run_async
from tests.proxy.replica import FakeAgent, FakeReplica, answer_always, openai_error

KEY = layout.replica(FLEET, "a")
BODY: dict[str, Any] = {"id": "a", "url": "http://127.0.0.1:1", "state": "ready", "proved": [V0]}


def _reader(bucket: Bucket, silent_s: float = 1000.0) -> HeartbeatReader:
    return HeartbeatReader(bucket, FLEET, silent_s)


def _live(reader: HeartbeatReader) -> list[str]:
    return [sighting.heartbeat.id for sighting in reader.poll() if sighting.live]


def test_a_heartbeat_that_never_changes_is_not_alive(tmp_path: Path) -> None:
    """It may be the last word of an earlier life, with policies of an abandoned lineage."""
    bucket = Bucket(str(tmp_path))
    writer = RecordWriter(bucket, KEY, incarnation=1)
    writer.write(BODY)
    reader = _reader(bucket)
    for _ in range(3):
        assert [sighting.live for sighting in reader.poll()] == [False]
    writer.write(BODY)
    assert _live(reader) == ["a"]
    restarted = _reader(bucket)
    assert _live(restarted) == []
    RecordWriter(bucket, KEY, incarnation=2).write(BODY)
    assert _live(restarted) == ["a"]


@pytest.mark.parametrize(
    "change",
    [
        {"state": "asleep"},
        {"url": "http://user:hunter2@127.0.0.1:1"},
        {"url": "file:///etc/passwd"},
        {"url": 5},
        {"proved": "all"},
        {"proved": None},
        {"proved": [1]},
        {"id": "b"},
        {"id": "a\r\nset-cookie: x"},
        {"quarantined": ["x"]},
    ],
)
def test_a_malformed_heartbeat_is_left_out_with_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any]
) -> None:
    bucket, reader = Bucket(str(tmp_path)), _reader(Bucket(str(tmp_path)))
    writer = RecordWriter(bucket, KEY, incarnation=1)
    for _ in range(4):
        writer.write({**BODY, **change})
        assert reader.poll() == []
    assert len(caplog.records) == 1
    assert KEY in caplog.text
    assert "hunter2" not in caplog.text
    for _ in range(2):
        writer.write(BODY)
        reader.poll()
    assert _live(reader) == ["a"]


@pytest.mark.parametrize(
    "data",
    [
        seal(BODY, 2, 1).replace(b"127.0.0.1:1", b"127.0.0.1:2"),
        seal(BODY, 2, 1)[:-20],
        b"",
        b"[]",
        b"\xff",
        seal({**BODY, "url": "http://127.0.0.1:3"}, 0, 9),
        seal({**BODY, "url": "http://127.0.0.1:4"}, "x", 1),  # type: ignore[arg-type]
        seal({**BODY, "url": "http://127.0.0.1:4"}, "9", 1),  # type: ignore[arg-type]
    ],
)
def test_a_torn_stale_or_forged_record_changes_nothing_and_harms_no_other(tmp_path: Path, data: bytes) -> None:
    bucket = Bucket(str(tmp_path))
    writer = RecordWriter(bucket, KEY, incarnation=1)
    other = RecordWriter(bucket, layout.replica(FLEET, "b"), incarnation=1)
    reader = _reader(bucket)
    for _ in range(2):
        writer.write(BODY)
        reader.poll()
    bucket.replace(KEY, data)
    for _ in range(3):
        other.write({**BODY, "id": "b"})
        urls = {s.heartbeat.id: (str(s.heartbeat.url), s.live) for s in reader.poll()}
    assert urls == {"a": ("http://127.0.0.1:1", True), "b": ("http://127.0.0.1:1", True)}


class _Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(heartbeats, "time", clock)
    return clock


class _Outage(Bucket):
    down = False

    def list(self, prefix: str = "") -> list[str]:
        self._check()
        return super().list(prefix)

    def read(self, key: str, max_bytes: int | None = None, *, size: int = 0) -> bytes:
        self._check()
        return super().read(key, max_bytes)

    def _check(self) -> None:
        if self.down:
            raise RuntimeError("503 from the store")


def test_silence_is_told_by_the_readers_clock_and_ends_with_the_next_beat(tmp_path: Path, clock: _Clock) -> None:
    bucket = Bucket(str(tmp_path))
    writer, reader = RecordWriter(bucket, KEY, incarnation=1), _reader(bucket, silent_s=10.0)
    for _ in range(2):
        writer.write(BODY)
        reader.poll()
    clock.now += 9.9
    assert _live(reader) == ["a"]
    clock.now += 0.2
    assert _live(reader) == []
    clock.now += 1000.0
    writer.write(BODY)
    assert _live(reader) == ["a"]
    bucket.delete(KEY)
    assert _live(reader) == ["a"]  # a listing may miss what is there
    clock.now += 10.1
    assert reader.poll() == []


def test_an_unreachable_bucket_is_not_the_replicas_silence(
    tmp_path: Path, clock: _Clock, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = _Outage(str(tmp_path))
    writer, reader = RecordWriter(bucket, KEY, incarnation=1), _reader(bucket, silent_s=10.0)
    for _ in range(2):
        writer.write(BODY)
        reader.poll()
    bucket.down = True
    for _ in range(20):
        clock.now += 10.0
        assert _live(reader) == ["a"]
    assert len(caplog.records) == 2  # one for the listing, one for the record, however long it lasts
    bucket.down = False
    assert _live(reader) == []


@run_async
async def test_a_silent_replica_is_dropped_and_its_work_goes_elsewhere(tmp_path: Path) -> None:
    async with Harness(tmp_path, fleet={"silent_s": 1.0}) as h:
        a, b = await h.add(FakeReplica("a"), V0, V1), await h.add(FakeReplica("b"), V0)
        await h.agents["a"].stop()
        await eventually(lambda: not h.is_ready("a"), "a is silent")
        before = len(a.requests)
        for _ in range(3):
            assert (await h.complete(V0))[0] == 200
        assert (len(a.requests), len(b.requests)) == (before, 3)
        row = next(row for row in (await h.get("/fleet"))[1]["replicas"] if row["id"] == "a")
        assert row["state"] == "silent"
        await eventually(lambda: h.proxy.router.policies() == {V0: 0}, "only what b proved is left")
        h.bucket.delete(layout.replica(FLEET, "a"))
        await eventually(lambda: "a" not in h.proxy.router.replicas, "a is forgotten once its record is gone")


@run_async
async def test_a_late_joiner_is_picked_up_and_one_that_drains_is_left(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        a = await h.add(FakeReplica("a"), V0)
        b = await h.add(FakeReplica("b"), V0, ready=False, state="starting")
        assert (await h.complete(V0))[2]["x-grpo-replica"] == "a"
        h.agents["b"].body["state"] = "ready"
        await eventually(lambda: h.is_ready("b"), "b has joined")
        h.agents["a"].body["state"] = "draining"
        await eventually(lambda: not h.is_ready("a"), "a drains")
        for _ in range(3):
            assert (await h.complete(V0))[2]["x-grpo-replica"] == "b"
        assert (len(a.requests), len(b.requests)) == (1, 3)


@run_async
async def test_a_quarantine_takes_effect_while_running(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        replica = await h.add(FakeReplica("a"), V0, V1)
        assert (await h.complete("latest"))[1]["model"] == V1
        h.agents["a"].body["quarantined"] = {V1: "keys differ from the probe's"}
        await eventually(lambda: h.proxy.router.policies() == {V0: 0}, "v1 is quarantined")
        assert (await h.complete("latest"))[1]["model"] == V0
        assert (await h.complete(V1, deadline_s=0))[0] == 503
        assert replica.served == [V1, V0]
        assert (await h.get("/fleet"))[1]["replicas"][0]["quarantined"] == {V1: "keys differ from the probe's"}


@run_async
async def test_the_fleet_table_says_what_an_operator_asks(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        replica = await h.add(FakeReplica("a", answer_always(500, openai_error("x"))), V0, PROBE, error="later")
        await h.complete(V0, deadline_s=0)
        status, table = await h.get("/fleet")
        assert (status, table["fleet"], table["run"]) == (200, FLEET, "r")
        (row,) = table["replicas"]
        assert row["heartbeat_age_s"] >= 0
        assert row["blocked_s"] > 0
        expected = {
            "id": "a", "url": replica.url, "source": "heartbeat", "state": "ready", "ready": True, "proved": [V0],
            "in_flight": 0, "strikes": 1, "last_error": "answered 500", "engine": "reference", "error": "later",
        }  # fmt: skip
        assert {key: row[key] for key in expected} == expected


@run_async
async def test_heartbeats_are_read_from_an_object_store_too(tmp_path: Path) -> None:
    async with Harness(f"memory://proxy-{uuid.uuid4().hex}") as h:
        await h.add(FakeReplica("a"), V0)
        assert (await h.complete("latest"))[1]["model"] == V0


@run_async
async def test_neither_a_hanging_nor_a_failing_bucket_holds_up_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, release = threading.Event(), threading.Event()
    async with Harness(tmp_path) as h:
        await h.add(FakeReplica("a"), V0)

        def troubled(self: Bucket, prefix: str = "") -> list[str]:
            if hang.is_set():
                release.wait(60)
            raise RuntimeError("the store is down")

        def failing_read(self: Bucket, key: str, max_bytes: int | None = None, *, size: int = 0) -> bytes:
            raise RuntimeError("the store is down")

        monkeypatch.setattr(Bucket, "read", failing_read)
        monkeypatch.setattr(Bucket, "list", troubled)
        await asyncio.sleep(0.1)
        assert (await h.complete(V0, deadline_s=0))[0] == 200
        hang.set()
        await asyncio.sleep(0.1)
        assert (await h.complete(V0, deadline_s=0))[0] == 200
        # The exit does not wait for the hanging thread either: leaving the harness ends here.
    assert not release.is_set()
    release.set()


@run_async
async def test_what_a_server_without_an_agent_lists_is_not_believed(tmp_path: Path) -> None:
    server = FakeReplica("static", models=["smollm2", V0, V1, PROBE])
    await server.start()
    async with Harness(tmp_path, fleet={"replicas": [server.url + "/v1"], "silent_s": 0.5}) as h:
        id = server.url.removeprefix("http://").replace(":", "-")
        await eventually(lambda: h.is_ready(id), "the server is looked at")
        RecordWriter(h.bucket, f"r/{layout.POLICY}", 1).write({"probe": PROBE, "current": V1, "window": [V1, V0]})
        await eventually(lambda: set(h.proxy.router.replicas[id].quarantined) >= {V1, V0}, "nothing vouches for them")
        assert h.proxy.router.policies() == {}
        status, payload, _ = await h.complete(V1, deadline_s=0)
        assert (status, server.requests) == (503, [])
        assert "does not exist" in payload["error"]["message"]
        (row,) = (await h.get("/fleet"))[1]["replicas"]
        assert (row["source"], row["loaded"], row["proved"]) == ("static", [PROBE, V0, V1], [])
        await server.stop()
        await eventually(lambda: h.proxy.router.ready_count() == 0, "the server is silent")


@run_async
async def test_the_window_of_the_run_is_told_to_the_router(tmp_path: Path) -> None:
    """A run that went back to an older step has a newest policy of a lower version than others that are proved."""
    async with Harness(tmp_path) as h:
        await h.add(FakeReplica("a"), V0, V1, V2)
        assert (await h.complete("latest"))[1]["model"] == V2
        writer = RecordWriter(h.bucket, f"r/{layout.POLICY}", 1)
        writer.write({"run": "r", "probe": PROBE, "current": V1, "window": [V1, V0]})
        await eventually(lambda: h.proxy.router.replicas["a"].newest == V1, "the window is known")
        h.bucket.replace(f"r/{layout.POLICY}", b"torn")
        writer.write({"run": "r"})
        await asyncio.sleep(0.1)
        assert (await h.complete("latest"))[1]["model"] == V1


@pytest.mark.parametrize("urls", [["http://h:80/a/b", "http://h:80/a-b"], ["http://h:80/a/b", "http://h:80/a/b/"]])
@run_async
async def test_two_addresses_of_one_name_are_told_apart_or_are_one(tmp_path: Path, urls: list[str]) -> None:
    config = make_config(tmp_path, fleet={"replicas": urls})
    if urls[1].endswith("/"):
        await build_runner(config)[1].upstream.close()
        return
    with pytest.raises(UsageError, match=r"fleet\.replicas\.1: .* cannot be told apart"):
        build_runner(config)


@pytest.mark.parametrize("url", ["10.0.0.1:8000", "https://user:hunter2@host", "ftp://host"])
@run_async
async def test_a_bad_static_address_is_a_usage_error_that_names_the_key(tmp_path: Path, url: str) -> None:
    config = make_config(tmp_path, fleet={"replicas": ["http://127.0.0.1:1", url]})
    with pytest.raises(UsageError, match=r"fleet\.replicas\.1: ") as error:
        build_runner(config)
    assert "hunter2" not in str(error.value)


@run_async
async def test_a_replica_that_moves_is_followed(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        old = await h.add(FakeReplica("a", answer_always(500, "")), V0)
        await h.complete(V0, deadline_s=0)
        new = FakeReplica("a")
        await new.start()
        h.replicas.append(new)
        await h.agents["a"].stop()
        moved = Bucket(str(tmp_path))
        h.agents["a2"] = agent = FakeAgent(moved, FLEET, "a", new.url, proved=[V0])
        agent._writer = RecordWriter(moved, KEY, incarnation=2)
        assert (await h.complete(V0))[0] == 200
        assert len(new.requests) == 1
        assert len(old.requests) >= 1
