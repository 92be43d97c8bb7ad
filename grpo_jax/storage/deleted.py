"""Which groups of a run have been deleted from its spool (`rollouts.keep`): they were there, none is drawn again.

The ids are kept as ranges of the data index, so that the record stays small however long the run is.
"""

from collections.abc import Iterable
from typing import Any

from grpo_jax.rollouts.sample import GroupId
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket, BucketError
from grpo_jax.storage.records import RecordReader

_MOST = 10_000_000  # groups in a range; no run has as many


def deleted_ids(run: Bucket) -> list[str]:
    """The ids of the groups that were deleted, sorted. BucketError if what stands there is no such list."""
    record = RecordReader(run, layout.DELETED).read()
    try:
        return [] if record is None else sorted(_expanded(record["groups"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BucketError(f"{layout.DELETED} in {run.address} is no list of groups: {error}") from None


def deleted_body(ids: Iterable[str]) -> dict[str, Any]:
    """What `layout.DELETED` says when these groups are deleted: [epoch, attempt, first index, last index], sorted."""
    ranges: list[list[int]] = []
    for epoch, attempt, index in sorted((g.epoch, g.attempt, g.index) for g in map(GroupId.parse, ids)):
        if ranges and ranges[-1][:2] == [epoch, attempt] and ranges[-1][3] == index - 1:
            ranges[-1][3] = index
        else:
            ranges.append([epoch, attempt, index, index])
    return {"groups": ranges}


def _expanded(ranges: list[list[int]]) -> Iterable[str]:
    for epoch, attempt, first, last in ranges:
        if not 0 <= last - first < _MOST:
            raise ValueError(f"a range from {first} to {last}")
        for index in range(first, last + 1):
            yield str(GroupId(epoch, index, attempt))
