from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.config.schema import Task
from grpo_jax.errors import UsageError
from grpo_jax.rollouts.tasks import Problem, load_task, messages, problem_at


def only_train() -> list[Problem]:
    return [Problem("a", "x")]


def empty() -> dict[str, list[Problem]]:
    return {"train": []}


def no_train() -> dict[str, list[Problem]]:
    return {"eval": [Problem("a", "x")]}


def task(name: str, **keys: Any) -> Task:
    return Task(source=f"tests.rollouts.test_tasks:{name}", **keys)


def test_a_task_may_return_its_training_split_alone() -> None:
    assert load_task(task("only_train")) == {"train": [Problem("a", "x")]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (task("empty"), "task.source: .* no problems in its split 'train'"),
        (task("no_train"), "task.source: .* no problems in its split 'train'"),
        (task("missing"), "task.source: tests.rollouts.test_tasks has no 'missing'"),
        (task("only_train", args={"size": 3}), "task.args: .* does not accept them"),
        (Task(source="no.such:task"), "task.source: cannot import no.such"),
    ],
)
def test_a_task_that_cannot_be_used_names_its_key(config: Task, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_task(config)


def test_a_text_is_a_user_message_and_the_system_prompt_comes_first() -> None:
    assert messages(Problem("a", "x"), task("only_train", system_prompt="be brief")) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "x"},
    ]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    assert messages(Problem("a", chat), task("only_train")) == chat


@given(st.integers(1, 30), st.integers(0, 2**40), st.integers(0, 5))
def test_each_epoch_visits_every_problem_once(size: int, seed: int, epoch: int) -> None:
    problems = [Problem(str(i), "x") for i in range(size)]
    found = [problem_at(problems, seed, epoch * size + place) for place in range(size)]
    assert {e for e, _ in found} == {epoch}
    assert sorted(int(problem.id) for _, problem in found) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    problems = [Problem(str(i), "x") for i in range(30)]

    def order(seed: int, epoch: int) -> list[str]:
        return [problem_at(problems, seed, epoch * 30 + i)[1].id for i in range(30)]

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1)]
    assert len({tuple(o) for o in orders}) == 4
    assert order(0, 0) == orders[0]


def worked() -> dict[str, list[Problem]]:
    numbers = [Problem(f"p{i}", f"{i}+1=?", i + 1, {"solution": f"it is {i + 1}"}) for i in range(4)]
    return {"train": numbers, "eval": [Problem("e", "7+1=?", 8), Problem("p1", "1+1=?", 2)]}


def conversations() -> list[Problem]:
    return [Problem("a", [{"role": "user", "content": "x"}])]


def offline_aware(offline: bool = False) -> list[Problem]:
    return [Problem("offline" if offline else "online", "x")]


def chat(problem: Problem, config: Task) -> str:
    return " ".join(message["content"] for message in messages(problem, config))


def test_pairs_come_before_every_question_as_turns() -> None:
    pairs = [{"question": "q1", "answer": "a1"}, {"question": "q2", "answer": "a2"}]
    config = task("worked", system_prompt="s", few_shot={"pairs": pairs})
    splits = load_task(config)
    assert messages(splits["eval"][0], config) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "a2"},
        {"role": "user", "content": "7+1=?"},
    ]
    first = task("worked", few_shot={"pairs": pairs, "count": 1})
    assert chat(load_task(first)["eval"][0], first) == "q1 a1 7+1=?"


def test_what_a_reward_is_given_has_no_examples_in_it() -> None:
    config = task("worked", few_shot={"split": "train", "count": 1})
    assert load_task(config)["eval"][0].prompt == "7+1=?"


def test_a_problem_is_never_its_own_example() -> None:
    config = task("worked", few_shot={"split": "train", "count": 2})
    splits = load_task(config)
    assert [chat(problem, config) for problem in splits["train"]] == [
        "1+1=? 2 2+1=? 3 0+1=?",
        "0+1=? 1 2+1=? 3 1+1=?",
        "0+1=? 1 1+1=? 2 2+1=?",
        "0+1=? 1 1+1=? 2 3+1=?",
    ]
    assert chat(splits["eval"][1], config) == "0+1=? 1 2+1=? 3 1+1=?"
    assert splits["train"][-1] == splits["train"][3]
    assert splits["train"][1:3] == [splits["train"][1], splits["train"][2]]
    assert len(splits["train"]) == len(list(splits["train"])) == 4


def test_examples_may_show_a_column_of_the_metadata() -> None:
    config = task("worked", few_shot={"split": "train", "count": 1, "answer": "solution"})
    assert chat(load_task(config)["eval"][0], config) == "0+1=? it is 1 7+1=?"


def test_a_conversation_s_own_system_message_stays_in_front_of_the_examples() -> None:
    problem = Problem(
        "a",
        [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}],
        examples=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
    )
    assert chat(problem, task("only_train", system_prompt="first")) == "first s q a x"


@pytest.mark.parametrize(
    ("name", "few_shot", "message"),
    [
        ("worked", {"split": "shots", "count": 1}, r"^task\.few_shot\.split: the task has no split 'shots'"),
        ("worked", {"split": "train", "count": 9}, r"^task\.few_shot\.count: 9 examples are wanted, 'train' has 4"),
        ("worked", {"split": "train", "count": 1, "answer": "why"}, r"^task\.few_shot\.answer: .*'p0' has no 'why'"),
        ("conversations", {"split": "train", "count": 1}, r"^task\.few_shot\.split: problem 'a' .* is a conversation"),
    ],
)
def test_examples_that_cannot_be_had_name_their_key(name: str, few_shot: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_task(task(name, few_shot=few_shot))


@pytest.mark.parametrize("few_shot", [{}, {"split": "train"}, {"split": "train", "count": 1, "pairs": [("q", "a")]}])
def test_examples_come_from_one_place(few_shot: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="few_shot"):
        task("worked", few_shot=few_shot)


def test_a_task_that_can_do_without_fetching_is_told_to() -> None:
    assert load_task(task("offline_aware"), offline=True)["train"][0].id == "offline"
    assert load_task(task("offline_aware"))["train"][0].id == "online"
    assert load_task(task("only_train"), offline=True)["train"][0].id == "a"
