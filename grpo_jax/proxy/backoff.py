"""How long something that failed is left alone: strikes, exponential back-off, one trial before it is trusted again."""

from dataclasses import dataclass

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
# A trial that has not failed after so long lets others follow: it need not have ended, completions can take minutes.
TRIAL_S = 1.0


@dataclass
class Backoff:
    """Strikes of one replica, or of one policy on it. Times are monotonic seconds, told by the caller."""

    count: int = 0
    until: float = float("-inf")
    _struck_at: float = float("-inf")
    _tried: bool = False

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
            self._tried = False
        delay = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** min(self.count - 1, 16))
        self.until = max(self.until, now + delay)
        return news

    def begin(self, now: float) -> None:
        """An attempt starts. The first after a strike goes alone: what fails fast looks idle and draws the rest."""
        if self.count and not self._tried:
            self._tried = True
            self.until = max(self.until, now + TRIAL_S)

    def reset(self) -> None:
        self.count, self.until, self._tried = 0, float("-inf"), False
