"""What the learner writes beside adapters and checkpoints: incarnation, state, batch records."""

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from grpo_jax.errors import RunFailed
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter, canonical_json

log = logging.getLogger(__name__)

T = TypeVar("T")

_SOONEST_LOCAL_S = 0.1
_RETRY_S = 0.5
_LOOKS, _LOOK_AGAIN_S = 4, 1.0


def incarnations(run: Bucket) -> list[int]:
    return sorted(int(key.rsplit("/", 1)[-1].removesuffix(".json")) for key in run.list(layout.INCARNATIONS))


def claim_incarnation(run: Bucket) -> int:
    """Claims the next incarnation of the learner; an older one that is still alive stops when it sees this."""
    number = (incarnations(run) or [0])[-1] + 1
    run.put(f"{layout.INCARNATIONS}/{number:06d}.json", canonical_json({"claimed_at": time.time()}))
    return number


def check_incarnation(run: Bucket, mine: int) -> None:
    newest = (incarnations(run) or [mine])[-1]
    if newest > mine:
        raise RunFailed(f"another learner (incarnation {newest}) has taken over this run; incarnation {mine} stops")


def write_batch(run: Bucket, step: int, group_ids: list[str], version: int, drops: dict[str, str]) -> None:
    """Written before the first gradient of the step: whatever happens then, a resume trains on just these groups."""
    record = {"step": step, "groups": group_ids, "version": version, "drops": drops}
    run.put(layout.batch(step), canonical_json(record))


def read_batches(run: Bucket) -> dict[int, dict[str, Any]]:
    """The batch records by step; RunFailed for one that is not sound after several looks: nothing can be left out."""
    return {int(record["step"]): record for record in (_read_batch(run, key) for key in run.list(layout.BATCHES))}


def _read_batch(run: Bucket, key: str) -> dict[str, Any]:
    """A record that is torn or cannot be seen yet may only be late, so it is looked at again."""
    for look in range(_LOOKS):
        time.sleep(_LOOK_AGAIN_S if look else 0.0)
        try:
            record = json.loads(run.read(key))
            int(record["step"]), list(record["groups"]), dict(record["drops"])
            return record
        except (FileNotFoundError, ValueError, TypeError, KeyError) as error:
            problem = error
    raise RunFailed(f"{key} in {run.address} is not a batch record: {type(problem).__name__}")


def persist(what: str, call: Callable[[], T], check_stop: Callable[[], None]) -> T:
    """The result of `call`, which is tried again and again as long as the bucket fails.

    Args:
      what: names it in the log.
      check_stop: raises what ends the waiting; called before each new attempt.
    """
    troubled = False
    while True:
        try:
            result = call()
        except OSError as error:
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
        self._stop, self._news = threading.Event(), threading.Event()
        self.lost: RunFailed | None = None
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

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
            except RunFailed as error:
                self.lost = error
                return
            except Exception:
                log.warning("the learner's state could not be written", exc_info=True)
