"""Rotary frequencies, plain and stretched to longer contexts as Llama 3 and YaRN do. Knows nothing of jax.

The numbers are those of transformers and vLLM, which read the same config: another frequency would be another policy.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from grpo_jax.errors import UsageError

_ORIGINAL = "original_max_position_embeddings"
_NUMBERS = {
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", _ORIGINAL, "beta_slow", "beta_fast", "attention_factor", "mscale", "mscale_all_dim"),
}
_OPTIONAL = ("attention_factor", "mscale", "mscale_all_dim")
_GENERAL = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are stretched to a context longer than the one that the base was first trained with.

    Llama 3: frequencies that turn fewer than `low` times in the original context are divided by `factor`, those that
    turn more than `high` times stay, with a ramp between them over the turns (arXiv:2407.21783). YaRN: the same with
    the ramp over the index of the frequency, and cos and sin times `attention_factor` (Peng et al. 2023,
    arXiv:2309.00071).
    """

    kind: Literal["llama3", "yarn"]
    factor: float
    original_max_positions: float
    low: float
    """low_freq_factor or beta_slow, turns."""
    high: float
    """high_freq_factor or beta_fast, turns."""
    attention_factor: float = 1.0
    truncate: bool = True
    """YaRN: whether the ends of the ramp are whole indices."""

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], *, original: Any, max_positions: int, named: str) -> "RopeScaling | None":
        """Reads `rope_scaling` of transformers 4 or `rope_parameters` of transformers 5; None if it scales nothing.

        Args:
            rope: the object.
            original: `original_max_position_embeddings` at the top of the config, which comes before the object's.
            max_positions: what that is where neither says.
            named: file and key, for messages.

        Raises:
            UsageError: another kind of scaling, a number that is missing, or a key that this kind does not have.
        """
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return None
        where = f"{named} is {dict(rope)!r}"
        if kind not in _NUMBERS:
            raise UsageError(f"{where}, and of rope scaling only {' and '.join(_NUMBERS)} are supported.")
        # What transformers would ignore, another reader of the same config may not.
        if unknown := set(rope) - {*_NUMBERS[kind]} - _GENERAL - ({"truncate"} if kind == "yarn" else set()):
            raise UsageError(f"{where}, and {', '.join(sorted(unknown))} means nothing in {kind} scaling.")
        given: dict[str, Any] = {key: rope.get(key) for key in _NUMBERS[kind]}
        given[_ORIGINAL] = original or given[_ORIGINAL] or max_positions
        if kind == "yarn":
            given |= {"beta_slow": given["beta_slow"] or 1, "beta_fast": given["beta_fast"] or 32}
        for key, value in given.items():
            valid = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
            if not valid and not (value is None and key in _OPTIONAL):
                raise UsageError(f"{where}, and {key} should be a positive number.")
        factor, positions, low, high = (float(given[key]) for key in _NUMBERS[kind][:4])
        if low >= high:
            raise UsageError(f"{where}, and {_NUMBERS[kind][3]} should be above {_NUMBERS[kind][2]}.")
        if kind == "llama3":
            return cls("llama3", factor, positions, low, high)
        attention_factor, one, all_dims = (given[key] for key in _OPTIONAL)
        if attention_factor is None:
            both = one is not None and all_dims is not None
            attention_factor = _mscale(factor, one) / _mscale(factor, all_dims) if both else _mscale(factor, 1.0)
        return cls("yarn", factor, positions, low, high, float(attention_factor), bool(rope.get("truncate", True)))


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Angle per position of each pair, float64, [head_dim / 2]: theta^(-2i/head_dim), then scaled."""
    plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return plain
    if scaling.kind == "llama3":
        turns = scaling.original_max_positions * plain / (2 * math.pi)
        kept = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    else:
        kept = 1 - _yarn_ramp(head_dim, theta, scaling)
    return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn_ramp(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """0 up to the index that turns `high` times in the original context, 1 from the one that turns `low` times."""

    def index(turns: float) -> float:
        """Where theta^(-2i/head_dim) · original_max_positions = 2π · turns."""
        wanted = scaling.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wanted) / (2 * math.log(theta))

    first, last = index(scaling.high), index(scaling.low)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # Bounds and the step of 0.001 are transformers', the upper bound of the whole head instead of half of it included.
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    return np.clip((np.arange(head_dim // 2) - first) / (last - first), 0, 1)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
