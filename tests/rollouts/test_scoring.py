import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_jax.config.schema import Reward as RewardConfig
from grpo_jax.rollouts import scoring
from grpo_jax.rollouts.rewards import Completion, load_rewards
from grpo_jax.rollouts.scoring import Score, Scorer
from tests.rollouts import toys


@pytest.fixture(autouse=True)
def let_hung_rewards_go() -> Iterator[None]:
    toys.release.clear()
    yield
    toys.release.set()


def score(*rewards: dict[str, Any], answers: tuple[Any, ...] = (1, 2), timeout_s: float = 30.0) -> list[Score]:
    configs = [RewardConfig(**{**keys, "source": f"tests.rollouts.toys:{keys['source']}"}) for keys in rewards]
    completions = [Completion("abc", [5, 6, 7], "p", answer, {"hint": 10}, "stop") for answer in answers]

    async def run() -> list[Score]:
        return await Scorer(load_rewards(configs), timeout_s).score(completions)

    return asyncio.run(run())


def test_the_reward_is_the_weighted_sum_and_each_part_is_recorded() -> None:
    scores = score(
        {"source": "length", "weight": 2.0, "args": {"scale": 0.5}},
        {"source": "asynchronous", "name": "right", "weight": -1.0},
        {"source": "parts"},
        {"source": "parts_with_reward", "name": "own"},
        {"source": "trl", "args": {"bonus": 0}, "weight": 0.1},
    )
    assert [s.reward for s in scores] == pytest.approx([3 - 1 + 3.5 + 0.5 + 1.4, 3 - 2 + 3.5 + 0.5 + 1.5])
    assert scores[1].parts == {
        "length": 1.5,
        "right": 2.0,
        "parts": 3.5,
        "parts/a": 1.0,
        "parts/b": 2.5,
        "own": 0.5,
        "own/a": 1.0,
        "own/unknown": None,
        "trl": 15.0,
    }
    assert scores[1].errors == ()


def test_none_from_a_reward_that_counts_is_not_scorable_and_not_zero() -> None:
    scores = score({"source": "length"}, {"source": "none_for", "args": {"problem": 2}})
    assert [s.reward for s in scores] == [4.0, None]
    assert scores[1].parts == {"length": 3.0, "none_for": None}


def test_a_reward_of_weight_zero_is_recorded_only() -> None:
    scores = score({"source": "length"}, {"source": "raises_for", "weight": 0.0, "args": {"problem": 2}})
    assert [s.reward for s in scores] == [3.0, 3.0]
    assert [s.parts["raises_for"] for s in scores] == [1.0, None]


def test_an_exception_costs_its_sample_and_is_shown_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    scores = score({"source": "raises_for", "args": {"problem": 2}}, answers=(1, 2, 2, 3))
    assert [s.reward for s in scores] == [1.0, None, None, 1.0]
    assert scores[1].errors == ("reward raises_for: ValueError('cannot score 2')",)
    (record,) = caplog.records
    assert "raises_for" in record.getMessage()
    assert record.exc_text is not None
    assert "toys.py" in record.exc_text


@pytest.mark.parametrize("name", ["hangs", "async_hangs"])
def test_a_timeout_costs_its_sample(name: str) -> None:
    scores = score({"source": "length"}, {"source": name}, timeout_s=0.05)
    assert [s.reward for s in scores] == [None, None]
    assert all("rollouts.reward_timeout_s = 0.05" in s.errors[0] for s in scores)


@pytest.mark.parametrize("name", ["exits", "async_exits", "cancels_itself"])
def test_a_reward_cannot_end_the_worker(name: str) -> None:
    scores = score({"source": name})
    assert [s.reward for s in scores] == [None, None]
    assert all(len(s.errors) == 1 for s in scores)


def test_a_batched_reward_that_answers_wrongly_costs_all_its_samples() -> None:
    scores = score({"source": "trl_few"})
    assert [s.reward for s in scores] == [None, None]
    assert all("1 values for 2 completions" in s.errors[0] for s in scores)


def test_a_slow_sync_reward_does_not_block_the_event_loop() -> None:
    async def run() -> list[Score]:
        scorer = Scorer(load_rewards([RewardConfig(source="tests.rollouts.toys:hangs")]), 30.0)
        scoring_it = asyncio.create_task(scorer.score([Completion("a", [1], "p", 0, {}, "stop")]))
        # The reward waits for what the loop does next.
        await asyncio.sleep(0.02)
        assert not scoring_it.done()
        toys.release.set()
        return await scoring_it

    assert [s.reward for s in asyncio.run(run())] == [0.0]


def test_rewards_that_hang_do_not_use_up_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_MAX_THREADS", 2)

    async def run() -> list[Score]:
        rewards = load_rewards([RewardConfig(source="tests.rollouts.toys:hangs")])
        completions = [Completion("a", [1], "p", 0, {}, "stop")] * 6
        scorer = Scorer(rewards, 0.05)
        assert [s.reward for s in await scorer.score(completions)] == [None] * 6
        toys.release.set()
        scorer._timeout_s = 30.0
        return await scorer.score(completions)

    assert [s.reward for s in asyncio.run(run())] == [0.0] * 6


def test_cancelling_the_scoring_cancels_it_and_is_no_failure_of_the_reward(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        scorer = Scorer(load_rewards([RewardConfig(source="tests.rollouts.toys:async_hangs")]), 30.0)
        task = asyncio.create_task(scorer.score([Completion("a", [1], "p", 0, {}, "stop")]))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert not caplog.records


def test_a_reward_may_have_a_time_of_its_own() -> None:
    scores = score(
        {"source": "length"}, {"source": "hangs", "timeout_s": 0.05}, {"source": "async_hangs", "timeout_s": 0.05}
    )
    assert [s.parts["length"] for s in scores] == [3.0, 3.0]
    assert "timeout_s of the reward hangs = 0.05 s" in scores[0].errors[0]
    assert "timeout_s of the reward async_hangs = 0.05 s" in scores[0].errors[1]
    assert scores[0].seconds["hangs"] >= 0.05


def test_a_group_level_reward_is_called_once_for_a_prompt() -> None:
    scores = score({"source": "rank"}, answers=(5, 3, 4))
    assert [s.reward for s in scores] == [2.0, 0.0, 1.0]
