"""The batch records: which groups each step trained, written before its first gradient.

One object for each step and life of the learner, `batches/<step>.<incarnation>.json`, that never changes. A life
replays the records that it finds and writes none for them. So where there are several of one step, that of the latest
life counts; and a record of an earlier life for a later step is of steps that were given up, and does not count.
"""

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from grpo_jax.errors import RunFailed
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import canonical_json

BatchRecord = dict[str, Any]

_KEY = re.compile(rf"{layout.BATCHES}/([0-9]{{6,}})(?:\.([0-9]{{6,}}))?\.json")
_READERS = 8
_LOOKS, _LOOK_AGAIN_S = 4, 1.0
# What reading a record may raise that is not there, not whole, or no record at all.
_UNSOUND = (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


class Recorded(NamedTuple):
    incarnation: int
    key: str


def write_batch(
    run: Bucket,
    step: int,
    incarnation: int,
    *,
    groups: Sequence[str],
    files: Sequence[tuple[str, int]],
    version: int,
    drops: Mapping[str, str],
    quarantined: int = 0,
) -> BatchRecord:
    """Writes and returns the record of a step; whatever happens then, a resume trains on just these groups.

    Args:
      groups: their ids, in the order in which they are trained.
      files: for each of them, key and size of its file in the spool.
      drops: the groups that were dropped since the record of the step before, with the reason.
      quarantined: how many files of the spool were refused so far.
    """
    record = {
        "step": step,
        "incarnation": incarnation,
        "groups": list(groups),
        "files": [list(file) for file in files],
        "version": version,
        "drops": dict(drops),
        "quarantined": quarantined,
    }
    run.put(layout.batch(step, incarnation), canonical_json(record))
    return record


def recorded_steps(run: Bucket) -> dict[int, Recorded]:
    """Of each step the record that counts, from the keys alone; in the order of the steps."""
    return _counting(run.list(layout.BATCHES))


def read_batches(run: Bucket) -> dict[int, BatchRecord]:
    """The records that count, by step; RunFailed for one that is not sound after several looks."""
    steps = recorded_steps(run)
    with ThreadPoolExecutor(_READERS, thread_name_prefix="batches") as pool:
        records = pool.map(lambda item: _read_patiently(run, item[1].key, item[0]), steps.items())
        return dict(zip(steps, records, strict=True))


def read_batch(run: Bucket, step: int) -> BatchRecord | None:
    """The record of one step as it is now; None if there is none, or if it is not sound."""
    found = recorded_steps(run).get(step)
    try:
        return None if found is None else _checked(run.read(found.key), step)
    except _UNSOUND:
        return None


def _counting(keys: Iterable[str]) -> dict[int, Recorded]:
    newest: dict[int, Recorded] = {}
    for key in keys:
        if match := _KEY.fullmatch(key):
            step, found = int(match[1]), Recorded(int(match[2] or 0), key)
            newest[step] = max(found, newest.get(step, found))
    counting: dict[int, Recorded] = {}
    life = 0
    for step, found in sorted(newest.items()):
        if found.incarnation >= life:
            counting[step], life = found, found.incarnation
    return counting


def _read_patiently(run: Bucket, key: str, step: int) -> BatchRecord:
    """A record that is torn or cannot be seen yet may only be late, so it is looked at again."""
    for look in range(_LOOKS):
        time.sleep(_LOOK_AGAIN_S if look else 0.0)
        try:
            return _checked(run.read(key), step)
        except _UNSOUND as error:
            problem = error
    raise RunFailed(f"{key} in {run.address} is not a batch record: {type(problem).__name__}")


def _checked(data: bytes, step: int) -> BatchRecord:
    """One of `_UNSOUND` if it is no record of this step. Older ones have fewer fields."""
    record = json.loads(data)
    if not isinstance(record["groups"], list):
        raise TypeError("its groups are no list")
    found: BatchRecord = {
        "step": int(record["step"]),
        "incarnation": int(record.get("incarnation", 0)),
        "groups": [str(group) for group in record["groups"]],
        "files": [(str(key), int(size)) for key, size in record.get("files", [])],
        "version": int(record["version"]),
        "drops": {str(group): str(reason) for group, reason in dict(record["drops"]).items()},
        "quarantined": int(record.get("quarantined", 0)),
    }
    if found["step"] != step or len(found["files"]) not in (0, len(found["groups"])):
        raise ValueError("it is of another step, or its files are not those of its groups")
    return found
