"""The spool: whole groups as immutable objects under `rollouts/`. Consumption is a ledger elsewhere, never deletion."""

import logging
import time
from collections.abc import Callable, Collection, Mapping

from grpo_jax.rollouts.sample import Group, GroupError
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket, BucketError, ObjectTooLarge
from grpo_jax.storage.deleted import deleted_ids

log = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""A file that is not sound may still be on its way (torn, or an old view of it): so long it is looked at again."""

_SUFFIX = ".safetensors"


class SpoolWriter:
    """`worker` names its folder: one life of a worker, so that a group's file is written by nobody else."""

    def __init__(self, run: Bucket, worker: str):
        self._run, self._worker = run, worker

    def write(self, group: Group) -> None:
        self._run.put(layout.rollout(self._worker, str(group.id)), group.to_bytes())


class SpoolReader:
    """Hands on each good group once; what is refused is counted, logged and left where it is."""

    def __init__(
        self,
        run: Bucket,
        skip: Collection[str] = (),
        patience_s: float = PATIENCE_S,
        *,
        check: Callable[[Group], str | None] = lambda group: None,
        files: Mapping[str, str] | None = None,
        max_bytes: int | None = None,
    ):
        """
        Args:
          skip: ids of groups that need not be read again.
          patience_s: from the first look at an unsound file until it is refused.
          check: says what is wrong with a group whose file is sound, if anything; it is refused at once then.
          files: group id → key, of groups whose file is known; another file with their id is refused.
          max_bytes: of a file; a larger one is not read.
        """
        self._run, self._skip, self._patience_s = run, frozenset(skip), patience_s
        self._check, self._max_bytes = check, max_bytes
        self._files = dict(files or {})
        self._seen: set[str] = set()
        self._unsound_since: dict[str, float] = {}
        self.sizes: dict[str, int] = {}
        """Key → bytes, of the files that were good."""
        self.rejected: dict[str, str] = {}
        """Key of a refused file → what is wrong with it; the oldest first."""

    def file(self, name: str) -> str | None:
        """The key of the file of the group with this id, as far as it is known."""
        return self._files.get(name)

    @property
    def lost(self) -> list[str]:
        """The ids of which there is no file but refused ones."""
        return [name for name in map(group_id, list(self.rejected)) if name not in self._files]

    def poll(self) -> list[Group]:
        """The groups that have appeared since the last call, in the order of their keys.

        BucketError if the bucket answers nothing. If it fails half-way, what was read is returned, the rest later.
        """
        groups: list[Group] = []
        for key in self._run.list(layout.ROLLOUTS):
            if key in self._seen or not key.endswith(_SUFFIX):
                continue
            name = group_id(key)
            if self._files.get(name, key) != key:
                self._refuse(key, f"the group {name} is there already, as {self._files[name]}")
                continue
            if name in self._skip:
                continue
            try:
                data = self._run.read_or_none(key, self._max_bytes)
                if data is None:  # listed before it can be read, or deleted since: it is looked at again
                    continue
                group = Group.from_bytes(data)
            except (GroupError, ObjectTooLarge) as error:
                self._leave_out(key, str(error))
                continue
            except BucketError:
                if not groups:
                    raise
                log.warning("spool: the rest is read later", exc_info=True)
                return groups
            if problem := self._problem(group, name):
                self._refuse(key, problem)
                continue
            self._seen.add(key)
            self._unsound_since.pop(key, None)
            self._files[name], self.sizes[key] = key, len(data)
            groups.append(group)
        return groups

    def _problem(self, group: Group, name: str) -> str | None:
        if str(group.id) != name:
            return f"it holds the group {group.id}"
        return self._check(group)

    def _leave_out(self, key: str, reason: str) -> None:
        """Refuses a file once it has been unsound for long enough."""
        now = time.monotonic()
        if now - self._unsound_since.setdefault(key, now) >= self._patience_s:
            self._refuse(key, reason)

    def _refuse(self, key: str, reason: str) -> None:
        self._seen.add(key)
        self._unsound_since.pop(key, None)
        self.rejected[key] = reason
        log.warning("spool: %s is left out: %s", key, reason)


def group_ids(run: Bucket) -> list[str]:
    """The ids of all groups that have ever been in the spool, from their keys alone."""
    there = [group_id(key) for key in run.list(layout.ROLLOUTS)]
    # In this order: what is deleted between the two is in one of them.
    return [*there, *sorted(set(deleted_ids(run)) - set(there))]


def group_id(key: str) -> str:
    """The id in the key of a spool file."""
    return key.rsplit("/", 1)[-1].removesuffix(_SUFFIX)
