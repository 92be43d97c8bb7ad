"""The reward interface: what a reward function is given, and what its answer means.

    def reward(completion: Completion, **args) -> float | None | dict[str, float]

sync or async, named in the config by import path. None or NaN: this completion cannot be scored. A dict records its
parts; its value is the entry `reward` if there is one, else the sum of the parts. Two other signatures see all the
completions of a prompt at once and return a list of such answers, told apart by the name of a parameter:

- `group`: `def reward(group: Sequence[Completion], **args)`, for what depends on the others, such as relative length;
- `completions`: TRL's way, with lists `prompts`, `completions`, `completion_ids`, `answer` and the problem's metadata.

A function may carry two attributes: `requires`, the names of modules that it imports only when called, and
`check_answer`, a function of a problem's answer that returns what is wrong with it, or None;
`grpo-jax check` uses both.
"""

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from grpo_jax.config.schema import Reward as RewardConfig
from grpo_jax.errors import UsageError
from grpo_jax.rollouts.plugins import import_object

THINK, END_OF_THINKING = "<think>", "</think>"


@dataclass(frozen=True)
class Completion:
    """One completion as rewards see it. `prompt` is the problem's own: text or messages, without the system prompt."""

    text: str  # decoded without special tokens
    tokens: Sequence[int]  # as sampled, EOS included
    prompt: str | Sequence[Mapping[str, str]]
    answer: Any
    metadata: Mapping[str, Any]
    finish_reason: str  # stop | length

    @property
    def thinking(self) -> str | None:
        """What stands before the first `</think>`, or after a `<think>` that is never closed; None without either."""
        before, end, _ = self.text.partition(END_OF_THINKING)
        if not end and not before.lstrip().startswith(THINK):
            return None
        return before.lstrip().removeprefix(THINK).strip()

    @property
    def answer_text(self) -> str:
        """The text without the thinking part: all of it where nothing marks one, empty where it was never closed.

        A chat template may open `<think>` in the prompt; of such a completion, cut off while thinking, no text tells.
        """
        before, end, after = self.text.partition(END_OF_THINKING)
        if end:
            return after.strip()
        return "" if before.lstrip().startswith(THINK) else self.text


@dataclass(frozen=True)
class Value:
    """What one reward says of one completion: `value` None means not scorable, `error` why if it failed.

    `seconds`: how long the call took that it comes from (one call for all completions of a prompt, if batched).
    """

    value: float | None = None
    parts: Mapping[str, float | None] | None = None
    error: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Reward:
    """A configured reward function."""

    config: RewardConfig
    function: Callable[..., Any]
    signature: Literal["completion", "group", "lists"]
    columns: frozenset[str] | None = None  # of `lists`: those that it takes; None: all

    @property
    def label(self) -> str:
        return self.config.label

    @property
    def batched(self) -> bool:
        """Called once for all completions of a prompt."""
        return self.signature != "completion"

    def call(self, completions: Sequence[Completion]) -> Any:
        """Calls the function: with one completion, or if it is batched with all completions of one prompt."""
        args = self.config.args
        if self.signature == "completion":
            (completion,) = completions
            return self.function(completion, **args)
        if self.signature == "group":
            return self.function(group=completions, **args)
        lists = _trl_lists(completions)
        wanted = {key: lists[key] for key in lists if self.columns is None or key in self.columns}
        return self.function(**{**wanted, **args})

    def read(self, answer: Any, count: int) -> list[Value]:
        """What a call with `count` completions has returned. TypeError or ValueError if it is not of the interface."""
        return read_values(answer, count) if self.batched else [read_value(answer)]


def verifiers(rewards: Sequence[Reward]) -> dict[str, str]:
    """By label: sha256 of the file that a reward's function stands in; those that stand in none are left out.

    Of that file alone: what it imports is not part of it.
    """
    found = {}
    for reward in rewards:
        try:
            path = inspect.getsourcefile(inspect.unwrap(reward.function))
            found[reward.label] = hashlib.sha256(Path(path or "").read_bytes()).hexdigest()
        except (TypeError, ValueError, OSError):
            continue
    return found


def load_rewards(configs: Sequence[RewardConfig]) -> list[Reward]:
    """Imports the reward functions and checks their args; a UsageError names `rewards.<i>.source` or `.args`."""
    return [load_reward(config, f"rewards.{i}") for i, config in enumerate(configs)]


def missing_packages(rewards: Sequence[Reward]) -> list[str]:
    """A sentence for each module that a reward will import when it is called, and that is not there."""
    return [
        f"rewards.{i}.source: {reward.config.source} needs the Python module {module}, which is not installed"
        for i, reward in enumerate(rewards)
        for module in getattr(reward.function, "requires", ())
        if find_spec(module) is None
    ]


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


def _trl_lists(completions: Sequence[Completion]) -> dict[str, list[Any]]:
    return {
        **{key: [c.metadata[key] for c in completions] for key in completions[0].metadata},
        "prompts": [c.prompt for c in completions],
        # TRL's shapes: a text for a text prompt, a list of messages for a conversation.
        "completions": [
            c.text if isinstance(c.prompt, str) else [{"role": "assistant", "content": c.text}] for c in completions
        ],
        "completion_ids": [list(c.tokens) for c in completions],
        "answer": [c.answer for c in completions],
    }


def load_reward(config: RewardConfig, key: str) -> Reward:
    """The reward that the config's `key` describes."""
    function = import_object(config.source, f"{key}.source")
    if not callable(function):
        raise UsageError(f"{key}.source: {config.source} is not a function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none to look at
        return Reward(config, function, "completion")
    parameters = signature.parameters
    # A parameter that the config fills is one of the function's own.
    takes_group = "group" in parameters and "group" not in config.args
    try:
        if "completions" in parameters:
            signature.bind_partial(completions=None, **config.args)
        elif takes_group:
            signature.bind(group=None, **config.args)
        else:
            signature.bind(None, **config.args)
    except TypeError as error:
        raise UsageError(f"{key}.args: {config.source} does not accept them: {error}") from None
    if "completions" in parameters:
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        return Reward(config, function, "lists", None if takes_all else frozenset(parameters))
    return Reward(config, function, "group" if takes_group else "completion")
