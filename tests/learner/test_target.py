import pytest

from grpo_jax.config.schema import StopAtReward
from grpo_jax.learner.target import RewardTarget


def fed(target: RewardTarget, rewards: list[float | None]) -> list[bool]:
    seen = []
    for reward in rewards:
        target.add(reward)
        seen.append(target.reached)
    return seen


def test_the_mean_of_the_last_steps_must_reach_it() -> None:
    assert fed(RewardTarget(StopAtReward(value=0.5, steps=2)), [1.0, 0.0, 0.4, 0.6]) == [False, True, False, True]


def test_one_good_step_is_not_enough_while_there_are_too_few() -> None:
    assert fed(RewardTarget(StopAtReward(value=0.1, steps=3)), [1.0, 1.0]) == [False, False]


def test_a_step_without_a_reward_begins_anew() -> None:
    assert fed(RewardTarget(StopAtReward(value=0.5, steps=2)), [1.0, None, 1.0, 1.0]) == [False, False, False, True]


def test_nothing_ends_a_run_that_has_no_target() -> None:
    assert fed(RewardTarget(None), [1e9] * 10) == [False] * 10


@pytest.mark.parametrize("cut", range(4))
def test_a_resume_sees_what_the_first_life_saw(cut: int) -> None:
    config, rewards = StopAtReward(value=0.5, steps=3), [0.2, 0.4, 0.9, 0.1]
    whole = RewardTarget(config)
    expected = fed(whole, list(rewards))
    resumed = RewardTarget(config, [{"step": i, "reward": r} for i, r in enumerate(rewards[:cut])])
    assert fed(resumed, list(rewards[cut:])) == expected[cut:]
