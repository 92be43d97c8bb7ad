"""A task: indexable sources of problems, one per split, and the tokens that the model is prompted with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_jax.config.schema import Task as TaskConfig
from grpo_jax.errors import UsageError
from grpo_jax.rollouts.plugins import import_object

Message = Mapping[str, str]


@dataclass(frozen=True)
class Problem:
    """`prompt` is a text (a user message) or a list of chat messages; the rewards get `answer` and `metadata`."""

    id: str
    prompt: str | Sequence[Message]
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


Splits = Mapping[str, Sequence[Problem]]


def load_task(config: TaskConfig) -> Splits:
    """Calls the task function with its args; it returns splits by name (`train` is required) or the training split."""
    source = import_object(config.source, "task.source")
    try:
        found = source(**config.args)
    except TypeError as error:
        raise UsageError(f"task.args: {config.source} does not accept them: {error}") from None
    splits = found if isinstance(found, Mapping) else {"train": found}
    if "train" not in splits or not len(splits["train"]):
        raise UsageError(f"task.source: {config.source} has no problems in its split 'train'")
    return splits


def messages(problem: Problem, config: TaskConfig) -> list[dict[str, str]]:
    chat = (
        [{"role": "user", "content": problem.prompt}] if isinstance(problem.prompt, str) else map(dict, problem.prompt)
    )
    system = [] if config.system_prompt is None else [{"role": "system", "content": config.system_prompt}]
    return [*system, *chat]


def prompt_tokens(problem: Problem, config: TaskConfig, tokenizer: Any) -> list[int]:
    """The token ids of a prompt under the model's chat template, generation prompt included."""
    return tokenizer.apply_chat_template(
        messages(problem, config),
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
