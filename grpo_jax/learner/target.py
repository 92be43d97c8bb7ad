"""Whether a run is good enough to end (`optimizer.stop_at_reward`)."""

from collections import deque
from collections.abc import Iterable
from typing import Any

from grpo_jax.config.schema import StopAtReward


class RewardTarget:
    """Fed with the metrics of each step; the rewards of an earlier life count."""

    def __init__(self, config: StopAtReward | None, earlier: Iterable[dict[str, Any]] = ()):
        self._config = config
        self._last: deque[float] = deque(maxlen=config.steps if config else 0)
        for record in earlier:
            self.add(record.get("reward"))

    def add(self, reward: float | None) -> None:
        """The mean reward of the next step; None, if it had none, begins the count anew."""
        if reward is None:
            self._last.clear()
        else:
            self._last.append(reward)

    @property
    def reached(self) -> bool:
        """Whether the mean of the last `steps` steps is at least `value`; never before there are so many."""
        if self._config is None or len(self._last) < self._config.steps:
            return False
        return sum(self._last) / len(self._last) >= self._config.value
