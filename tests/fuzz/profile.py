"""How often, and by which chance: the same examples every time, so that nothing fails by accident."""

from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

_SEEDS = st.integers(0, 2**32 - 1)  # drawing each byte through hypothesis takes a hundred times as long
_HANG = timedelta(seconds=60)


def in_a_sentence(error: Exception) -> None:
    """What a user is told: one line, and something in it."""
    text = str(error)
    assert text
    assert "\n" not in text


def fuzz(examples: int = 300) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Calls a test with `rng`, a Random, `examples` times. One that takes as long as a hang fails."""

    def decorated(test: Callable[..., None]) -> Any:
        chosen = settings(
            derandomize=True,
            database=None,
            max_examples=examples,
            deadline=_HANG,
            suppress_health_check=list(HealthCheck),
        )
        return chosen(given(rng=_SEEDS.map(Random))(test))

    return decorated
