"""When an agent thinks that its run is over."""

import asyncio
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


async def _after(seconds: float, watch: asyncio.Task) -> str | None:
    await asyncio.wait([watch], timeout=seconds)
    return watch.result() if watch.done() else None


def test_a_run_that_ends_under_our_eyes_is_over(run):
    async def body() -> None:
        writer = RecordWriter(run, layout.RUN, 1)
        writer.write(_record("running"))
        watch = asyncio.create_task(Observer(run, 60).watch())
        assert await _after(1.5, watch) is None
        writer.write(_record("failed"))
        assert await _after(10, watch) == "the run has failed"

    asyncio.run(body())


def test_the_end_of_an_earlier_life_counts_only_if_nobody_resumes_it(run, monkeypatch):
    async def body() -> None:
        monkeypatch.setattr(module, "_STALE_END_S", 2.0)
        RecordWriter(run, layout.RUN, 1).write(_record("finished"))
        watch = asyncio.create_task(Observer(run, 60).watch())
        assert await _after(0.5, watch) is None
        RecordWriter(run, layout.RUN, 2).write(_record("running"))
        assert await _after(4, watch) is None
        watch.cancel()
        watch = asyncio.create_task(Observer(run, 60).watch())
        RecordWriter(run, layout.RUN, 3).write(_record("finished"))
        assert await _after(10, watch) == "the run has finished"

    asyncio.run(body())


def test_nobody_there_is_silence(run):
    async def body() -> None:
        watch = asyncio.create_task(Observer(run, 1.0).watch())
        assert "silent" in str(await _after(10, watch))

    asyncio.run(body())


def test_a_learner_that_beats_is_not_silent(run):
    async def body() -> None:
        RecordWriter(run, layout.RUN, 1).write(_record("running"))
        state = RecordWriter(run, layout.LEARNER_STATE, 1)
        watch = asyncio.create_task(Observer(run, 2.5).watch())
        for step in range(6):
            state.write({"step": step})
            assert await _after(0.5, watch) is None
        assert "silent" in str(await _after(10, watch))

    asyncio.run(body())


def test_the_pointer_and_the_base_are_seen(run):
    async def body() -> None:
        RecordWriter(run, layout.RUN, 1).write(_record("running"))
        RecordWriter(run, layout.POLICY, 1).write({"run": "r", "current": "b", "window": ["b", "a"], "probe": "p"})
        observer = Observer(run, 60)
        await _after(2, watch := asyncio.create_task(observer.watch()))
        assert observer.wanted == Wanted("p", "b", ("b", "a"))
        assert observer.base_digest == "d"
        watch.cancel()

    asyncio.run(body())


def test_a_torn_record_changes_nothing(run):
    async def body() -> None:
        RecordWriter(run, layout.RUN, 1).write(_record("running"))
        watch = asyncio.create_task(Observer(run, 60).watch())
        await _after(1.5, watch)
        run.replace(layout.RUN, b'{"status": "finished"')
        assert await _after(2, watch) is None
        watch.cancel()

    asyncio.run(body())
