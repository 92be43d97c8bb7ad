"""Reads a completions answer as if the server were wrong: what is kept has been checked token by token."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Choice:
    """One sampled completion. `logprobs` are the sampler's, one for each token; `text` has no special tokens."""

    tokens: np.ndarray  # int32 [L], L >= 1
    logprobs: np.ndarray  # float32 [L]
    text: str
    finish_reason: str  # stop | length


@dataclass(frozen=True)
class Answer:
    """`choices[i]` is None where sample i is not sound; `failures` says why."""

    policy: str  # the model that the server says has answered
    replica: str
    choices: tuple[Choice | None, ...]
    failures: tuple[str, ...]

    @property
    def generated_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices if choice is not None)


class BadAnswer(Exception):
    """A body that is no completions answer of the policy that was asked for."""


def read_answer(body: Any, *, policy: str, replica: str, n: int, max_tokens: int) -> Answer:
    """Checks the body of a completions answer; BadAnswer if nothing in it can be used."""
    if not isinstance(body, dict) or not isinstance(body.get("choices"), list):
        raise BadAnswer("the answer is no completions object")
    if body.get("model") != policy:
        raise BadAnswer(f"the answer is of model {body.get('model')!r:.100}, not of {policy}")
    by_index: dict[int, Any] = {}
    for raw in body["choices"]:
        index = raw.get("index") if isinstance(raw, dict) else None
        if type(index) is not int or not 0 <= index < n or index in by_index:
            raise BadAnswer(f"a choice has index {index!r:.100}; {n} were asked for")
        by_index[index] = raw
    choices: list[Choice | None] = []
    failures = []
    for index in range(n):
        try:
            choices.append(_choice(by_index.get(index), max_tokens))
        except ValueError as error:
            choices.append(None)
            failures.append(f"sample {index}: {error}")
    return Answer(policy, replica, tuple(choices), tuple(failures))


def _choice(raw: Any, max_tokens: int) -> Choice:
    """ValueError says what is not sound."""
    if raw is None:
        raise ValueError("it is not in the answer")
    tokens, logprobs = raw.get("token_ids"), raw.get("logprobs")
    logprobs = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    text, finish_reason = raw.get("text"), raw.get("finish_reason")
    if not isinstance(tokens, list) or not isinstance(logprobs, list):
        raise ValueError("token ids or log-probabilities are missing")
    if not 1 <= len(tokens) <= max_tokens:
        raise ValueError(f"{len(tokens)} tokens where 1 to {max_tokens} were asked for")
    if len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} log-probabilities")
    if any(type(token) is not int or not 0 <= token <= _INT32_MAX for token in tokens):
        raise ValueError("a token id is no integer >= 0")
    if any(type(logprob) not in (int, float) or not math.isfinite(logprob) for logprob in logprobs):
        raise ValueError("a log-probability is not finite")
    if finish_reason not in ("stop", "length"):  # vLLM says `abort` for what it did not finish
        raise ValueError(f"it ended with finish_reason {finish_reason!r:.100}")
    if not isinstance(text, str):
        raise ValueError("the text is missing")
    # JSON may carry lone surrogates, which no file could hold.
    text = text.encode(errors="replace").decode()
    return Choice(np.array(tokens, np.int32), np.array(logprobs, np.float32), text, finish_reason)
