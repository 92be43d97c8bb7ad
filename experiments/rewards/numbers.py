"""Rewards for answers that are numbers."""

import math
import re
from fractions import Fraction
from typing import Any

from grpo_jax.rollouts.rewards import Completion

# Characters of a number. Models repeat digits without end, and 1e999999999 as an exact number fills the memory.
_LONGEST = 500
_GROUPING = str.maketrans("", "", ", $")
_INTEGER = re.compile(r"-?\d+")
# 1,234.5, 3/4, -0.5e-3, .5; thousands are separated by commas.
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?<=\d)(?:[eE][-+]?\d{1,3}(?!\d))?(?:\s*/\s*\d+)?"
)


def last_integer(completion: Completion) -> float:
    """1 if the last integer in the text equals the answer, else 0."""
    found = _INTEGER.findall(completion.text)
    return float(bool(found) and len(found[-1]) < _LONGEST and int(found[-1]) == int(completion.answer))


def last_number(completion: Completion, tolerance: float = 0.0, relative: float = 0.0) -> float:
    """1 if the last number of the text, without its thinking part, is the answer, else 0.

    Args:
      tolerance, relative: how far off it may be, in units of the answer and as a part of it; the larger one counts.
    """
    found = _NUMBER.findall(completion.answer_text)
    number = to_number(found[-1]) if found else None
    expected = to_number(completion.answer)
    if expected is None:
        raise ValueError(f"the answer {completion.answer!r:.100} is no number")
    if number is None:
        return 0.0
    if not tolerance and not relative:
        return float(number == expected)
    return float(math.isclose(number, expected, rel_tol=relative, abs_tol=tolerance))


def to_number(value: Any) -> Fraction | None:
    """What a number or its text stands for, exactly; None if it is none."""
    text = str(value).strip().translate(_GROUPING).removesuffix("%").removesuffix(".")
    exponent = re.search(r"[eE][-+]?(\d+)", text)
    if len(text) > _LONGEST or (exponent and len(exponent[1]) > 3):
        return None
    try:
        numerator, _, denominator = text.partition("/")
        return Fraction(numerator) / Fraction(denominator or 1)
    except (ValueError, ZeroDivisionError):
        return None


def _no_integer(answer: Any) -> str | None:
    try:
        int(answer)
    except (TypeError, ValueError):
        return f"{answer!r:.100} is no integer"
    return None


def _no_number(answer: Any) -> str | None:
    return f"{answer!r:.100} is no number" if to_number(answer) is None else None


last_integer.check_answer = _no_integer  # type: ignore[attr-defined]
last_number.check_answer = _no_number  # type: ignore[attr-defined]
