"""Which replicas take requests and answer none. Times are monotonic seconds, told by the caller."""

from collections.abc import Iterable

from grpo_jax.proxy.replica import Replica

# A replica with work has stalled when it has answered nothing for so long, and for so many times as long as the slowest
# of the last answers took, while others did answer.
STALL_S, STALL_FACTOR = 10.0, 3.0
# It is given up, with all that it was sent, after so many times that.
ABANDON_FACTOR = 3.0
_DECAY = 0.99  # of the slowest answer, with every further one


class Pace:
    """How fast the fleet answers. Without any answer nothing is late: the first may wait for a server to compile."""

    def __init__(self) -> None:
        self._slowest_s = 0.0
        self._answered_at = float("-inf")

    def answered(self, seconds: float, now: float) -> None:
        self._slowest_s = max(seconds, _DECAY * self._slowest_s)
        self._answered_at = now

    @property
    def patience_s(self) -> float:
        return max(STALL_S, STALL_FACTOR * self._slowest_s)

    def stalled(self, replicas: Iterable[Replica], now: float) -> list[Replica]:
        if now - self._answered_at > self.patience_s:
            return []
        return [r for r in replicas if r.in_flight and now - r.progressed_at > self.patience_s]
