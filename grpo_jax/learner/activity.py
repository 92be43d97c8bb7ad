"""What the learner is doing, for whoever watches it: the heartbeat says it, whatever the main thread waits for."""

import time
from typing import Any


class Activity:
    """Set by the main thread, read by others. `waits_for` says of a wait what is to come, in one clause."""

    def __init__(self) -> None:
        self._now: tuple[str, float, str | None] = ("starting", time.monotonic(), None)

    def set(self, doing: str, waits_for: str | None = None) -> None:
        before, since, _ = self._now
        self._now = (doing, since if doing == before else time.monotonic(), waits_for)

    @property
    def waits_for(self) -> str | None:
        return self._now[2]

    def body(self) -> dict[str, Any]:
        """For the learner's state; seconds are of the monotonic clock, which no correction of the time moves."""
        doing, since, waits_for = self._now
        return {"doing": doing, "doing_s": round(time.monotonic() - since, 3), "waits_for": waits_for}
