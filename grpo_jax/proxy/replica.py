"""One replica as the router knows it."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from yarl import URL

from grpo_jax.proxy.backoff import Backoff


@dataclass
class Replica:
    id: str
    url: URL
    number: int = 0  # of what it holds in its prefix cache: another number, an empty cache
    ready: bool = False
    proved: dict[str, int] = field(default_factory=dict)  # name of a policy of this run → its version
    newest: str | None = None  # what `latest` is here
    quarantined: Mapping[str, str] = field(default_factory=dict)  # name → reason
    in_flight: int = 0  # samples that this proxy waits for
    named: deque[float] = field(default_factory=deque)  # groups that were told its policy: until when they count
    last_used: int = 0
    progressed_at: float = float("-inf")  # the last answer, or the end of idleness
    health: Backoff = field(default_factory=Backoff)
    denied: dict[str, Backoff] = field(default_factory=dict)  # policies that it failed to serve
    last_error: str | None = None
    # Of all its life:
    requests_total: int = 0  # answered
    samples_total: int = 0  # answered
    strikes_total: int = 0

    def serves(self, policy: str, now: float) -> bool:
        if not self.ready or policy not in self.proved or now < self.health.until:
            return False
        denied = self.denied.get(policy) if self.denied else None
        return denied is None or not denied.blocked(now)

    def choose_newest(self, window: Sequence[str]) -> None:
        """The first of the run's window (newest first) that is proved here.

        Where none is, the proved policy of the highest version; of two lineages with one version the one proved later.
        A version alone says little: a run that was resumed from an older checkpoint counts up again from there.
        """
        inside = next((name for name in window if name in self.proved), None)
        self.newest = inside or max(reversed(self.proved), key=self.proved.__getitem__, default=None)
