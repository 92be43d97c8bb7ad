"""What a replay trains on: the batch records and the spool of a run that has been trained before."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from grpo_jax.errors import UsageError
from grpo_jax.learner.history import History
from grpo_jax.rollouts.sample import Group, GroupError
from grpo_jax.storage import layout
from grpo_jax.storage.batches import BatchRecord, read_batches
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.spool import group_id


class Source:
    """The recorded batches of a run, step after step. Groups are read when they are asked for, never all at once."""

    def __init__(self, run: Bucket, record: dict[str, Any]):
        """
        Args:
          run: the run's prefix.
          record: its run.json.

        Raises:
          UsageError: nothing was trained, or groups that were are no longer in the spool; the steps are named.
        """
        self._run, self.record = run, record
        self._batches = read_batches(run)
        self._history = History(self._batches)
        self.steps = next((t for t in range(len(self._batches) + 1) if t not in self._batches), 0)
        if not self.steps:
            raise UsageError(f"{run.address}: no step has been recorded, so there is nothing to train again")
        there = run.list(layout.ROLLOUTS)
        by_id = {group_id(key): key for key in there}
        self._keys = [batch_keys(self._batches[t], by_id) for t in range(self.steps)]
        gone = [t for t, keys in enumerate(self._keys) if not set(there).issuperset(keys)]
        if gone:
            raise UsageError(
                f"{run.address}: groups of {_spans(gone)} are no longer in the spool (see rollouts.keep), and a replay "
                "needs those of every step"
            )

    def dropped(self, step: int) -> Counter[str]:
        """Reason → groups that the run had dropped when this step began."""
        return self._history.dropped(step)

    def batch(self, step: int) -> BatchRecord:
        """The record of a step: `groups` (ids in order), `version`, `drops`."""
        return self._batches[step]

    def groups(self, step: int) -> list[Group]:
        """The groups that the step trained, in its order. UsageError names one that is not sound any more."""
        return [read_group(self._run, key) for key in self._keys[step]]

    @property
    def label(self) -> dict[str, Any]:
        """Says in the record of a replay which run it is one of."""
        return {
            "run": self.record["run"],
            "address": self._run.address,
            "created_at": self.record.get("created_at"),
            "steps": self.steps,
        }


def batch_keys(batch: BatchRecord, by_id: Mapping[str, str]) -> list[str]:
    """The keys of a batch's files. Older records name no files: there `by_id` says, "" for one that is not there."""
    return [key for key, _ in batch["files"]] or [by_id.get(group, "") for group in batch["groups"]]


def read_group(run: Bucket, key: str) -> Group:
    """UsageError if there is no sound group under `key`."""
    try:
        return Group.from_bytes(run.read(key))
    except (GroupError, OSError) as error:
        raise UsageError(f"{key} in {run.address} cannot be read: {error}") from None


def _spans(steps: Iterable[int]) -> str:
    """`steps 0-3, 7`: sorted numbers, runs of them as from-to."""
    ordered = list(steps)
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b != a + 1), ordered[-1]]
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"step{'s' if len(ordered) > 1 else ''} {', '.join(spans)}"
