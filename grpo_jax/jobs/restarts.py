"""How often a role may be started again: a budget that is spent by dying and earned back by living."""

from dataclasses import dataclass

EARN_S = 60.0
"""A life of so many seconds gives one restart back."""
_BACK_OFF_S = (0.5, 2.0, 5.0, 15.0, 30.0)


@dataclass
class Restarts:
    """The budget of one role.

    Each restart costs one. A life earns one back for every `EARN_S`, but only if the run has meanwhile come further
    than it ever was: a role that dies at the same place again and again ends the run, however long it takes to get
    there.
    """

    most: int
    total: int = 0
    _spent: int = 0
    _furthest: int = 0

    def ended(self, lived_s: float, steps: int) -> float | None:
        """Seconds until the next start, after a life of `lived_s` seconds; None if there is to be none.

        Args:
          steps: how far the run has ever come.
        """
        if steps > self._furthest:
            self._spent = max(0, self._spent - int(lived_s // EARN_S))
            self._furthest = steps
        if self._spent >= self.most:
            return None
        pause_s = _BACK_OFF_S[min(self._spent, len(_BACK_OFF_S) - 1)]
        self._spent += 1
        self.total += 1
        return pause_s
