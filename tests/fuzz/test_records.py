"""Records with one writer (run, pointer, learner, worker, replica): who reads one gets a sound value or the old one."""

import asyncio
import math
from random import Random
from typing import Any

import pytest

from grpo_jax.config.schema import Fleet
from grpo_jax.generator.observer import Observer
from grpo_jax.generator.policies import Wanted
from grpo_jax.observability.load import FleetLoad
from grpo_jax.proxy.heartbeats import HeartbeatReader
from grpo_jax.proxy.run_end import RunEnd
from grpo_jax.rollouts.state import Counters, read_previous, record_body
from grpo_jax.rollouts.watch import RunWatch
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader, read_record, seal, unseal
from grpo_jax.storage.shapes import misfit
from tests.fuzz.mutations import as_json, bent, damaged
from tests.fuzz.profile import fuzz

V0, V1, PROBE = "r.v000000.aaaaaaaa", "r.v000001.bbbbbbbb", "r.probe.dddddddd"
RUN: dict[str, Any] = {
    "run": "r", "status": "running", "error": None, "config": {"run": "r", "fleet": {"name": None}, "steps": 4},
    "versions": {"python": "3.11"}, "base": {"source": "org/tiny", "digest": "ab" * 32}, "created_at": 1e9,
}  # fmt: skip
POINTER = {"run": "r", "current": V1, "window": [V1, V0], "probe": PROBE}
STATE = {
    "run": "r", "step": 3, "version": 3, "total_steps": 4, "phase": "training", "drops": [["e000.i000007.a00", "x"]],
}  # fmt: skip
WORKER = record_body(
    Counters(generated_tokens=5, first_named={V0: 1e9}, first_served={V0: 1e9}), phase="running", started_at=1e9,
    inflight_groups=1, inflight_samples=4, live=2, redraws=1, skipped={3: "why"}, epoch_size=8, scoring_slots=32,
)  # fmt: skip
REPLICA: dict[str, Any] = {
    "id": "r0", "url": "http://127.0.0.1:8000", "state": "ready", "proved": [V0], "quarantined": {V1: "why"},
    "loaded": [V0], "running": 1, "waiting": 0, "proved_at": {V0: 1e9}, "dtype": "float32", "engine": "vllm",
}  # fmt: skip


def forged(rng: Random, body: dict[str, Any], seq: int = 7) -> bytes:
    """Damage under a right checksum, where a checksum can be had; else damage alone."""
    data = seal(body, 3, seq)
    if rng.random() < 0.2:
        return damaged(rng, data)
    value = bent(rng, body)
    try:
        return seal(value, 3, seq)
    except (ValueError, TypeError):  # what no writer could have written
        return as_json(value)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Bucket:
    return Bucket(str(tmp_path_factory.mktemp("records")))


def test_sound_records_are_read(root: Bucket) -> None:
    run, replica = root.child("sound"), layout.replica("f", "r0")
    bodies = {layout.RUN: RUN, layout.POLICY: POINTER, layout.LEARNER_STATE: STATE, replica: REPLICA}
    for key, body in (bodies | {layout.worker_state("w0"): WORKER}).items():
        run.replace(key, seal(body, 3, 7))
        found = read_record(run, key)
        assert found is not None
        assert body.items() <= found.items()
    assert read_previous(run, "w0").skipped == {3: "why"}


@fuzz()
def test_bytes_are_a_record_whose_checksum_is_right_or_nothing(rng: Random) -> None:
    data = seal(RUN, 3, 7)
    for kind in (damaged(rng, data), as_json(bent(rng, {**RUN, "incarnation": 3, "seq": 7, "checksum": "x"}))):
        found = unseal(kind)
        if found is not None:
            assert {key: value for key, value in found.items() if key not in ("incarnation", "seq")} == RUN


@fuzz()
def test_a_reader_goes_neither_back_nor_down(root: Bucket, rng: Random) -> None:
    run = root.child("reader")
    run.replace(layout.POLICY, seal(POINTER, 2, 9))
    reader = RecordReader(run, layout.POLICY)
    assert reader.read() is not None
    run.replace(layout.POLICY, damaged(rng, seal({**POINTER, "run": "other"}, 2, 8)))
    kept = reader.read()
    assert kept is not None
    assert kept["run"] == "r"


@fuzz(200)
def test_the_worker_reads_its_run(root: Bucket, rng: Random) -> None:
    run = root.child("worker")
    for key, body in ((layout.RUN, RUN), (layout.LEARNER_STATE, STATE), (layout.POLICY, POINTER)):
        run.replace(key, forged(rng, body) if rng.random() < 0.5 else seal(body, 3, 7))
    watch = RunWatch(run, Fleet(), follow_policies=True)
    watch.read()
    if watch.has_begun:
        assert isinstance(watch.total_steps, int)
        assert watch.has_ended in (True, False)
        assert watch.is_draining in (True, False)
        assert all(isinstance(reason, str) for reason in watch.drops.values())


@fuzz(200)
def test_the_worker_reads_what_its_life_before_has_left(root: Bucket, rng: Random) -> None:
    run = root.child("previous")
    run.replace(layout.worker_state("w0"), forged(rng, WORKER))
    previous = read_previous(run, "w0")
    assert previous.counters.generated_tokens >= 0
    assert math.isfinite(previous.counters.backpressure_s)
    assert all(isinstance(index, int) for index in previous.skipped)


@fuzz(60)
def test_an_agent_reads_its_run(root: Bucket, rng: Random) -> None:
    run = root.child("agent")
    for key, body in ((layout.RUN, RUN), (layout.LEARNER_STATE, STATE), (layout.POLICY, POINTER)):
        run.replace(key, forged(rng, body) if rng.random() < 0.5 else seal(body, 3, 7))
    observer = Observer(run)

    async def look() -> None:
        watching = asyncio.ensure_future(observer.watch())
        await asyncio.wait({watching}, timeout=0.02)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=watching.cancelled())

    try:
        asyncio.run(look())
    except asyncio.CancelledError:
        pass
    assert observer.base_digest is None or isinstance(observer.base_digest, str)
    _check(observer.wanted)


def _check(wanted: Wanted | None) -> None:
    if wanted is not None:
        assert all(isinstance(name, str) for name in (wanted.current, wanted.probe, *wanted.window))


@fuzz(200)
def test_the_proxy_reads_heartbeats_and_the_runs_end(root: Bucket, rng: Random) -> None:
    fleet = root.child("proxy")
    fleet.replace(layout.replica("f", "r0"), forged(rng, REPLICA))
    for sighting in HeartbeatReader(fleet, "f", silent_s=5.0).poll():
        beat = sighting.heartbeat
        assert beat.id == "r0"
        assert beat.url.scheme in ("http", "https")
    fleet.replace(layout.RUN, forged(rng, RUN))
    assert RunEnd(fleet, grace_s=0.0).over() in (True, False)


@fuzz(200)
def test_the_load_of_a_fleet_is_a_number(rng: Random) -> None:
    load = FleetLoad(4)
    for now in (1.0, 2.0):
        record = unseal(forged(rng, REPLICA))
        load.see([record] if record is not None and misfit(layout.replica("f", "r0"), record) is None else [], now)
    assert all(isinstance(value, float) for value in load.take().values())
