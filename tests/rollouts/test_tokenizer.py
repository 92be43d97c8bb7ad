import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.rollouts.tasks import Problem
from grpo_jax.rollouts.tokenizer import Prompts, fitting, load_tokenizer
from tests.rollouts.conftest import WORDS


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Any:
    return load_tokenizer(model_dir)


def words(tokens: tuple[int, ...]) -> str:
    return " ".join(WORDS[token] for token in tokens)


def test_a_prompt_is_the_chat_template_s_with_the_generation_prompt(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    prompts = Prompts(make_config(), tokenizer)
    assert words(prompts.tokens(Problem("a", "word1 ?"))) == "<user> word1 ? <eos> <assistant>"


def test_messages_and_system_prompt_go_through_the_template(make_config: Callable[..., Config], tokenizer: Any) -> None:
    config = make_config(task={"source": "tests.rollouts.toys:letters", "system_prompt": "word9"})
    chat = [{"role": "user", "content": "word1"}, {"role": "assistant", "content": "word2"}]
    found = words(Prompts(config, tokenizer).tokens(Problem("a", chat)))
    assert found == "<system> word9 <eos> <user> word1 <eos> <assistant> word2 <eos> <assistant>"


def test_equal_ids_with_different_prompts_are_not_mixed_up(make_config: Callable[..., Config], tokenizer: Any) -> None:
    prompts = Prompts(make_config(), tokenizer)
    assert prompts.tokens(Problem("a", "word1")) != prompts.tokens(Problem("a", "word2"))
    assert prompts.tokens(Problem("a", "word1")) is prompts.tokens(Problem("b", "word1"))


def test_examples_are_turns_of_the_chat_and_part_of_what_is_remembered(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    prompts = Prompts(make_config(), tokenizer)
    turns = [{"role": "user", "content": "word2 ?"}, {"role": "assistant", "content": "word3"}]
    with_examples, without = Problem("a", "word1 ?", examples=turns), Problem("a", "word1 ?")
    assert words(prompts.tokens(with_examples)) == (
        "<user> word2 ? <eos> <assistant> word3 <eos> <user> word1 ? <eos> <assistant>"
    )
    assert words(prompts.tokens(without)) == "<user> word1 ? <eos> <assistant>"


@pytest.mark.parametrize(("row_tokens", "fits"), [(10, True), (9, False)])
def test_a_prompt_that_does_not_fit_with_its_completion_names_task_and_problem(
    make_config: Callable[..., Config], tokenizer: Any, row_tokens: int, fits: bool
) -> None:
    config = make_config(batch={"row_tokens": row_tokens})
    prompts = Prompts(config, tokenizer)
    problem = Problem("p7", "word1 ?")  # 5 tokens; max_tokens is 5
    if fits:
        assert len(prompts.tokens(problem)) == 5
        return
    with pytest.raises(UsageError) as error:
        prompts.tokens(problem)
    message = str(error.value)
    assert message.startswith("batch.row_tokens: problem 'p7' of task tests.rollouts.toys:letters")
    assert "5 tokens" in message


def test_a_directory_without_a_tokenizer_is_refused_and_one_without_a_template_needs_the_configs(
    make_config: Callable[..., Config], model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"^model\.source: there is no tokenizer\.json"):
        load_tokenizer(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"^model\.source: no tokenizer can be loaded"):
        load_tokenizer(broken)
    bare = tmp_path / "bare"
    shutil.copytree(model_dir, bare)
    (bare / "chat_template.jinja").unlink()
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(bare)
    with pytest.raises(UsageError, match="no chat template"):
        Prompts(make_config(), tokenizer)
    given = {"chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}"}
    task = {"source": "tests.rollouts.toys:letters", "chat_template_kwargs": given}
    assert Prompts(make_config(task=task), tokenizer).tokens(Problem("p0", "word1 ?")) == (
        *tokenizer.encode("word1 ?", add_special_tokens=False),
    )


def test_overlong_problems_are_left_out_on_demand(make_config: Callable[..., Config], tokenizer: Any) -> None:
    problems = [Problem("a", "word1 ?"), Problem("b", "word1 " * 60), Problem("c", "word2 ?")]
    splits = {"train": problems, "eval": problems[1:2]}

    def left(**changes: Any) -> dict[str, list[str]]:
        task = {"source": "tests.rollouts.toys:letters", **changes}
        found = fitting(splits, make_config(task=task, batch={"row_tokens": 64}), tokenizer)
        return {name: [problem.id for problem in kept] for name, kept in found.items()}

    assert left() == {"train": ["a", "b", "c"], "eval": ["b"]}
    assert left(drop_overlong=True) == {"train": ["a", "c"], "eval": []}
    splits["train"] = problems[1:2]
    with pytest.raises(UsageError, match=r"^task\.drop_overlong: no problem"):
        left(drop_overlong=True)
