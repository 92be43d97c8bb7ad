"""What a run is doing right now, from its records and the tail of its metrics, in the words of the progress display."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from grpo_jax.observability.metrics import Metrics, MetricsTail, numbers
from grpo_jax.observability.rundata import bucket_root
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import Record, RecordReader

log = logging.getLogger(__name__)

T = TypeVar("T")
_AVERAGED = 5  # steps


@dataclass(frozen=True)
class Snapshot:
    total_steps: int
    learner: Record = field(default_factory=dict)
    policy: Record = field(default_factory=dict)
    workers: dict[str, Record] = field(default_factory=dict)
    replicas: dict[str, Record] = field(default_factory=dict)
    recent: list[Metrics] = field(default_factory=list)  # the last steps, by step
    news: list[Metrics] = field(default_factory=list)  # steps that have finished since the snapshot before

    @property
    def step(self) -> int:
        """Steps finished."""
        return max(self.learner.get("step", 0), self.recent[-1]["step"] + 1 if self.recent else 0)

    def mean(self, key: str) -> float | None:
        values = [r[key] for r in self.recent if key in r]
        return float(np.mean(values)) if values else None

    def seconds_left(self, step: int) -> float | None:
        """By the usual time of the last steps; the median, because the first one compiles."""
        times = [r["perf/step_s"] for r in self.recent if "perf/step_s" in r]
        return float(np.median(times)) * max(self.total_steps - step, 0) if times else None

    def phase(self) -> str:
        """starting | training | draining | done, the learner's own word."""
        return self.learner.get("phase", "starting")

    def waits(self) -> list[str]:
        """Which role waits for what; empty once the run trains."""
        if self.phase() == "draining":
            return ["evaluating the last policy"] if self._any_worker("evaluating") else ["publishing the last policy"]
        if self.phase() == "done" or self.recent:
            return []
        return [self._learner_waits(), self._generator_waits(), *self._worker_waits()]

    def quarantined(self, run: str) -> list[str]:
        """Policies of `run` that a replica refuses to serve; a fleet may serve other runs too."""
        return [
            f"{replica} refuses {policy}: {reason}"
            for replica, record in self.replicas.items()
            for policy, reason in (record.get("quarantined") or {}).items()
            if policy.startswith(f"{run}.")
        ]

    def _learner_waits(self) -> str:
        if not self.learner:
            return "learner is starting"
        return "learner is compiling" if self.phase() == "starting" else "learner waits for its first batch"

    def _generator_waits(self) -> str:
        if not self.replicas:
            return "generator is starting"
        up = {k: r for k, r in self.replicas.items() if r.get("state") == "ready"}
        if not up:
            engines = {r.get("engine") for r in self.replicas.values()}
            return f"{'vLLM' if engines == {'vllm'} else 'generator'} is loading the model"
        names = {name for r in up.values() for name in r.get("proved", [])}
        if self.policy.get("current") in names:
            return f"{len(up)} of {len(self.replicas)} replicas serve"
        if not self.policy:
            return "generator waits for the first policy"
        return f"waiting for {'the first policy' if self.policy.get('probe') in names else 'the probe'} to be proved"

    def _worker_waits(self) -> list[str]:
        if self._any_worker("evaluating"):
            return ["worker evaluates the base"]
        groups = sum(w.get("inflight_groups", 0) for w in self.workers.values())
        return [f"worker samples {groups} groups"] if groups else []

    def _any_worker(self, phase: str) -> bool:
        return any(w.get("phase") == phase for w in self.workers.values())


class Observer:
    """Takes snapshots. Records that an earlier life has left, there before it began, count only once they change."""

    def __init__(self, bucket: Bucket, run_dir: Path, total_steps: int, fleet: str):
        self._bucket, self._root, self._fleet = bucket, bucket_root(bucket), fleet
        self._tail = MetricsTail(run_dir)
        self._readers: dict[tuple[str, str], _Fresh] = {}
        self._records = empty = Snapshot(total_steps)
        self.snapshot()
        for reader in self._readers.values():
            reader.forget()
        self._records = empty

    def snapshot(self, records: bool = True) -> Snapshot:
        """Never raises. `records=False` follows the local metrics only and keeps the records of the last time."""
        if records:
            self._records = _safely(self._read_records) or self._records
        news = _safely(self._tail.poll) or []
        steps = sorted(self._tail.records)[-_AVERAGED:]
        recent = [numbers(self._tail.records[t]) for t in steps]
        return replace(self._records, recent=recent, news=[numbers(record) for record in news])

    def _read_records(self) -> Snapshot:
        return Snapshot(
            self._records.total_steps,
            learner=self._read(self._bucket, layout.LEARNER_STATE) or {},
            policy=self._read(self._bucket, layout.POLICY) or {},
            workers=self._read_folder(self._bucket, layout.WORKERS),
            replicas=self._read_folder(self._root, layout.replicas(self._fleet)),
        )

    def _read_folder(self, bucket: Bucket, folder: str) -> dict[str, Record]:
        found = {key.rsplit("/", 1)[-1].removesuffix(".json"): self._read(bucket, key) for key in bucket.list(folder)}
        return {name: record for name, record in found.items() if record}

    def _read(self, bucket: Bucket, key: str) -> Record | None:
        return self._readers.setdefault((bucket.url, key), _Fresh(RecordReader(bucket, key))).read()


def _safely(read: Callable[[], T]) -> T | None:
    """A display is no reason to end a run, whatever the store or a half-written file does to it."""
    try:
        return read()
    except Exception as error:
        log.debug("progress: %r", error)
        return None


class _Fresh:
    """A record as far as it has changed since `forget`."""

    def __init__(self, reader: RecordReader):
        self._reader = reader
        self._old: Record | None = None

    def read(self) -> Record | None:
        record = self._reader.read()
        return None if record is self._old else record

    def forget(self) -> None:
        self._old = self._reader.read()
