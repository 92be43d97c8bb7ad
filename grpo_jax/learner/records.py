"""What the learner writes beside adapters and checkpoints: incarnation, state, batch records."""

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from grpo_jax.errors import RunFailed
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter, canonical_json

log = logging.getLogger(__name__)


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
    """The batch records by step."""
    records = {}
    for key in run.list(layout.BATCHES):
        record = json.loads(run.read(key))
        records[int(record["step"])] = record
    return records


class Heartbeat:
    """Rewrites `learner/state.json` every second from its own thread, so a long compilation is not taken for death."""

    def __init__(self, run: Bucket, incarnation: int, body: Callable[[], dict[str, Any]], interval_s: float = 1.0):
        self._writer = RecordWriter(run, layout.LEARNER_STATE, incarnation)
        self._body, self._interval_s = body, interval_s
        self._run, self._incarnation = run, incarnation
        self._stop = threading.Event()
        self.lost: RunFailed | None = None
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def write(self) -> None:
        self._writer.write(self._body())

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def _beat(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                check_incarnation(self._run, self._incarnation)
                self.write()
            except RunFailed as error:
                self.lost = error
                return
            except Exception:
                log.warning("the learner's state could not be written", exc_info=True)
