"""The logs of several jobs as one stream of lines, each once, however often the connection is lost."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 30.0
_KEPT = 20
_SHOWN_ON_ATTACH = 20


class JobLogs:
    """A thread for each job. `logs(job_id, follow)` gives the lines of a job's log, always from its beginning.

    Lines are counted: after a lost connection those that were seen are passed over.
    """

    def __init__(
        self,
        logs: Callable[[str, bool], Iterator[str]],
        show: Callable[[str, str], None],
        first_wait_s: float = 1.0,
    ):
        """`show(slot, line)` is called in any thread, for one line at a time."""
        self._logs, self._show_line, self._first_wait_s = logs, show, first_wait_s
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        self._last: dict[str, deque[str]] = {}

    def follow(self, job_id: str, slot: str, *, from_start: bool) -> None:
        """Does nothing for a job that is followed already. `from_start=False`: only the last lines of what there is."""
        if job_id in self._threads:
            return
        self._last[job_id] = deque(maxlen=_KEPT)
        thread = threading.Thread(target=self._follow, args=(job_id, slot, from_start), name=f"log-{slot}", daemon=True)
        self._threads[job_id] = thread
        thread.start()

    def last_line(self, job_id: str) -> str:
        """The last line of a job's log that says something, as far as it was seen."""
        return next((line for line in reversed(self._last.get(job_id, ())) if line.strip()), "")

    def wait(self, job_id: str, timeout_s: float) -> None:
        """Until the log of a job that has ended is read to its end."""
        if job_id in self._threads:
            self._threads[job_id].join(timeout_s)

    def close(self) -> None:
        self._stop.set()

    def _follow(self, job_id: str, slot: str, from_start: bool) -> None:
        seen, wait_s = 0, self._first_wait_s
        while not self._stop.is_set():
            try:
                if not from_start:
                    lines = list(self._logs(job_id, False))
                    seen, from_start = len(lines), True
                    for line in lines[-_SHOWN_ON_ATTACH:]:
                        self._show(job_id, slot, line)
                # For the client a stream that breaks just when its job ends is complete, without its rest: hence twice.
                for follow in (True, False):
                    for line in islice(self._logs(job_id, follow), seen, None):
                        seen, wait_s = seen + 1, self._first_wait_s
                        if self._stop.is_set():
                            return
                        self._show(job_id, slot, line)
                return
            except Exception as error:  # of the Hub or of the connection, in the words of whatever client it has
                log.debug("the log of %s: %r", slot, error)
            self._stop.wait(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _show(self, job_id: str, slot: str, line: str) -> None:
        with self._lock:
            self._last[job_id].append(line)
            self._show_line(slot, line)
