"""What each policy was asked for: samples, and how many of them found their prompt where it had been before."""

from collections import OrderedDict
from dataclasses import dataclass

MAX_POLICIES = 16


@dataclass
class Usage:
    """Counts of samples that were answered.

    `possible`: those whose whole prompt had been sent to some replica before under this policy, the siblings within one
    request included; no routing could do better. `hits`: those that were sent where that was.
    """

    samples: int = 0
    possible: int = 0
    hits: int = 0

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.samples if self.samples else None

    @property
    def best_hit_rate(self) -> float | None:
        return self.possible / self.samples if self.samples else None

    def add(self, samples: int, seen: bool, seen_there: bool) -> None:
        """A request of `samples` siblings: all but the first hit, and the first too if its prompt had been there."""
        self.samples += samples
        self.possible += samples - (not seen)
        self.hits += samples - (not seen_there)


class UsageTable:
    """`total`, and the usage of the policies that were used last; older ones are forgotten."""

    def __init__(self) -> None:
        self.total = Usage()
        self._policies: OrderedDict[str, Usage] = OrderedDict()

    def add(self, policy: str, samples: int, seen: bool, seen_there: bool) -> None:
        usage = self._policies.get(policy)
        if usage is None:
            usage = self._policies[policy] = Usage()
            if len(self._policies) > MAX_POLICIES:
                self._policies.popitem(last=False)
        self._policies.move_to_end(policy)
        usage.add(samples, seen, seen_there)
        self.total.add(samples, seen, seen_there)

    def policies(self) -> dict[str, Usage]:
        """The policy used last comes first."""
        return dict(reversed(self._policies.items()))
