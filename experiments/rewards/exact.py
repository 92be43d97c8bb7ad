"""Rewards for answers that are texts."""

import re
import string
from typing import Any

from grpo_jax.rollouts.rewards import Completion

_BOXED = re.compile(r"\\boxed\s*\{")


def exact_match(completion: Completion, after: str | None = None, boxed: bool = False, strict: bool = False) -> float:
    """1 if the text, without its thinking part, is the answer, else 0.

    Args:
      after: only what follows the last occurrence of this counts (`####`, `Answer:`); without it the reward is 0.
      boxed: only what stands in the last `\\boxed{…}` counts.
      strict: letter by letter; otherwise case, punctuation at the ends and the width of spaces do not matter.
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
    clean = str.strip if strict else _normal
    return float(any(clean(text) == clean(str(answer)) for answer in answers))


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{…}` whose braces are closed; None without one."""
    for start in reversed([match.end() for match in _BOXED.finditer(text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[start:end]
    return None


def _normal(text: str) -> str:
    return " ".join(text.casefold().split()).strip(string.punctuation + " ")


def _is_missing(answer: Any) -> str | None:
    return "there is none" if answer is None or not str(answer).strip() else None


exact_match.check_answer = _is_missing  # type: ignore[attr-defined]
