"""Mutable records: JSON objects with one writer, a fence and a checksum.

A record carries `incarnation` (which life of its writer wrote it), `seq` (the count of writes in that life) and
`checksum` (sha256 of the rest). A reader keeps the old value when the checksum is wrong or (incarnation, seq) goes
backwards, so a torn write, a stale cache or a writer that was replaced can never move it back.

A reader that starts only now has nothing to compare with: if an earlier write has landed after the last one (a write
whose deadline was over, a mount that uploads in the background), it gets the earlier value. A writer that writes all
the time corrects that by itself; one that writes seldom calls `confirm` now and then.
"""

import hashlib
import json
import logging
import threading
import time
from typing import Any

from grpo_jax.storage.bucket import Bucket, ObjectTooLarge
from grpo_jax.storage.shapes import misfit

log = logging.getLogger(__name__)

Record = dict[str, Any]

MAX_RECORD_BYTES = 4 << 20
"""A larger one is not read, and the log says so; of ours none comes near it."""

_STAMP_END = 2**63

_told: dict[tuple[str, str], str] = {}


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spare bytes; NaN is refused rather than written as something else."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()


def seal(body: Record, incarnation: int, seq: int) -> bytes:
    record = {**body, "incarnation": incarnation, "seq": seq}
    record["checksum"] = hashlib.sha256(canonical_json(record)).hexdigest()
    return canonical_json(record)


def unseal(data: bytes) -> Record | None:
    """The record, or None if it is no JSON object, its stamp is not two counts or its checksum does not match."""
    try:
        record = json.loads(data)
        checksum = record.pop("checksum")
        is_stamped = all(type(n) is int and 0 <= n < _STAMP_END for n in (record["incarnation"], record["seq"]))
        is_sound = is_stamped and hashlib.sha256(canonical_json(record)).hexdigest() == checksum
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return record if is_sound else None


def next_incarnation(bucket: Bucket, key: str) -> int:
    """For a new life of a record's writer; see `incarnation_after`."""
    try:
        record = read_record(bucket, key)
    except OSError:
        record = None
    return incarnation_after(0 if record is None else record["incarnation"])


def incarnation_after(previous: int) -> int:
    """Above that of the life before, and of the time in milliseconds.

    The clock stands in for a record that is torn, deleted or not visible yet. The record stands in for a clock that was
    set back, by which every reader would refuse all that the new life writes.
    """
    return max(previous + 1, int(time.time() * 1000))


class RecordWriter:
    """The single writer of one record. `write` replaces it at most once every `min_interval_s`, unless forced."""

    def __init__(self, bucket: Bucket, key: str, incarnation: int, min_interval_s: float = 1.0):
        self._bucket, self._key, self._incarnation = bucket, key, incarnation
        self._min_interval_s, self._seq, self._last = min_interval_s, 0, float("-inf")
        self._sealed: bytes | None = None
        self._lock = threading.Lock()

    @property
    def incarnation(self) -> int:
        return self._incarnation

    def write(self, body: Record, force: bool = True) -> bool:
        """Writes `body`. With `force=False` a write within the interval is left out; returns whether it was written."""
        with self._lock:
            now = time.monotonic()
            if not force and now - self._last < self._min_interval_s:
                return False
            self._seq += 1
            self._sealed = seal(body, self._incarnation, self._seq)
            self._bucket.replace(self._key, self._sealed)
            self._last = now
            return True

    def confirm(self) -> bool:
        """Reads the record back, and writes the last value again if an earlier or a damaged one stands there.

        Returns:
            Whether the last value stood, or that of a later life of this writer. Also if nothing was written so far.
        """
        with self._lock:
            if self._sealed is None:
                return True
            record = read_record(self._bucket, self._key)
            if record is not None and _stamp(record) >= (self._incarnation, self._seq):
                return True
            self._bucket.replace(self._key, self._sealed)
            return False


class RecordReader:
    """Reads one record again and again; `read` returns the newest sound value seen so far, or None before the first.

    `changed_at` is this reader's own monotonic time of the last change: the only clock by which a writer is silent.
    """

    def __init__(self, bucket: Bucket, key: str):
        self._bucket, self._key = bucket, key
        self._value: Record | None = None
        self.changed_at = time.monotonic()

    def read(self) -> Record | None:
        record = read_record(self._bucket, self._key)
        if record is not None and (self._value is None or _stamp(record) > _stamp(self._value)):
            self._value, self.changed_at = record, time.monotonic()
        return self._value

    def silent_s(self) -> float:
        """Seconds since the record last changed, on this reader's clock."""
        return time.monotonic() - self.changed_at


def read_record(bucket: Bucket, key: str) -> Record | None:
    """The record that stands there, or None if there is none or it is not sound; for who reads it once."""
    try:
        record = unseal(bucket.read_or_none(key, MAX_RECORD_BYTES) or b"")
    except ObjectTooLarge:
        _tell(bucket, key, f"it is larger than {MAX_RECORD_BYTES >> 20} MiB")
        return None
    problem = None if record is None else misfit(key, record)
    _tell(bucket, key, problem)
    return record if problem is None else None


def _tell(bucket: Bucket, key: str, problem: str | None) -> None:
    """Logs once for each state of a record that it is refused."""
    place = bucket.address, key
    if problem is None:
        _told.pop(place, None)
    elif _told.get(place) != problem:
        _told[place] = problem
        log.warning("%s in %s is refused: %s", key, bucket.address, problem)


def _stamp(record: Record) -> tuple[int, int]:
    return record["incarnation"], record["seq"]
