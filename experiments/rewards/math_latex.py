"""Answers in LaTeX, compared as mathematics by the package `math-verify`.

sympy can take very long over what a model writes, and it holds the interpreter's lock meanwhile: give this reward
`processes: 2` (or more) in the config. Then a comparison that outlasts the reward's time is killed, and the worker's
other samples do not wait for it.
"""

import functools
import logging
from typing import Any

from grpo_jax.rollouts.rewards import Completion


def math_equal(completion: Completion) -> float:
    """1 if what the text, without its thinking part, states (`\\boxed{…}` first) equals the answer, else 0."""
    import math_verify

    expected = _parsed(_as_latex(completion.answer))
    if not expected:
        raise ValueError(f"the answer {completion.answer!r:.100} is no mathematics that math-verify reads")
    found = _parsed(completion.answer_text)
    return float(math_verify.verify(list(expected), list(found), timeout_seconds=None))


math_equal.requires = ("math_verify",)  # type: ignore[attr-defined]


@functools.lru_cache(4096)
def _parsed(text: str) -> tuple[Any, ...]:
    import math_verify

    # Its own timeouts are signals, which no thread can have; the reward's time-out takes their place.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return tuple(math_verify.parse(text, parsing_timeout=None))


def _as_latex(answer: Any) -> str:
    text = str(answer).strip()
    return text if "$" in text or "\\boxed" in text or "\\[" in text else f"${text}$"


def _unreadable(answer: Any) -> str | None:
    if answer is None or not str(answer).strip():
        return "there is none"
    try:
        return None if _parsed(_as_latex(answer)) else f"math-verify does not read {answer!r:.100}"
    except ImportError:
        return None


math_equal.check_answer = _unreadable  # type: ignore[attr-defined]
