"""How and when a worker ends."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from grpo_jax.config.schema import Config
from grpo_jax.errors import RunFailed, UsageError
from grpo_jax.rollouts import worker
from grpo_jax.storage.spool import group_ids
from tests.rollouts.scripted import Reply, ScriptedProxy, eventually
from tests.rollouts.simulated import SimulatedLearner, on_a_run, record_of

MakeConfig = Callable[..., Config]
pytestmark = pytest.mark.usefixtures("quick")


def test_a_stop_does_not_wait_for_requests_or_rewards(make_config: MakeConfig) -> None:
    config = make_config(rewards=[{"source": "tests.rollouts.toys:hangs"}], rollouts={"reward_timeout_s": 1000.0})

    async def body(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        async def block_odd(request: dict[str, Any]) -> Reply | None:
            if len(proxy.requests) % 2:
                await asyncio.sleep(60)
            return None

        proxy.script = block_odd
        learning = asyncio.create_task(learner.run())
        stop = asyncio.Event()
        working = asyncio.create_task(worker.work(config, proxy.url, "w0", stop))
        await eventually(lambda: len(proxy.requests) == 4)
        stop.set()
        async with asyncio.timeout(10):
            assert await working == 75
        learning.cancel()

    on_a_run(config, body)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"evaluation": {"samples": 1}},
            "evaluation.split: tests.rollouts.toys:letters has no problems in a split 'eval'",
        ),
        ({"batch": {"row_tokens": 9}}, "batch.row_tokens: problem 'p0' of task tests.rollouts.toys:letters"),
        ({"rewards": [{"source": "tests.rollouts.toys:gone"}]}, "rewards.0.source: tests.rollouts.toys has no 'gone'"),
        (
            {"task": {"source": "tests.rollouts.toys:tools"}},
            "task.source: problem 'p0' of tests.rollouts.toys:tools is refused by the model's chat template: no tools",
        ),
        ({"task": {"source": "tests.rollouts.toys:gone"}}, "task.source: tests.rollouts.toys has no 'gone'"),
    ],
)
def test_a_config_that_cannot_work_is_refused_at_once(
    make_config: MakeConfig, changes: dict[str, Any], message: str
) -> None:
    config = make_config(**changes)

    async def body(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        with pytest.raises(UsageError) as error:
            await worker.work(config, proxy.url, "w0", asyncio.Event())
        assert str(error.value).startswith(message)

    on_a_run(config, body)


def test_a_prompt_that_does_not_fit_ends_the_worker_when_it_is_met(make_config: MakeConfig) -> None:
    config = make_config(task={"source": "tests.rollouts.toys:letters", "args": {"long": True}})

    async def body(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        learning = asyncio.create_task(learner.run())
        with pytest.raises(UsageError, match=r"problem 'endless' of task tests\.rollouts\.toys:letters"):
            await worker.work(config, proxy.url, "w0", asyncio.Event())
        learning.cancel()

    on_a_run(config, body)


def test_a_silent_learner_is_noticed(make_config: MakeConfig) -> None:
    config = make_config(fleet={"idle_exit_s": 2.0})

    async def body(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        learner.hold_at = 0
        learning = asyncio.create_task(learner.run())
        working = asyncio.create_task(worker.work(config, proxy.url, "w0", asyncio.Event()))
        await eventually(lambda: len(group_ids(learner.run_bucket)) == 4)
        learning.cancel()
        with pytest.raises(RunFailed, match=r"silent for more than fleet\.idle_exit_s = 2 s"):
            await working

    on_a_run(config, body)


def test_a_run_that_never_begins_is_noticed_too(make_config: MakeConfig) -> None:
    config = make_config(fleet={"idle_exit_s": 0.1})

    async def body(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        with pytest.raises(RunFailed, match="silent"):
            await worker.work(config, proxy.url, "w0", asyncio.Event())

    on_a_run(config, body)


def test_a_failed_run_ends_the_worker(make_config: MakeConfig) -> None:
    config = make_config(steps=50)

    async def body(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        learning = asyncio.create_task(learner.run())
        working = asyncio.create_task(worker.work(config, proxy.url, "w0", asyncio.Event()))
        await eventually(lambda: learner.step > 1)
        learning.cancel()
        learner.write_run("failed")
        assert await working == 0

    on_a_run(config, body)


def test_the_end_of_an_earlier_life_is_not_taken_for_the_end_of_this_one(make_config: MakeConfig) -> None:
    config = make_config(steps=2)

    async def body(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        learner.phase = "done"
        learner.write_state()
        learner.write_run("finished")
        working = asyncio.create_task(worker.work(config, proxy.url, "w0", asyncio.Event()))
        await asyncio.sleep(0.2)
        assert not working.done()
        second = SimulatedLearner(config, proxy, incarnation=2)
        await second.run()
        assert await working == 0
        assert second.indices == [0, 1, 2, 3]

    on_a_run(config, body)


def test_a_run_that_was_finished_long_ago_ends_the_worker(make_config: MakeConfig) -> None:
    config = make_config(fleet={"silent_s": 0.2})

    async def body(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        learner.phase = "done"
        learner.write_state()
        learner.write_run("finished")
        assert await worker.work(config, proxy.url, "w0", asyncio.Event()) == 0
        assert not proxy.requests

    on_a_run(config, body)


def test_a_run_in_which_nothing_can_be_scored_fails_and_says_why(make_config: MakeConfig) -> None:
    config = make_config(rewards=[{"source": "tests.rollouts.toys:none_always"}], rollouts={"max_redraws": 1})

    async def body(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        learning = asyncio.create_task(learner.run())
        with pytest.raises(RunFailed, match=r"8 problems in a row could not be scored; the last: 0 of 3 samples"):
            await worker.work(config, proxy.url, "w0", asyncio.Event())
        learning.cancel()
        assert record_of(learner)["phase"] == "running"

    on_a_run(config, body)
