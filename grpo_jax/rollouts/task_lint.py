"""What is wrong with a task's problems, found before a run finds it: counted, with one example of each kind."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_jax.config.schema import Config
from grpo_jax.rollouts.rewards import Reward, load_rewards, missing_packages
from grpo_jax.rollouts.tasks import NotHere, Problem, Splits, load_task, messages, prompt_tokens

# Of each split, so that a check of a large data set ends. The first ones are looked at.
_MAX_PROBLEMS = 100_000
_MAX_TOKENISED = 20_000


@dataclass(frozen=True)
class Finding:
    """One kind of fault. `is_error`: the run would stop at it, or learn nothing from it."""

    is_error: bool
    what: str
    count: int
    example: str


def lint_task(config: Config, tokenizer: Any | None, splits: Splits | None = None) -> list[Finding]:
    """Looks at all problems, the gravest findings first.

    Args:
      tokenizer: the model's; None leaves the lengths of prompts unchecked.
      splits: the task's, if they are loaded already. Loaded here they are only if nothing has to be fetched for them;
        otherwise there is nothing to look at.
    """
    rewards = load_rewards(config.rewards)
    if splits is None:
        try:
            splits = load_task(config.task, offline=True)
        except NotHere:
            splits = {}
    lint = _Lint(config, tokenizer, rewards)
    for name, problems in splits.items():
        lint.look_at(name, problems)
    lint.compare_splits(config.evaluation.split)
    missing = [Finding(False, "modules of rewards are missing", 1, said) for said in missing_packages(rewards)]
    return sorted([*lint.findings(), *missing], key=lambda finding: not finding.is_error)


class _Lint:
    def __init__(self, config: Config, tokenizer: Any | None, rewards: Sequence[Reward]):
        self._config, self._tokenizer = config, tokenizer
        self._checks: list[tuple[str, Callable[[Any], str | None]]] = [
            (reward.label, check) for reward in rewards if (check := getattr(reward.function, "check_answer", None))
        ]
        self._rows = config.batch.row_tokens
        self._prompts: dict[str, dict[str, str]] = {}  # split → prompt → id of the first problem with it
        self._found: dict[tuple[bool, str], tuple[int, str]] = {}  # (is_error, what) → count, first example

    def look_at(self, split: str, problems: Sequence[Problem]) -> None:
        prompts = self._prompts[split] = {}
        ids: set[str] = set()
        for place, problem in enumerate(_first(problems, _MAX_PROBLEMS)):
            where = f"{problem.id!r} of {split!r}"
            if _is_empty(problem):
                self._add(True, "problems have an empty prompt", where)
                continue
            if str(problem.id) in ids:
                self._add(False, "problems have the id of another", where)
            ids.add(str(problem.id))
            key = json.dumps(messages(problem, self._config.task), default=str)
            if key in prompts:
                self._add(False, "problems have the prompt of another", f"{where}, as {prompts[key]!r}")
            prompts.setdefault(key, str(problem.id))
            if self._tokenizer is not None and place < _MAX_TOKENISED:
                self._look_at_length(problem, where)
            for label, check in self._checks:
                self._look_at_answer(label, check, problem, where)

    def compare_splits(self, evaluated: str) -> None:
        train, held_out = self._prompts.get("train", {}), self._prompts.get(evaluated, {})
        if evaluated != "train":
            for key in held_out:
                if key in train:
                    what = f"problems of {evaluated!r} are in 'train', too"
                    self._add(False, what, f"{held_out[key]!r}, there {train[key]!r}")

    def findings(self) -> Iterator[Finding]:
        for (is_error, what), (count, example) in self._found.items():
            yield Finding(is_error, what, count, example)

    def _look_at_length(self, problem: Problem, where: str) -> None:
        try:
            length = len(prompt_tokens(problem, self._config.task, self._tokenizer))
        except Exception as error:  # a chat template raises what it likes
            self._add(True, "prompts are refused by the model's chat template", f"{where}: {error!s:.200}")
            return
        new, model = self._config.sampling.max_tokens, getattr(self._tokenizer, "model_max_length", self._rows)
        if length + new > self._rows and self._config.task.drop_overlong:
            return
        if length + new > min(self._rows, model):
            limit = f"batch.row_tokens = {self._rows}" if self._rows <= model else f"the model's length {model}"
            self._add(True, f"prompts with sampling.max_tokens = {new} are longer than {limit}", f"{where}: {length}")

    def _look_at_answer(self, label: str, check: Callable[[Any], str | None], problem: Problem, where: str) -> None:
        try:
            complaint = check(problem.answer)
        except Exception as error:
            complaint = repr(error)
        if complaint is not None:
            self._add(False, f"answers cannot be read by the reward {label}", f"{where}: {complaint:.200}")

    def _add(self, is_error: bool, what: str, example: str) -> None:
        count, first = self._found.get((is_error, what), (0, example))
        self._found[is_error, what] = (count + 1, first)


def _first(problems: Sequence[Problem], count: int) -> Iterator[Problem]:
    return (problems[i] for i in range(min(len(problems), count)))


def _is_empty(problem: Problem) -> bool:
    if isinstance(problem.prompt, str):
        return not problem.prompt.strip()
    asked = [message for message in problem.prompt if message.get("role") != "system"]
    return not any(str(message.get("content") or "").strip() for message in asked)
