"""Rewards for JSON of a given shape, checked by the package `jsonschema`."""

import json
import re
from typing import Any

from grpo_jax.rollouts.rewards import Completion

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def valid_json(completion: Completion, schema: dict[str, Any] | None = None, equal: bool = False) -> dict[str, float]:
    """Parts `parses` and `valid`, each 0 or 1; the reward is `valid`.

    The JSON is the last fenced block of the text without its thinking part, or all of it where there is none.

    Args:
      schema: None: the problem's metadata have it as `schema`.
      equal: valid is what also equals the problem's answer.
    """
    import jsonschema

    text = completion.answer_text
    fenced = _FENCED.findall(text)
    try:
        found = json.loads(fenced[-1] if fenced else text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return {"reward": 0.0, "parses": 0.0, "valid": 0.0}
    wanted = completion.metadata["schema"] if schema is None else schema
    valid = jsonschema.validators.validator_for(wanted)(wanted).is_valid(found)
    valid = valid and (not equal or found == completion.answer)
    return {"reward": float(valid), "parses": 1.0, "valid": float(valid)}


valid_json.requires = ("jsonschema",)  # type: ignore[attr-defined]


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
