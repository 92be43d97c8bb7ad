"""The spool: whole groups as immutable objects under `rollouts/`. Consumption is a ledger elsewhere, never deletion."""

import logging
from collections.abc import Collection

from grpo_jax.rollouts.sample import Group, GroupError
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket

log = logging.getLogger(__name__)


class SpoolWriter:
    def __init__(self, run: Bucket, worker: str):
        self._run, self._worker = run, worker

    def write(self, group: Group) -> None:
        self._run.put(layout.rollout(self._worker, str(group.id)), group.to_bytes())


class SpoolReader:
    """Hands on each sound group once; unsound files are counted, logged and left where they are."""

    def __init__(self, run: Bucket, skip: Collection[str] = ()):
        """`skip`: ids of groups that need not be read again."""
        self._run, self._skip = run, frozenset(skip)
        self._seen: set[str] = set()
        self.rejected: dict[str, str] = {}
        """Group id → what is wrong with its file."""

    def poll(self) -> list[Group]:
        """The groups that have appeared since the last call, in the order of their keys."""
        groups = []
        for key in self._run.list(layout.ROLLOUTS):
            if key in self._seen or not key.endswith(".safetensors") or _id(key) in self._skip:
                continue
            data = self._run.read_or_none(key)
            if data is None:  # listed before it can be read: it is looked at again
                continue
            self._seen.add(key)
            try:
                groups.append(Group.from_bytes(data))
            except GroupError as error:
                self.rejected[_id(key)] = str(error)
                log.warning("spool: %s is left out: %s", key, error)
        return groups


def group_ids(run: Bucket) -> list[str]:
    """The ids of all groups in the spool, from their keys alone."""
    return [_id(key) for key in run.list(layout.ROLLOUTS)]


def _id(key: str) -> str:
    return key.rsplit("/", 1)[-1].removesuffix(".safetensors")
