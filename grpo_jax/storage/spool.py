"""The spool: whole groups as immutable objects under `rollouts/`. Consumption is a ledger elsewhere, never deletion."""

import logging
import time
from collections.abc import Collection

from grpo_jax.rollouts.sample import Group, GroupError
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket, BucketError, ObjectTooLarge

log = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""A file that is not sound may still be on its way (torn, or an old view of it): so long it is looked at again."""


class SpoolWriter:
    def __init__(self, run: Bucket, worker: str):
        self._run, self._worker = run, worker

    def write(self, group: Group) -> None:
        self._run.put(layout.rollout(self._worker, str(group.id)), group.to_bytes())


class SpoolReader:
    """Hands on each sound group once; unsound files are counted, logged and left where they are."""

    def __init__(self, run: Bucket, skip: Collection[str] = (), patience_s: float = PATIENCE_S):
        """`skip`: ids of groups that need not be read again. `patience_s`: from the first look at an unsound file."""
        self._run, self._skip, self._patience_s = run, frozenset(skip), patience_s
        self._seen: set[str] = set()
        self._unsound_since: dict[str, float] = {}
        self.rejected: dict[str, str] = {}
        """Group id → what is wrong with its file."""

    def poll(self) -> list[Group]:
        """The groups that have appeared since the last call, in the order of their keys.

        BucketError if the bucket answers nothing. If it fails half-way, what was read is returned, the rest later.
        """
        groups: list[Group] = []
        for key in self._run.list(layout.ROLLOUTS):
            if key in self._seen or not key.endswith(".safetensors") or _id(key) in self._skip:
                continue
            try:
                data = self._run.read_or_none(key)
                if data is None:  # listed before it can be read: it is looked at again
                    continue
                groups.append(Group.from_bytes(data))
            except (GroupError, ObjectTooLarge) as error:
                self._leave_out(key, str(error))
                continue
            except BucketError:
                if not groups:
                    raise
                log.warning("spool: the rest is read later", exc_info=True)
                return groups
            self._seen.add(key)
            self._unsound_since.pop(key, None)
        return groups

    def _leave_out(self, key: str, reason: str) -> None:
        """Rejects a file once it has been unsound for long enough."""
        now = time.monotonic()
        if now - self._unsound_since.setdefault(key, now) < self._patience_s:
            return
        self._seen.add(key)
        del self._unsound_since[key]
        self.rejected[_id(key)] = reason
        log.warning("spool: %s is left out: %s", key, reason)


def group_ids(run: Bucket) -> list[str]:
    """The ids of all groups in the spool, from their keys alone."""
    return [_id(key) for key in run.list(layout.ROLLOUTS)]


def _id(key: str) -> str:
    return key.rsplit("/", 1)[-1].removesuffix(".safetensors")
