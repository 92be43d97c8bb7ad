"""Rewards in processes of their own: real ones, spawned; what they do to themselves costs a sample, no more."""

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from grpo_jax.config.schema import Reward as RewardConfig
from grpo_jax.rollouts.rewards import Completion, load_rewards
from grpo_jax.rollouts.scoring import Score, Scorer


def pooled(name: str, processes: int = 1, **keys: Any) -> RewardConfig:
    return RewardConfig(source=f"tests.rollouts.toys:{name}", processes=processes, **keys)


async def score(scorer: Scorer, *answers: Any) -> list[Score]:
    return await scorer.score([Completion("abc", [5, 6, 7], "p", answer, {"hint": 10}, "stop") for answer in answers])


def run(config: RewardConfig, *calls: Sequence[Any]) -> list[list[Score]]:
    """The scores of calls one after another, by one scorer."""

    async def all_calls() -> list[list[Score]]:
        scorer = Scorer(load_rewards([config]), 60.0)
        try:
            return [await score(scorer, *answers) for answers in calls]
        finally:
            scorer.close()

    return asyncio.run(all_calls())


def test_every_signature_works_in_a_process() -> None:
    configs = [
        pooled("length", args={"scale": 0.5}),
        pooled("asynchronous"),
        pooled("trl", args={"bonus": 0}),
        pooled("rank"),
        pooled("parts_with_reward"),
    ]

    async def all_at_once() -> list[Score]:
        scorer = Scorer(load_rewards(configs), 60.0)
        try:
            return await score(scorer, 1, 2)
        finally:
            scorer.close()

    first, second = asyncio.run(all_at_once())
    assert first.parts == {
        "length": 1.5,
        "asynchronous": 1.0,
        "trl": 14.0,
        "rank": 0.0,
        "parts_with_reward": 0.5,
        "parts_with_reward/a": 1.0,
        "parts_with_reward/unknown": None,
    }
    assert second.parts["rank"] == 1.0
    assert first.errors == second.errors == ()


def test_a_process_is_another_and_serves_many_calls() -> None:
    first, second = run(pooled("process_id"), [1], [1])
    assert first[0].reward == second[0].reward
    assert first[0].reward != os.getpid()


def test_as_many_calls_as_processes_run_at_one_time() -> None:
    ((a, b),) = run(pooled("waits_for_another", processes=2), [0, 1])
    assert (a.reward, b.reward) == (1.0, 1.0)


def test_a_hung_reward_is_killed_and_the_next_call_has_a_new_process() -> None:
    hung, after = run(pooled("spins_for", args={"problem": 1}, timeout_s=0.5), [1], [2])
    assert hung[0].errors == (
        "reward spins_for: TimeoutError('no answer within timeout_s of the reward spins_for = 0.5 s')",
    )
    pid = after[0].reward
    assert pid is not None
    for thread in threading.enumerate():
        if thread.name == "_exchange":  # waits for an answer of the process; its death is one
            thread.join(30)
            assert not thread.is_alive()
    assert hung[0].seconds["spins_for"] >= 0.5


def test_a_process_that_dies_costs_its_sample_and_is_replaced() -> None:
    dead, after = run(pooled("dies_for", args={"problem": 1}), [1], [2])
    assert "ended with exit code 3" in dead[0].errors[0]
    assert after[0].reward == 1.0


def test_an_exception_is_the_original_s_with_its_traceback_and_the_process_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = pooled("raises_or_process_id", args={"problem": 1})
    before, failed, after = run(config, [2], [1], [2])
    assert failed[0].errors == ("reward raises_or_process_id: ValueError('cannot score 1')",)
    assert before[0].reward == after[0].reward
    (record,) = caplog.records
    assert record.exc_text is not None
    assert "in raises_or_process_id" in record.exc_text


def test_leaving_and_answering_wrongly_are_failures_of_the_reward() -> None:
    assert "SystemExit(3)" in run(pooled("exits"), [1])[0][0].errors[0]
    assert "1 values for 2 completions" in run(pooled("trl_few"), [1, 2])[0][0].errors[0]


def test_what_cannot_be_sent_to_a_process_costs_its_sample() -> None:
    failed, after = run(pooled("length"), [lambda: 0], [1])
    assert failed[0].reward is None
    assert "pickle" in failed[0].errors[0].lower()
    assert after[0].reward == 3.0


def test_a_busy_reward_does_not_hold_the_loop() -> None:
    async def ticks() -> int:
        scorer = Scorer(load_rewards([pooled("matches_for_ever", timeout_s=2.0)]), 60.0)
        task, count = asyncio.create_task(score(scorer, 1)), 0
        while not task.done():
            await asyncio.sleep(0.01)
            count += 1
        assert "no answer within" in task.result()[0].errors[0]
        scorer.close()
        return count

    assert asyncio.run(ticks()) > 10  # in a thread, the pattern would hold the interpreter's lock


def test_the_processes_end_with_their_scorer_and_with_whoever_waits() -> None:
    async def cancelled() -> None:
        scorer = Scorer(load_rewards([pooled("process_id"), pooled("hangs")]), 60.0)
        task = asyncio.create_task(score(scorer, 1))
        while not scorer._pools["process_id"]._idle:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        scorer.close()

    asyncio.run(cancelled())
    for child in multiprocessing.active_children():
        child.join(30)
    assert not multiprocessing.active_children()
