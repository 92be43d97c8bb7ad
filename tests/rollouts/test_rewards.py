import math
from typing import Any

import numpy as np
import pytest

from grpo_jax.config.schema import Reward as RewardConfig
from grpo_jax.errors import UsageError
from grpo_jax.rollouts.rewards import Completion, load_rewards, missing_packages, read_value, read_values


def config(name: str, **keys: Any) -> RewardConfig:
    return RewardConfig(source=f"tests.rollouts.toys:{name}", **keys)


def completion(text: str = "abc", prompt: Any = "p", answer: Any = 2) -> Completion:
    return Completion(text, [5, 6], prompt, answer, {"hint": 10}, "stop")


@pytest.mark.parametrize(
    ("answer", "value", "parts"),
    [
        (1, 1.0, None),
        (True, 1.0, None),
        (np.float32(0.5), 0.5, None),
        (None, None, None),
        (math.nan, None, None),
        ({"a": 1, "b": 2.5}, 3.5, {"a": 1.0, "b": 2.5}),
        ({"a": 1, "b": None}, None, {"a": 1.0, "b": None}),
        ({"reward": 0.5, "a": 1, "b": math.nan}, 0.5, {"a": 1.0, "b": None}),
        ({"reward": None, "a": 1}, None, {"a": 1.0}),
        ({}, None, {}),
    ],
)
def test_what_an_answer_means(answer: Any, value: float | None, parts: dict[str, Any] | None) -> None:
    found = read_value(answer)
    assert (found.value, found.parts, found.error) == (value, parts, None)


@pytest.mark.parametrize("answer", ["1.0", b"1", [1.0, 2.0], object(), math.inf, {"a": -math.inf}, {"reward": "high"}])
def test_what_is_no_reward_is_refused(answer: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        read_value(answer)


def test_a_batch_of_answers_has_one_for_each_completion() -> None:
    assert [v.value for v in read_values([1, None, {"a": 2}], 3)] == [1.0, None, 2.0]
    assert [v.value for v in read_values(np.array([1.0, 2.0]), 2)] == [1.0, 2.0]
    for bad in ([1.0], 1.0, "12", {"a": 1, "b": 2}, None):
        with pytest.raises((TypeError, ValueError)):
            read_values(bad, 2)


def test_a_reward_gets_the_completion_and_its_args() -> None:
    (reward,) = load_rewards([config("length", args={"scale": 0.5})])
    assert not reward.batched
    assert reward.call([completion()]) == 1.0


def test_a_trl_style_reward_gets_lists_in_trl_s_shapes() -> None:
    (reward,) = load_rewards([config("trl", args={"bonus": 100})])
    assert reward.batched
    assert reward.call([completion("abc"), completion("")]) == [3 + 2 + 10 + 100, 0 + 2 + 10 + 100]
    # A conversation's completion is a list of one message.
    chat = [{"role": "user", "content": "p"}]
    assert reward.call([completion("abc", prompt=chat)]) == [1 + 2 + 10 + 100]


def test_a_trl_style_reward_without_kwargs_gets_what_it_names() -> None:
    (reward,) = load_rewards([config("trl_few")])
    assert reward.call([completion()]) == [1.0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (config("missing"), "rewards.1.source: tests.rollouts.toys has no 'missing'"),
        (RewardConfig(source="no.such:thing"), "rewards.1.source: cannot import no.such"),
        (config("not_callable"), "rewards.1.source: tests.rollouts.toys:not_callable is not a function"),
        (config("length", args={"scael": 2}), "rewards.1.args: tests.rollouts.toys:length does not accept them"),
        (config("none_for"), "rewards.1.args: tests.rollouts.toys:none_for does not accept them"),
        (config("trl_few", args={"x": 1}), "rewards.1.args: tests.rollouts.toys:trl_few does not accept them"),
    ],
)
def test_a_wrong_source_or_args_names_the_key(bad: RewardConfig, message: str) -> None:
    with pytest.raises(UsageError) as error:
        load_rewards([config("length"), bad])
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_group_level_reward_sees_all_completions_of_the_prompt() -> None:
    (reward,) = load_rewards([config("rank")])
    assert reward.batched
    group = [completion(answer=3), completion(answer=1)]
    assert [v.value for v in reward.read(reward.call(group), 2)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("<think>\nhm\n</think>\n\nIt is 4.", "hm", "It is 4."),
        ("hm</think>4", "hm", "4"),  # the chat template opened it
        ("<think>still", "still", ""),
        ("It is 4. ", None, "It is 4. "),
        ("a</think>b</think>c", "a", "b</think>c"),
        ("I <think> so", None, "I <think> so"),
        ("", None, ""),
    ],
)
def test_the_thinking_part_is_told_from_the_answer(text: str, thinking: str | None, answer: str) -> None:
    found = completion(text)
    assert (found.thinking, found.answer_text) == (thinking, answer)


def test_modules_that_a_reward_needs_and_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rollouts.toys.length.requires", ("json", "no_such_module"), raising=False)
    rewards = load_rewards([config("rank"), config("length")])
    assert missing_packages(rewards) == [
        "rewards.1.source: tests.rollouts.toys:length needs the Python module no_such_module, which is not installed"
    ]
