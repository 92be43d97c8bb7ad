"""When an agent thinks that its run is over."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from grpo_jax.generator import observer as module
from grpo_jax.generator.observer import Observer
from grpo_jax.generator.policies import Wanted
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter


@pytest.fixture
def run(tmp_path: Path) -> Bucket:
    return Bucket(str(tmp_path)).child("r")


def _record(status: str) -> dict:
    return {"run": "r", "status": status, "base": {"digest": "d"}}


@contextlib.asynccontextmanager
async def _watching(run: Bucket) -> AsyncIterator[Observer]:
    observer = Observer(run)
    watch = asyncio.create_task(observer.watch())
    yield observer
    assert not watch.done()
    watch.cancel()


async def _within(seconds: float, observer: Observer) -> str | None:
    """Why the run is over, as soon as it is."""
    deadline = time.monotonic() + seconds
    while observer.over is None and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return observer.over


def test_a_run_that_ends_under_our_eyes_is_over_until_a_learner_takes_it_back(run):
    async def body() -> None:
        writer = RecordWriter(run, layout.RUN, 1)
        writer.write(_record("running"))
        async with _watching(run) as observer:
            assert await _within(1.5, observer) is None
            writer.write(_record("finished"))
            assert await _within(10, observer) == "the run has finished"
            RecordWriter(run, layout.RUN, 2).write(_record("running"))
            deadline = time.monotonic() + 10
            while observer.over is not None:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    asyncio.run(body())


def test_a_failure_counts_once_nobody_has_started_the_learner_again(run, monkeypatch):
    async def body() -> None:
        monkeypatch.setattr(module, "_STALE_END_S", 2.0)
        writer, state = RecordWriter(run, layout.RUN, 1), RecordWriter(run, layout.LEARNER_STATE, 2)
        writer.write(_record("running"))
        async with _watching(run) as observer:
            assert await _within(1.5, observer) is None
            writer.write(_record("failed"))
            for beat in range(8):  # the next life loads its model; that it runs the record says much later
                state.write({"step": 0, "phase": "starting", "beat": beat})
                assert await _within(0.5, observer) is None
            assert await _within(10, observer) == "the run has failed"

    asyncio.run(body())


def test_the_end_of_an_earlier_life_counts_only_if_nobody_resumes_it(run, monkeypatch):
    async def body() -> None:
        monkeypatch.setattr(module, "_STALE_END_S", 2.0)
        RecordWriter(run, layout.RUN, 1).write(_record("finished"))
        async with _watching(run) as observer:
            assert await _within(0.5, observer) is None
            RecordWriter(run, layout.RUN, 2).write(_record("running"))
            assert await _within(4, observer) is None
        async with _watching(run) as observer:
            RecordWriter(run, layout.RUN, 3).write(_record("finished"))
            assert await _within(10, observer) == "the run has finished"

    asyncio.run(body())


def test_a_learner_that_beats_is_not_silent(run):
    async def body() -> None:
        RecordWriter(run, layout.RUN, 1).write(_record("running"))
        state = RecordWriter(run, layout.LEARNER_STATE, 1)
        async with _watching(run) as observer:
            for step in range(6):
                state.write({"step": step})
                await asyncio.sleep(0.5)
                assert observer.silent_s < 2.5
            await asyncio.sleep(2.5)
            assert observer.silent_s > 2.0

    asyncio.run(body())


def test_the_pointer_and_the_base_are_seen(run):
    async def body() -> None:
        RecordWriter(run, layout.RUN, 1).write(_record("running"))
        RecordWriter(run, layout.POLICY, 1).write({"run": "r", "current": "b", "window": ["b", "a"], "probe": "p"})
        async with _watching(run) as observer:
            await asyncio.sleep(2)
            assert observer.wanted == Wanted("p", "b", ("b", "a"))
            assert observer.base_digest == "d"

    asyncio.run(body())


def test_a_torn_record_changes_nothing(run):
    async def body() -> None:
        RecordWriter(run, layout.RUN, 1).write(_record("running"))
        async with _watching(run) as observer:
            await asyncio.sleep(1.5)
            run.replace(layout.RUN, b'{"status": "finished"')
            assert await _within(2, observer) is None

    asyncio.run(body())


def test_the_less_a_run_has_to_say_the_less_often_it_is_asked(run, monkeypatch):
    """Of many that have not begun only a few in a second are asked of a bucket that is not on this machine."""

    async def body() -> None:
        reads = []
        monkeypatch.setattr(Bucket, "read_or_none", lambda self, key, *limits: reads.append(key))
        monkeypatch.setattr(Bucket, "read", lambda self, key, *limits, size=0: reads.append(key))
        runs = [run.child(str(i)) for i in range(40)]
        for each in runs:
            each.is_local = False
        observers = [Observer(each, 40) for each in runs]
        tasks = [asyncio.create_task(observer.watch()) for observer in observers]
        await asyncio.sleep(3)
        for task in tasks:
            task.cancel()
        assert len(reads) <= 40 + 3 * 40 / 10

    asyncio.run(body())
