"""How busy the replicas were: means of their heartbeats over the time of a step."""

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any


class FleetLoad:
    """Fed by the thread that reads the heartbeats, asked by the loop once a step."""

    def __init__(self, slots_each: int):
        """`slots_each`: samples that one replica works on at a time."""
        self._slots_each = slots_each
        self._lock = threading.Lock()
        self._sums: tuple[float, ...] = (0.0, 0.0, 0.0)
        self._seconds = 0.0
        self._seen_at: float | None = None

    def see(self, replicas: Iterable[Mapping[str, Any]], now: float | None = None) -> None:
        """The heartbeats as they are now; they are taken to have held since the last look."""
        now = time.monotonic() if now is None else now
        ready = [r for r in replicas if r.get("state") == "ready"]
        loads = (
            float(self._slots_each * len(ready)),
            float(sum(r.get("running", 0) for r in ready)),
            float(sum(r.get("waiting", 0) for r in ready)),
        )
        with self._lock:
            if ready and self._seen_at is not None:
                seconds = now - self._seen_at
                self._seconds += seconds
                self._sums = tuple(s + x * seconds for s, x in zip(self._sums, loads, strict=True))
            self._seen_at = now

    def take(self) -> dict[str, float]:
        """`fleet/slots`, `fleet/running` and `fleet/waiting`, in samples, since the last call; {} if none was seen."""
        with self._lock:
            sums, seconds = self._sums, self._seconds
            self._sums, self._seconds = (0.0, 0.0, 0.0), 0.0
        names = ("fleet/slots", "fleet/running", "fleet/waiting")
        return {name: s / seconds for name, s in zip(names, sums, strict=True)} if seconds > 0 else {}
