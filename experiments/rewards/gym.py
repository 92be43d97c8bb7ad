"""The reward of problems that `reasoning-gym` has generated: its generator judges the answer."""

import functools
import re
from typing import Any

from grpo_jax.rollouts.rewards import Completion

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score(completion: Completion, tagged: bool = False) -> float:
    """The generator's own score, in [0, 1], of the text without the thinking part.

    Args:
      tagged: of what stands in the last `<answer>…</answer>`; without such a pair the score is 0.
    """
    text = completion.answer_text.strip()
    if tagged:
        found = _TAGGED.findall(text)
        if not found:
            return 0.0
        text = found[-1].strip()
    entry = {"question": completion.prompt, "answer": completion.answer, "metadata": dict(completion.metadata)}
    return float(_scorer(entry["metadata"]["source_dataset"])(text, entry))


score.requires = ("reasoning_gym",)  # type: ignore[attr-defined]


@functools.cache
def _scorer(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(name)
