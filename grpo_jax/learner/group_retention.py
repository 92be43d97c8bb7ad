"""Deletes groups from the spool that no restart can ask for (`rollouts.keep`): those that all checkpoints contain.

First the run's list of deleted groups is written, then they are deleted: a worker that starts anew counts them from
the one or from the other, and draws none of them again.
"""

from collections.abc import Callable, Mapping

from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.deleted import deleted_body
from grpo_jax.storage.records import RecordWriter
from grpo_jax.storage.spool import group_id

_GB = 1_000_000_000


class GroupRetention:
    """One round is `collect`. For one thread."""

    def __init__(self, run: Bucket, incarnation: int, keep_gb: float, sizes: Callable[[], Mapping[str, int]]):
        """
        Args:
          keep_gb: how much of the spool may stay, in 10^9 bytes; 0: nothing that can be deleted.
          sizes: key → bytes, of files whose size is known; others count as much as these on average.
        """
        self._run, self._keep_bytes, self._sizes = run, keep_gb * _GB, sizes
        self._record = RecordWriter(run, layout.DELETED, incarnation)

    def collect(self, settled: Mapping[str, int]) -> list[str]:
        """Deletes files of `settled` groups (id → step), the oldest steps first, and returns their keys.

        Raises:
          OSError: the bucket failed; what was deleted is on the list.
        """
        files: dict[str, list[str]] = {}
        keys = self._run.list(layout.ROLLOUTS)
        for key in keys:
            files.setdefault(group_id(key), []).append(key)
        deletable = [key for group in settled for key in files.get(group, ())]
        doomed = deletable if not self._keep_bytes else self._oldest(deletable, keys)
        if not doomed:
            return []
        staying = files.keys() - set(map(group_id, doomed))
        self._record.write(deleted_body(group for group in settled if group not in staying))
        for key in doomed:
            self._run.delete(key)
        return doomed

    def _oldest(self, deletable: list[str], keys: list[str]) -> list[str]:
        """Of the deletable files as many as are too much."""
        sizes = self._sizes_of(keys)
        too_much = sum(sizes.values()) - self._keep_bytes
        doomed = []
        for key in deletable:
            if too_much <= 0:
                break
            too_much -= sizes[key]
            doomed.append(key)
        return doomed

    def _sizes_of(self, keys: list[str]) -> dict[str, float]:
        known = self._sizes()
        mean = sum(known.values()) / len(known) if known else 0.0
        return {key: float(known.get(key, mean)) for key in keys}
