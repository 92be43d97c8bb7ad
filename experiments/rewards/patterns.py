"""Rewards by regular expressions.

A pattern with nested repetition can take for ever, and Python's `re` holds the interpreter's lock meanwhile. Where the
patterns are not of the simplest, give the reward `processes: 1` in the config.
"""

import re

from experiments.rewards.exact import is_missing
from grpo_jax.rollouts.rewards import Completion


def matches(completion: Completion, pattern: str, full: bool = False, thinking: bool = False) -> float:
    """1 if the pattern is found in the text (with `full`: is all of it, up to white space at its ends), else 0.

    Args:
      pattern: as Python's `re` has it; `.` matches line breaks, too.
      thinking: of the whole text; otherwise without its thinking part.
    """
    text = completion.text if thinking else completion.answer_text
    search = re.compile(pattern, re.DOTALL)
    return float((search.fullmatch(text.strip()) if full else search.search(text)) is not None)


def captured(completion: Completion, pattern: str) -> float:
    """1 if the first group of the last match in the text, without its thinking part, is the answer, else 0."""
    found = list(re.finditer(pattern, completion.answer_text, re.DOTALL))
    return float(bool(found) and (found[-1][1] or "").strip() == str(completion.answer).strip())


captured.check_answer = is_missing  # type: ignore[attr-defined]
