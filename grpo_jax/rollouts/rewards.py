"""The reward interface: what a reward function is given, and what its answer means.

    def reward(completion: Completion, **args) -> float | None | dict[str, float]

sync or async, named in the config by import path. None or NaN: this completion cannot be scored. A dict records its
parts; its value is the entry `reward` if there is one, else the sum of the parts. A function with a parameter
`completions` is called in TRL's way, once for all completions of a prompt, with lists (`prompts`, `completions`,
`completion_ids`, `answer` and the problem's metadata), and returns a list of such answers.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_jax.config.schema import Reward as RewardConfig
from grpo_jax.errors import UsageError
from grpo_jax.rollouts.plugins import import_object


@dataclass(frozen=True)
class Completion:
    """One completion as rewards see it. `prompt` is the problem's own: text or messages, without the system prompt."""

    text: str  # decoded without special tokens
    tokens: Sequence[int]  # as sampled, EOS included
    prompt: str | Sequence[Mapping[str, str]]
    answer: Any
    metadata: Mapping[str, Any]
    finish_reason: str  # stop | length


@dataclass(frozen=True)
class Value:
    """What one reward says of one completion: `value` None means not scorable, `error` why if it failed."""

    value: float | None = None
    parts: Mapping[str, float | None] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Reward:
    """A configured reward function. `batched`: called with lists, once per prompt."""

    label: str
    weight: float
    function: Callable[..., Any]
    args: Mapping[str, Any]
    batched: bool
    columns: frozenset[str] | None  # of a batched function: the lists it takes; None: all

    def call(self, completion: Completion) -> Any:
        return self.function(completion, **self.args)

    def call_batch(self, completions: Sequence[Completion]) -> Any:
        """Calls a batched function with the completions of one prompt."""
        lists: dict[str, list[Any]] = {
            **{key: [c.metadata[key] for c in completions] for key in completions[0].metadata},
            "prompts": [c.prompt for c in completions],
            # TRL's shapes: a text for a text prompt, a list of messages for a conversation.
            "completions": [
                c.text if isinstance(c.prompt, str) else [{"role": "assistant", "content": c.text}] for c in completions
            ],
            "completion_ids": [list(c.tokens) for c in completions],
            "answer": [c.answer for c in completions],
        }
        wanted = {key: lists[key] for key in lists if self.columns is None or key in self.columns}
        return self.function(**{**wanted, **self.args})


def load_rewards(configs: Sequence[RewardConfig]) -> list[Reward]:
    """Imports the reward functions and checks their args; a UsageError names `rewards.<i>.source` or `.args`."""
    return [_load(config, f"rewards.{i}") for i, config in enumerate(configs)]


def read_value(answer: Any) -> Value:
    """What a reward function returned, as a Value. TypeError or ValueError if it is not of the interface."""
    if not isinstance(answer, Mapping):
        return Value(_number(answer))
    parts = {str(name): _number(part) for name, part in answer.items()}
    if "reward" in parts:
        return Value(parts.pop("reward"), parts)
    numbers = [part for part in parts.values() if part is not None]
    return Value(sum(numbers) if numbers and len(numbers) == len(parts) else None, parts)


def read_values(answers: Any, count: int) -> list[Value]:
    """What a batched reward function returned for `count` completions."""
    if isinstance(answers, str | Mapping) or not hasattr(answers, "__len__"):
        raise TypeError(f"a batched reward returns a list, not {type(answers).__name__}")
    if len(answers) != count:
        raise ValueError(f"a batched reward returned {len(answers)} values for {count} completions")
    return [read_value(answer) for answer in answers]


def _number(answer: Any) -> float | None:
    if answer is None:
        return None
    if isinstance(answer, str | bytes):
        raise TypeError(f"a reward is a number, not {answer!r:.80}")
    number = float(answer)
    if math.isinf(number):
        raise ValueError("a reward must be finite")
    return None if math.isnan(number) else number


def _load(config: RewardConfig, key: str) -> Reward:
    function = import_object(config.source, f"{key}.source")
    if not callable(function):
        raise UsageError(f"{key}.source: {config.source} is not a function")
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some built-in functions have none to look at
        return Reward(config.label, config.weight, function, config.args, False, None)
    batched = "completions" in parameters
    try:
        if batched:
            inspect.signature(function).bind_partial(completions=None, **config.args)
        else:
            inspect.signature(function).bind(None, **config.args)
    except TypeError as error:
        raise UsageError(f"{key}.args: {config.source} does not accept them: {error}") from None
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    columns = None if takes_all else frozenset(parameters)
    return Reward(config.label, config.weight, function, config.args, batched, columns)
