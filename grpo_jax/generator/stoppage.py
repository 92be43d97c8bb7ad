"""Processes that a signal has stopped (SIGSTOP): they live, and do nothing any more. Only Linux tells."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

STOPPED_S = 10.0
"""So long a process may be stopped: whoever has stopped it for a moment has continued it by then."""


class Stoppage:
    """How long a process or any of a family has been stopped, as far as it was looked at."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._since: float | None = None

    def reason(self, pids: Iterable[int], longest_s: float = STOPPED_S) -> str | None:
        """A look. Why what these processes do is as good as dead; None if it is not."""
        if not any(map(is_stopped, pids)):
            self._since = None
            return None
        now = self._clock()
        self._since = now if self._since is None else self._since
        stopped_s = now - self._since
        return f"a signal stopped it {stopped_s:.0f} s ago" if stopped_s >= min(longest_s, STOPPED_S) else None


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process and nothing has continued it. False where there is no /proc."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state == b"T"


def family(pid: int) -> list[int]:
    """A process, what it started and what they did, as far as they live."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            found += family(int(child))
    return found
