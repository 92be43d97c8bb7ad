"""Rewards for a format made of XML tags, such as `<think>…</think><answer>…</answer>`."""

import re
from collections.abc import Sequence

from experiments.rewards.exact import is_missing
from grpo_jax.rollouts.rewards import Completion


def tag_format(completion: Completion, tags: Sequence[str] = ("think", "answer"), alone: bool = True) -> float:
    """1 if each tag is opened and closed once, in this order and not inside another, else 0. All of the text counts.

    Args:
      alone: nothing but white space may stand outside of the tags.
    """
    text, end = completion.text, 0
    for tag in tags:
        opened, closed = text.find(f"<{tag}>"), text.find(f"</{tag}>")
        once = text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1
        if not once or opened < end or closed < opened or (alone and text[end:opened].strip()):
            return 0.0
        end = closed + len(f"</{tag}>")
    return float(not alone or not text[end:].strip())


def tag_count(completion: Completion, tags: Sequence[str] = ("think", "answer")) -> float:
    """The part of all opening and closing tags that stand in the text exactly once: a slope towards `tag_format`."""
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    return sum(completion.text.count(mark) == 1 for mark in marks) / len(marks)


def tagged_exact(completion: Completion, tag: str = "answer") -> float:
    """1 if the content of the last such pair of tags is the answer, up to white space at its ends, else 0."""
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", completion.text, re.DOTALL)
    return float(bool(found) and found[-1].strip() == str(completion.answer).strip())


tagged_exact.check_answer = is_missing  # type: ignore[attr-defined]
