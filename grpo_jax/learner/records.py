"""What the learner says of itself all the time, and how it stands a bucket that fails."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from grpo_jax.errors import RunFailed
from grpo_jax.learner.fence import check_incarnation
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter

log = logging.getLogger(__name__)

T = TypeVar("T")

_SOONEST_LOCAL_S = 0.1
_RETRY_S = 0.5
_CONFIRM_EVERY_S = 10.0
_GIVE_UP_S = 900.0


def persist(what: str, call: Callable[[], T], check_stop: Callable[[], None], give_up_s: float = _GIVE_UP_S) -> T:
    """The result of `call`, which is tried again and again as long as the bucket fails.

    Args:
      what: names it in the log.
      check_stop: raises what ends the waiting; called before each new attempt.
      give_up_s: seconds after which a failure is the run's; RunFailed then.
    """
    began, troubled = time.monotonic(), False
    while True:
        try:
            result = call()
        except OSError as error:
            if time.monotonic() - began > give_up_s:
                raise RunFailed(f"{what} has failed for {give_up_s:.0f} s: {error}") from None
            if not troubled:
                log.warning("%s fails and is tried until it works: %s", what, error)
            troubled = True
        else:
            if troubled:
                log.info("%s works again", what)
            return result
        time.sleep(_RETRY_S)
        check_stop()


class Heartbeat:
    """Rewrites `learner/state.json` every second from its own thread, so a long compilation is not taken for death."""

    def __init__(self, run: Bucket, incarnation: int, body: Callable[[], dict[str, Any]], interval_s: float = 1.0):
        self._writer = RecordWriter(run, layout.LEARNER_STATE, incarnation)
        self._body, self._interval_s = body, interval_s
        self._soonest_s = _SOONEST_LOCAL_S if run.is_local else interval_s
        self._run, self._incarnation = run, incarnation
        self._confirmed: RecordWriter | None = None
        self._confirmed_at = time.monotonic()
        self._stop, self._news = threading.Event(), threading.Event()
        self.lost: RunFailed | None = None
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def confirm(self, writer: RecordWriter) -> None:
        """From now on looks every few seconds whether the last value of a record that is seldom written stands."""
        self._confirmed = writer

    def write(self) -> None:
        """In the foreground. Raises OSError where the bucket does not take it."""
        self._writer.write(self._body())

    def announce(self) -> None:
        """There is news: written soon, by the thread, whatever the bucket does."""
        self._news.set()

    def close(self) -> None:
        self._stop.set()
        self._news.set()
        self._thread.join(5)

    def _beat(self) -> None:
        while not self._stop.wait(self._soonest_s):
            self._news.wait(self._interval_s - self._soonest_s)
            if self._stop.is_set():
                return
            self._news.clear()
            try:
                check_incarnation(self._run, self._incarnation)
                self.write()
                self._confirm()
            except RunFailed as error:
                self.lost = error
                return
            except Exception:
                log.warning("the learner's state could not be written", exc_info=True)

    def _confirm(self) -> None:
        if self._confirmed is None or time.monotonic() - self._confirmed_at < _CONFIRM_EVERY_S:
            return
        self._confirmed_at = time.monotonic()
        if not self._confirmed.confirm():
            log.warning("the bucket showed an older record of the run; the newest is written again")
