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
