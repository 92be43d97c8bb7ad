"""Rewards for answers that are texts."""

import re
from typing import Any

from experiments.rewards.numbers import to_number
from grpo_jax.rollouts.rewards import Completion

_BOXED = re.compile(r"\\boxed\s*\{")
_AROUND = " \"'`*_~()[]{}<>"
_BEFORE, _AFTER = ":,;=", ".,;:!?"
_DECIMAL = re.compile(r"[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d) ?%?")
_MATH = re.compile(r"\\[()\[\]]")  # the delimiters of LaTeX


def exact_match(completion: Completion, after: str | None = None, boxed: bool = False, strict: bool = False) -> float:
    """1 if the text, without its thinking part, is the answer, else 0.

    Args:
      after: only what follows the last occurrence of this counts (`####`, `Answer:`); without it the reward is 0.
      boxed: only what stands in the last `\\boxed{…}` counts.
      strict: letter by letter; otherwise case, punctuation at the ends and the width of spaces do not matter, and
        decimal numbers are compared as numbers ("2,125.0" is "$2125").
    """
    text: str | None = completion.answer_text
    if after is not None:
        _, found, rest = completion.answer_text.rpartition(after)
        text = rest if found else None
    if boxed and text is not None:
        text = last_boxed(text)
    if text is None:
        return 0.0
    answers = completion.answer if isinstance(completion.answer, list | tuple) else [completion.answer]
    if strict:
        return float(any(text.strip() == str(answer).strip() for answer in answers))
    return float(any(_is_same(text, str(answer)) for answer in answers))


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{…}` whose braces are closed; None without one."""
    for start in reversed([match.end() for match in _BOXED.finditer(text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[start:end]
    return None


def _is_same(text: str, answer: str) -> bool:
    text, answer = _normal(text) or text.strip(), _normal(answer) or answer.strip()
    if _DECIMAL.fullmatch(text) and _DECIMAL.fullmatch(answer):
        number = to_number(text)
        return text == answer if number is None else number == to_number(answer)
    return text == answer


def _normal(text: str) -> str:
    """Without what says nothing; a sign, a decimal point before a digit and what belongs to a name (C++) stay."""
    text = " ".join(_MATH.sub(" ", text).replace("\\$", "$").replace("\\%", "%").casefold().split())
    while (bare := _bared(text)) != text:
        text = bare
    return text


def _bared(text: str) -> str:
    text = text.strip(_AROUND).lstrip(_BEFORE).rstrip(_AFTER)
    return text[1:-1] if len(text) > 2 and text[0] == text[-1] == "$" else text


def is_missing(answer: Any) -> str | None:
    """What is wrong with an answer that is compared as a text, for the lint; None if nothing is."""
    return "there is none" if answer is None or not str(answer).strip() else None


exact_match.check_answer = is_missing  # type: ignore[attr-defined]
