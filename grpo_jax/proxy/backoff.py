"""How long something that failed is left alone: strikes, back-off, single trials before it is trusted again."""

from dataclasses import dataclass

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
# A trial that has not failed after so long lets another follow: it need not have ended, completions can take minutes.
TRIAL_S = 1.0


@dataclass
class Backoff:
    """Strikes of one replica, or of one policy on it. Times are monotonic seconds, told by the caller."""

    count: int = 0
    until: float = float("-inf")
    _struck_at: float = float("-inf")

    def blocked(self, now: float) -> bool:
        return now < self.until

    def strike(self, now: float, began: float) -> bool:
        """Notes the failure of an attempt that began at `began`; returns whether it is news.

        Attempts that were under way at the last strike fail of the same cause. They prolong the pause but do not double
        it, else one restart under load would count as dozens of failures.
        """
        news = self.count == 0 or began >= self._struck_at
        if news:
            self.count += 1
            self._struck_at = now
        self.until = max(self.until, now + self._delay_s)
        return news

    def begin(self, now: float) -> None:
        """An attempt starts. Until one succeeds they go singly: what fails fast, or hangs, looks idle and draws all."""
        if self.count:
            self.until = max(self.until, now + max(TRIAL_S, self._delay_s))

    def reset(self) -> None:
        self.count, self.until = 0, float("-inf")

    @property
    def _delay_s(self) -> float:
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** min(self.count - 1, 16))
