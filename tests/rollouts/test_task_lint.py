"""What `check` says of a task's problems."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.rollouts.rewards import Completion
from grpo_jax.rollouts.setup import load_plugins
from grpo_jax.rollouts.task_lint import Finding, lint_task
from grpo_jax.rollouts.tasks import NotHere, Problem
from grpo_jax.rollouts.tokenizer import load_tokenizer

CONVERSATION = [{"role": "user", "content": "word1"}, {"role": "assistant", "content": "word2"}]


def sound() -> dict[str, list[Problem]]:
    return {
        "train": [Problem("a", "word1", 1), Problem("b", CONVERSATION, 2)],
        "eval": [Problem("a", "word2", 3)],  # ids count within a split
        "spare": [Problem("a", "word1", 1)],  # of no concern: nobody evaluates it
    }


def faulty() -> dict[str, list[Problem]]:
    return {
        "train": [
            Problem("a", "word1", 1),
            Problem("a", "word2", 2),
            Problem("c", "word1", "three"),
            Problem("d", " \n", 4),
            Problem("e", [{"role": "system", "content": "word3"}, {"role": "user", "content": ""}], 5),
            Problem("f", "word1 " * 60, 6),
            Problem("g", [{"role": "tool", "content": "word1"}], 7),
        ],
        "eval": [Problem("x", "word2", 8), Problem("y", "word1", None)],
    }


def not_here(offline: bool = False) -> list[Problem]:
    if offline:
        raise NotHere("task.args.name: it is not in the cache")
    raise AssertionError("a lint fetches nothing")


def number(completion: Completion) -> float:
    return 1.0


def _complaint(answer: Any) -> str | None:
    return None if isinstance(answer, int) else f"{answer!r} is no number"


number.check_answer = _complaint  # type: ignore[attr-defined]
number.requires = ("json", "no_such_module")  # type: ignore[attr-defined]


@pytest.fixture
def lint(make_config: Callable[..., Config], model_dir: Path) -> Callable[..., dict[str, Finding]]:
    own = load_tokenizer(model_dir)

    def run(task: str, tokenizer: Any = own, few_shot: Any = None, **changes: Any) -> dict[str, Finding]:
        config = make_config(task={"source": f"{__name__}:{task}", "few_shot": few_shot}, **changes)
        return {finding.what: finding for finding in lint_task(config, tokenizer)}

    return run


def test_nothing_is_found_in_a_sound_task(lint: Callable[..., dict[str, Finding]]) -> None:
    assert lint("sound") == {}


def test_each_kind_of_fault_is_counted_with_an_example(lint: Callable[..., dict[str, Finding]]) -> None:
    rewards = [{"source": f"{__name__}:number"}]
    found = lint("faulty", rewards=rewards)
    facts = {what: (finding.is_error, finding.count, finding.example) for what, finding in found.items()}
    assert facts == {
        "problems have an empty prompt": (True, 2, "'d' of 'train'"),
        "prompts with sampling.max_tokens = 5 are longer than batch.row_tokens = 64": (True, 1, "'f' of 'train': 63"),
        "prompts are refused by the model's chat template": (True, 1, "'g' of 'train': no tools"),
        "problems have the id of another": (False, 1, "'a' of 'train'"),
        "problems have the prompt of another": (False, 1, "'c' of 'train', as 'a'"),
        "answers cannot be read by the reward number": (False, 2, "'c' of 'train': 'three' is no number"),
        "problems of 'eval' are in 'train', too": (False, 2, "'x', there 'a'"),
        "modules of rewards are missing": (
            False,
            1,
            f"rewards.0.source: {__name__}:number needs the Python module no_such_module, which is not installed",
        ),
    }
    errors = [finding.is_error for finding in found.values()]
    assert errors == sorted(errors, reverse=True)


def test_a_model_shorter_than_a_row_is_the_limit(lint: Callable[..., dict[str, Finding]], model_dir: Path) -> None:
    tokenizer = load_tokenizer(model_dir)
    tokenizer.model_max_length = 11
    (finding,) = lint("sound", tokenizer).values()
    assert finding.is_error
    assert finding.what == "prompts with sampling.max_tokens = 5 are longer than the model's length 11"


def test_without_a_tokenizer_lengths_are_left_out(lint: Callable[..., dict[str, Finding]]) -> None:
    assert not [what for what in lint("faulty", None) if "longer" in what or "template" in what]


def test_what_would_have_to_be_fetched_is_not_looked_at(lint: Callable[..., dict[str, Finding]]) -> None:
    assert lint("not_here") == {}


def test_a_worker_does_not_start_without_a_module_of_its_rewards(make_config: Callable[..., Config]) -> None:
    with pytest.raises(UsageError, match=r"^rewards\.0\.source: .* needs the Python module no_such_module"):
        load_plugins(make_config(rewards=[{"source": f"{__name__}:number"}]))


def test_few_shot_examples_count_towards_the_length(lint: Callable[..., dict[str, Finding]]) -> None:
    pairs = [{"question": "word1 " * 52, "answer": "word2"}]
    (finding,) = lint("sound", few_shot={"pairs": pairs}).values()
    assert (finding.is_error, finding.count) == (True, 4)
