"""Whether the run is over, read from `run.json`."""

import logging
import time

from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader

log = logging.getLogger(__name__)

POLL_S = 1.0
_FINAL = ("finished", "failed")


class RunEnd:
    """For one thread. `over` reads the bucket once a second at most.

    A final status that stands there at the start may be that of an earlier life, which a learner is about to resume; it
    counts once nobody has changed it for `grace_s`. That a run has failed counts only once its learner, too, has shown
    no sign of life for so long: whoever looks after it may have started it again.
    """

    def __init__(self, run: Bucket, grace_s: float):
        self._reader, self._grace_s = RecordReader(run, layout.RUN), grace_s
        self._learner = RecordReader(run, layout.LEARNER_STATE)
        self._read_at = float("-inf")
        self._first: tuple[int, int] | None = None
        self._over = False

    def over(self) -> bool:
        now = time.monotonic()
        if self._over or now - self._read_at < POLL_S:
            return self._over
        self._read_at = now
        try:
            record = self._reader.read()
            if record is not None and record.get("status") == "failed":
                self._learner.read()
        except Exception as error:  # each kind of bucket raises its own errors; the next reading may succeed
            log.debug("run.json cannot be read: %s", error)
            return False
        if record is None:
            return False
        stamp = record["incarnation"], record["seq"]
        self._first = self._first or stamp
        fresh = stamp != self._first or self._reader.silent_s() >= self._grace_s
        if record.get("status") == "failed":
            fresh = min(self._reader.silent_s(), self._learner.silent_s()) >= self._grace_s
        self._over = record.get("status") in _FINAL and fresh
        return self._over
