"""What a load's token times say: gaps between the tokens of a completion, and times without any token."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

_EDGES_MS = (0, 10, 20, 40, 60, 80, 100, 150, 200, 300, 500, 1000)


class Span(NamedTuple):
    """Monotonic seconds."""

    started: float
    ended: float


class Gaps(NamedTuple):
    """From one token of a completion to its next one: when, seconds."""

    started: np.ndarray  # float64 [N]
    ended: np.ndarray  # float64 [N]

    def within(self, spans: Sequence[Span]) -> np.ndarray:
        """bool [N]: whether a gap has a moment in common with any of the spans."""
        found = np.zeros(len(self.started), bool)
        for span in spans:
            found |= (self.started < span.ended) & (self.ended > span.started)
        return found

    @property
    def ms(self) -> np.ndarray:
        return 1e3 * (self.ended - self.started)


def gaps_of(t_N: np.ndarray, completion_N: np.ndarray) -> Gaps:
    """Args: as `exchange_load` writes them, the tokens of a completion one after the other."""
    same = completion_N[1:] == completion_N[:-1]
    return Gaps(t_N[:-1][same], t_N[1:][same])


def silence_ms(t_N: np.ndarray, span: Span) -> float:
    """The longest time without a token of any completion that has a moment in common with the span."""
    t_N = np.sort(t_N)
    gaps = Gaps(t_N[:-1], t_N[1:])
    within = gaps.within([span])
    return float(gaps.ms[within].max()) if within.any() else float("nan")


def histogram(columns: dict[str, np.ndarray]) -> str:
    """Shares of values (ms) by size, one column each."""
    edges = (*_EDGES_MS, np.inf)
    lines = [f"{'ms':>12}" + "".join(f"{name:>14}" for name in columns)]
    counts = {name: np.histogram(values, edges)[0] for name, values in columns.items()}
    for i, (low, high) in enumerate(pairwise(edges)):
        label = f"{low:g}–{high:g}" if np.isfinite(high) else f"≥ {low:g}"
        shares = (count[i] / max(count.sum(), 1) for count in counts.values())
        lines.append(f"{label:>12}" + "".join(f"{share:>13.2%} " for share in shares))
    return "\n".join(lines)
