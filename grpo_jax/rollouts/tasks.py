"""A task: indexable sources of problems, one per split, and the tokens that the model is prompted with."""

import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np

from grpo_jax.config.schema import FewShot
from grpo_jax.config.schema import Task as TaskConfig
from grpo_jax.errors import UsageError
from grpo_jax.rollouts.plugins import import_object

Message = Mapping[str, str]


@dataclass(frozen=True)
class Problem:
    """`prompt` is a text (a user message) or a list of chat messages; the rewards get `answer` and `metadata`.

    `examples` are turns of a chat that come before the prompt; `task.few_shot` fills them in.
    """

    id: str
    prompt: str | Sequence[Message]
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    examples: Sequence[Message] = ()


Splits = Mapping[str, Sequence[Problem]]


class NotHere(UsageError):
    """A task's data would have to be fetched first, and may not be: `offline`."""


def load_task(config: TaskConfig, *, offline: bool = False) -> Splits:
    """Calls the task function with its args; it returns splits by name (`train` is required) or the training split.

    Args:
      offline: passed on to a function that has a parameter `offline`: it fetches nothing, and raises NotHere.
    """
    source = import_object(config.source, "task.source")
    try:
        args = {**config.args, "offline": True} if offline and _takes(source, "offline") else config.args
        found = source(**args)
    except TypeError as error:
        raise UsageError(f"task.args: {config.source} does not accept them: {error}") from None
    splits = found if isinstance(found, Mapping) else {"train": found}
    if "train" not in splits or not len(splits["train"]):
        raise UsageError(f"task.source: {config.source} has no problems in its split 'train'")
    return splits if config.few_shot is None else _with_examples(splits, config.few_shot)


def messages(problem: Problem, config: TaskConfig) -> list[dict[str, str]]:
    """The chat: the config's system prompt, the problem's own, examples, and the rest of the problem's messages."""
    chat = [{"role": "user", "content": problem.prompt}] if isinstance(problem.prompt, str) else problem.prompt
    system: list[Message] = []
    if config.system_prompt is not None:
        system.append({"role": "system", "content": config.system_prompt})
    own = list(itertools.takewhile(lambda message: message.get("role") == "system", chat))
    return [dict(message) for message in (*system, *own, *problem.examples, *chat[len(own) :])]


def prompt_tokens(problem: Problem, config: TaskConfig, tokenizer: Any) -> list[int]:
    """The token ids of a prompt under the model's chat template, generation prompt included."""
    return chat_tokens(messages(problem, config), config, tokenizer)


def chat_tokens(chat: Sequence[Message], config: TaskConfig, tokenizer: Any) -> list[int]:
    return tokenizer.apply_chat_template(
        list(chat),
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
        **config.chat_template_kwargs,
    )


def problem_at(problems: Sequence[Problem], order_seed: int, index: int) -> tuple[int, Problem]:
    """(epoch, problem) at place `index` of an endless sequence of epochs, each shuffled by its own seed."""
    epoch, place = divmod(index, len(problems))
    order = np.random.default_rng((order_seed, epoch)).permutation(len(problems))
    return epoch, problems[int(order[place])]


def _takes(function: Any, parameter: str) -> bool:
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _with_examples(splits: Splits, few_shot: FewShot) -> Splits:
    if few_shot.split is None:
        pairs = few_shot.pairs[: few_shot.count or None]
        turns = [turn for pair in pairs for turn in _turns(pair.question, pair.answer)]
        return {name: _FewShot(problems, lambda problem: turns) for name, problems in splits.items()}
    if few_shot.split not in splits:
        raise UsageError(f"task.few_shot.split: the task has no split {few_shot.split!r}")
    # One more than needed, for the problems that are among them.
    source = splits[few_shot.split]
    shown = [source[i] for i in range(min(few_shot.count + 1, len(source)))]
    for problem in shown:
        if not isinstance(problem.prompt, str):
            raise UsageError(
                f"task.few_shot.split: problem {problem.id!r} of {few_shot.split!r} is a conversation, no question"
            )
        if few_shot.answer != "answer" and few_shot.answer not in problem.metadata:
            raise UsageError(f"task.few_shot.answer: problem {problem.id!r} has no {few_shot.answer!r} in its metadata")

    def examples(asked: Problem) -> list[Message]:
        others = [problem for problem in shown if problem.prompt != asked.prompt][: few_shot.count]
        return [turn for problem in others for turn in _turns(str(problem.prompt), _shown_answer(problem, few_shot))]

    if len(shown) < few_shot.count:
        raise UsageError(
            f"task.few_shot.count: {few_shot.count} examples are wanted, {few_shot.split!r} has {len(shown)}"
        )
    return {name: _FewShot(problems, examples) for name, problems in splits.items()}


def _shown_answer(problem: Problem, few_shot: FewShot) -> str:
    return str(problem.answer if few_shot.answer == "answer" else problem.metadata[few_shot.answer])


def _turns(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


class LazyProblems(Sequence[Problem], ABC):
    """Problems that are made when they are asked for."""

    @abstractmethod
    def make(self, place: int) -> Problem:
        """The problem at 0 <= place < len."""

    def __iter__(self) -> Iterator[Problem]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | Sequence[Problem]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.make(range(len(self))[index])


class _FewShot(LazyProblems):
    """Problems with examples before them."""

    def __init__(self, problems: Sequence[Problem], examples: Callable[[Problem], Sequence[Message]]):
        self._problems, self._examples = problems, examples

    def __len__(self) -> int:
        return len(self._problems)

    def make(self, place: int) -> Problem:
        problem = self._problems[place]
        return replace(problem, examples=[*problem.examples, *self._examples(problem)])
