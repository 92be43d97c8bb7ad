"""Whether memory, descriptors or files grow: slopes over the lives of the parts, after their warm-up.

Of the floor: a step's buffers come and go, so what counts is the least that a part held in each window of time.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from experiments.chaos.parts import Held

WARM_UP_S = 60.0
"""Of a life, which loads and compiles."""
_FEWEST = 3
"""Windows of a life that say anything about it."""


@dataclass
class Growth:
    """Samples by (part, pid): seconds since the life was first seen, and what it held."""

    window_s: float
    """At least as long as a step."""
    lives: dict[tuple[str, int], list[tuple[float, Held]]] = field(default_factory=lambda: defaultdict(list))
    _began: dict[tuple[str, int], float] = field(default_factory=dict)

    def series(self) -> dict[str, list[tuple[float, int, int, int]]]:
        """All samples, by part and process: seconds, bytes, descriptors, threads."""
        return {
            f"{part} {pid}": [(round(t, 1), h.rss, h.descriptors, h.threads) for t, h in samples]
            for (part, pid), samples in self.lives.items()
        }

    def note(self, part: str, pid: int, held: Held, now: float) -> None:
        began = self._began.setdefault((part, pid), now)
        self.lives[part, pid].append((now - began, held))

    def slopes(self, what: str) -> dict[str, tuple[float, float]]:
        """Per minute, by part, with its standard error: one line through all lives, each with an offset of its own.

        Args:
          what: a field of `Held`.
        """
        lives: dict[str, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
        for (part, _), samples in self.lives.items():
            t, y = self._floor(samples, what)
            if len(t) >= _FEWEST:
                lives[part].append((t - t.mean(), y - y.mean()))
        found = {}
        for part, of_part in sorted(lives.items()):
            t, y = (np.concatenate(parts) for parts in zip(*of_part, strict=True))
            slope = (t @ y) / (t @ t)
            free = len(t) - len(of_part) - 1
            found[part] = 60 * float(slope), 60 * float(np.sqrt(np.sum((y - slope * t) ** 2) / free / (t @ t)))
        return found

    def watched_s(self) -> dict[str, float]:
        """Seconds of the lives of each part that its slope is of, all together."""
        found: dict[str, float] = defaultdict(float)
        for (part, _), samples in self.lives.items():
            windows = len(self._floor(samples, "rss")[0])
            found[part] += self.window_s * windows if windows >= _FEWEST else 0.0
        return dict(found)

    def means(self, what: str) -> dict[str, float]:
        found: dict[str, list[np.ndarray]] = defaultdict(list)
        for (part, _), samples in self.lives.items():
            found[part].append(_settled(samples, what)[1])
        return {part: float(np.concatenate(values).mean()) for part, values in found.items() if sum(map(len, values))}

    def _floor(self, samples: list[tuple[float, Held]], what: str) -> tuple[np.ndarray, np.ndarray]:
        """Of each whole window of a life after its warm-up: seconds, and the least that was held."""
        t, y = _settled(samples, what)
        number = ((t - t[0]) // self.window_s).astype(int) if len(t) else t.astype(int)
        whole = range(number[-1]) if len(t) else range(0)
        filled = [i for i in whole if np.any(number == i)]
        return np.array([self.window_s * i for i in filled]), np.array([y[number == i].min() for i in filled])


def _settled(samples: list[tuple[float, Held]], what: str) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and values of a life after its warm-up: `WARM_UP_S`, and the first half of it in any case."""
    since = max(WARM_UP_S, samples[-1][0] / 2)
    t = np.array([t for t, _ in samples if t >= since])
    return t, np.array([getattr(held, what) for t, held in samples if t >= since], float)
