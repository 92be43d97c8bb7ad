"""The metrics of a run: one JSON object a line, on disk as they come and in the bucket in segments.

The local file is what people read. The bucket holds `learner/metrics-<from>.<life>.jsonl`, one segment per life of the
learner (its incarnation, which keeps the late write of an older life apart); after a resume segments overlap, and that
of the later life counts from its first step on.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from grpo_jax.observability.sinks import Sinks
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket

Metrics = dict[str, Any]

FILE = "metrics.jsonl"
_LARGEST, _LAST_STEP = sys.float_info.max, 2**53
_SEGMENT = re.compile(rf"{layout.METRICS}/metrics-(\d{{6,}})(?:\.(\d{{6,}}))?\.jsonl")


@dataclass(frozen=True)
class Mean:
    """A mean that is not divided yet: the states of micro-batches, rows or hosts add up exactly, in any grouping."""

    total: float = 0.0
    weight: float = 0.0

    @classmethod
    def of(cls, values: ArrayLike, weights: ArrayLike | None = None) -> "Mean":
        """Of an array, each value once or with its weight. A value of weight 0 does not count, not even a NaN."""
        v = np.asarray(values, np.float64)
        w = np.ones_like(v) if weights is None else np.asarray(weights, np.float64)
        if v.shape != w.shape:
            raise ValueError(f"values have shape {v.shape}, weights {w.shape}")
        used = w != 0
        return cls(float((v[used] * w[used]).sum()), float(w[used].sum()))

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        """NaN when nothing was counted; a metrics line then leaves the key out."""
        return self.total / self.weight if self.weight else math.nan


class MetricsLog:
    """The learner's metrics from `first_step` on. Earlier lines of the local file stay, later ones are another life's.

    Segments that start later than `first_step` belong to steps that were given up; they are deleted, and an older
    segment ends where this one starts even before the first `sync`.
    """

    def __init__(self, run_dir: Path, bucket: Bucket, first_step: int = 0, life: int = 0):
        self._path, self._bucket, self._key = run_dir / FILE, bucket, segment_key(first_step, life)
        self._last = first_step - 1
        self._sinks: Sinks | None = None
        segments = _segments(bucket)
        _rewrite(self._path, [r for r in read_metrics(run_dir) if r["step"] < first_step])
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - closed in close()
        self._start = os.fstat(self._file.fileno()).st_size
        for (segment_life, start), key in segments.items():
            if segment_life <= life and start > first_step:
                bucket.delete(key)
        if segments:
            self.sync()

    @classmethod
    def resume(cls, run_dir: Path, bucket: Bucket, step: int, life: int = 0) -> "MetricsLog":
        """Goes on at `step` (the steps finished) with the lines of all earlier steps, whichever place has them.

        Where both do the bucket is right: the local file may be a cache that a life on another machine has overtaken.
        """
        known = {r["step"]: r for r in [*read_metrics(run_dir), *read_metrics(bucket)]}
        _rewrite(run_dir / FILE, [known[t] for t in sorted(known) if t < step])
        return cls(run_dir, bucket, step, life)

    def attach(self, sinks: Sinks | None) -> None:
        """Hands each line from now on to `sinks` too, and closes them at the end."""
        self._sinks = sinks

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line at once. Keys whose value is None, NaN or infinite are left out.

        Raises:
          ValueError: `step` is not later than that of the last line.
          TypeError: a value is neither a number nor a text.
          OSError: the disk did not take the line. It may be appended again.
        """
        clean = {key: value for key, value in ((k, _plain(k, v)) for k, v in record.items()) if value is not None}
        step = clean.get("step")
        if not isinstance(step, int) or step <= self._last:
            raise ValueError(f"a metrics record for step {step!r} after step {self._last}")
        if self._sinks is not None:
            clean["logging/failures_total"] = float(self._sinks.failures)
        self._write(_line(clean))
        self._last = step
        if self._sinks is not None:
            self._sinks.log(clean)

    def _write(self, line: bytes) -> None:
        """All of a line or, on a disk that is full, nothing."""
        size, rest = os.fstat(self._file.fileno()).st_size, memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            os.ftruncate(self._file.fileno(), size)
            raise

    def show(self, record: Mapping[str, Any]) -> None:
        """Hands a record that is kept elsewhere, and may be of any step, to the sinks alone."""
        if self._sinks is not None:
            self._sinks.log(record)

    def sync(self) -> None:
        """Replaces this life's segment in the bucket by all its lines so far."""
        with open(self._path, "rb") as file:
            file.seek(self._start)
            self._bucket.replace(self._key, file.read())

    def close(self) -> None:
        """Writes the segment a last time. OSError: the bucket did not take it, the local file is whole all the same."""
        self._file.close()
        try:
            self.sync()
        finally:
            if self._sinks is not None:
                self._sinks.close()


class MetricsTail:
    """Follows the metrics file of another process. `records` are the steps that the file holds now, by step."""

    def __init__(self, run_dir: Path):
        self._path, self._offset, self._last_line = run_dir / FILE, 0, b""
        self.records: dict[int, Metrics] = {}

    def poll(self) -> list[Metrics]:
        """The lines that are new since the last call. A line that is not finished yet is left for the next call."""
        known = self.records
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset - len(self._last_line))
                data = file.read()
                if data.startswith(self._last_line):
                    data = data[len(self._last_line) :]
                else:  # a resume has rewritten the file (its inode may be the old one's again)
                    self._offset, self._last_line, self.records = 0, b"", {}
                    file.seek(0)
                    data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        self._last_line = (complete.splitlines(keepends=True) or [self._last_line])[-1]
        news = list(_parse(complete))
        fresh = [r for r in news if known.get(r["step"]) != r]
        self.records |= {r["step"]: r for r in news}
        return fresh


def read_metrics(source: Path | Bucket) -> list[Metrics]:
    """All records in the order of their steps, from a run directory or from a run's bucket; torn lines are left out."""
    if isinstance(source, Bucket):
        merged: dict[int, Metrics] = {}
        for (_, start), key in sorted(_segments(source).items()):
            kept = {t: r for t, r in merged.items() if t < start}
            merged = kept | {r["step"]: r for r in _parse(source.read_or_none(key) or b"") if r["step"] >= start}
    else:
        try:
            merged = {r["step"]: r for r in _parse((source / FILE).read_bytes())}
        except FileNotFoundError:
            return []
    return [merged[t] for t in sorted(merged)]


def numbers(record: Metrics) -> Metrics:
    """A record without its texts, for who reckons with it."""
    return {key: value for key, value in record.items() if not isinstance(value, str)}


def segment_key(first_step: int, life: int = 0) -> str:
    of_life = f".{life:06d}" if life else ""
    return f"{layout.METRICS}/metrics-{first_step:06d}{of_life}.jsonl"


def _segments(bucket: Bucket) -> dict[tuple[int, int], str]:
    """Keys by life and first step."""
    matches = ((key, _SEGMENT.fullmatch(key)) for key in bucket.list(layout.METRICS))
    return {(int(match[2] or 0), int(match[1])): key for key, match in matches if match}


def _parse(data: bytes) -> Iterator[Metrics]:
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and _is_sound(record):
            yield record


def _is_sound(record: Metrics) -> bool:
    """Whether it has a step, and what a line may have beside it."""
    step = record.get("step")
    if type(step) is not int or not 0 <= step <= _LAST_STEP:
        return False
    return all(_is_text(key) and (_is_text(value) or _is_number(value)) for key, value in record.items())


def _is_text(value: Any) -> bool:
    """Halves of surrogate pairs can be read from JSON, but not written again."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _is_number(value: Any) -> bool:
    """False for what no float can be: NaN, infinity, an integer beyond all of them."""
    return isinstance(value, int | float) and abs(value) <= _LARGEST


def _line(record: Metrics) -> bytes:
    return json.dumps(record, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _rewrite(path: Path, records: Iterable[Metrics]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(b"".join(map(_line, records)))
    os.replace(temporary, path)


def _plain(key: str, value: Any) -> str | bool | int | float | None:
    """A JSON scalar from a Python, numpy or device scalar; None for what a line leaves out."""
    if not isinstance(value, str | bool | int | float) and hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    raise TypeError(f"metric {key!r} is a {type(value).__name__}")
