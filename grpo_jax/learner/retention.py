"""Deletes adapters that nothing can ask for any more, so that a run of any length holds few of them.

By acknowledgement: an adapter stays as long as the pointer names it, as a live replica's heartbeat lists it, or as a
restart from a kept checkpoint could ask for it. v0, probes and what is newer than the pointer's window stay in any
case. Whether a replica lives is judged on this reader's own clock: a record that does not change counts as live until
it has been watched for long enough.
"""

import logging
import threading
from collections.abc import Callable, Collection
from typing import NamedTuple

from grpo_jax.adapters.names import parse_policy
from grpo_jax.learner.fence import TakenOver
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader

log = logging.getLogger(__name__)

_LOCAL_PERIOD_S, _REMOTE_PERIOD_S = 2.0, 30.0


class Needed(NamedTuple):
    """What has to stay whatever the replicas list."""

    names: Collection[str]
    oldest: int
    """Version from which on all stay."""


class AdapterRetention:
    """One round is `collect`. For one thread."""

    def __init__(self, root: Bucket, run: Bucket, fleet: str, silent_s: float):
        """
        Args:
            root: the bucket, with the fleet and the run below it.
            run: the run's prefix.
            silent_s: seconds without a change after which a heartbeat lists nothing any more.
        """
        self._root, self._run, self._prefix, self._silent_s = root, run, layout.replicas(fleet), silent_s
        self._readers: dict[str, RecordReader] = {}
        self.deleted = 0

    def collect(self, needed: Needed) -> list[str]:
        """Deletes what is not needed, and returns its names.

        Raises:
            OSError: the bucket failed; nothing was deleted that a replica may list.
        """
        keep = {*needed.names, *self._listed()}
        there = dict.fromkeys(key.split("/")[1] for key in self._run.list(layout.ADAPTERS))
        gone = [name for name in there if name not in keep and 0 < _version(name) < needed.oldest]
        for name in gone:
            # The manifest goes first: without it the adapter does not exist, however far the rest comes.
            self._run.delete(layout.adapter(name, layout.MANIFEST))
            self._run.delete_folder(f"{layout.ADAPTERS}/{name}")
            self.deleted += 1
        return gone

    def _listed(self) -> set[str]:
        """The policies in the heartbeats of live replicas."""
        names: set[str] = set()
        for key in {*self._root.list(self._prefix), *self._readers}:
            reader = self._readers.setdefault(key, RecordReader(self._root, key))
            record = reader.read()
            if record is not None and reader.silent_s() <= self._silent_s:
                names.update(record.get("loaded", ()), record.get("proved", ()))
        return names


class RetentionThread:
    """Deletes every few seconds, and tells nobody but the log when the bucket fails."""

    def __init__(self, what: str, collect: Callable[[], Collection[str]], local: bool):
        """
        Args:
            what: names it in the log.
            collect: one round; returns what it has deleted.
        """
        self._what, self._collect = what, collect
        self._period_s = _LOCAL_PERIOD_S if local else _REMOTE_PERIOD_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="retention", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def _work(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                gone = self._collect()
            except TakenOver:
                return
            except Exception as error:  # every kind of bucket raises errors of its own; the next round may succeed
                log.warning("%s that nobody needs could not be deleted: %s", self._what, error)
                continue
            if gone:
                log.debug("deleted %s", ", ".join(gone))


def _version(name: str) -> int:
    """0 for what is no version of a run, and for v0."""
    try:
        return parse_policy(name).version or 0
    except ValueError:
        return 0
