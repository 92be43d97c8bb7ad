"""The worker's own record, `workers/<id>.json`: what it says to others, and what its next life needs of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import Record, RecordWriter, incarnation_after, read_record

_POLICIES_KEPT = 64


@dataclass
class Counters:
    """Cumulative over all lives of a worker.

    `request_failures` counts requests given up and samples that were not sound, `wasted_tokens` those of groups that
    the worker dropped, `backpressure_s` the seconds in which admission alone kept it from starting a group.
    `scoring_s` adds up, over the samples, the seconds from their completion to their score. `first_named` and
    `first_served` have the times at which the newest policies were first named, and first answered.
    """

    generated_tokens: int = 0
    wasted_tokens: int = 0
    request_failures: int = 0
    reward_failures: int = 0
    redraws: int = 0
    backpressure_s: float = 0.0
    scoring_s: float = 0.0
    first_named: dict[str, float] = field(default_factory=dict)
    first_served: dict[str, float] = field(default_factory=dict)

    def named(self, policy: str, now: float) -> None:
        _note(self.first_named, policy, now)

    def served(self, policy: str, now: float) -> None:
        _note(self.first_served, policy, now)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Counters":
        return cls(
            **{key: int(record.get(key, 0)) for key in ("generated_tokens", "wasted_tokens", "request_failures")},
            **{key: int(record.get(key, 0)) for key in ("reward_failures", "redraws")},
            backpressure_s=float(record.get("backpressure_s", 0.0)),
            scoring_s=float(record.get("scoring_s", 0.0)),
            first_named=dict(record.get("first_named", {})),
            first_served=dict(record.get("first_served", {})),
        )


def _note(first: dict[str, float], policy: str, now: float) -> None:
    first.setdefault(policy, now)
    while len(first) > _POLICIES_KEPT:
        del first[min(first, key=first.__getitem__)]


@dataclass(frozen=True)
class Previous:
    """What an earlier life of this worker has left: its counters, and the data indices that it had given up."""

    incarnation: int
    counters: Counters
    skipped: dict[int, str]


def read_previous(run: Bucket, worker_id: str) -> Previous:
    record = read_record(run, layout.worker_state(worker_id))
    if record is None:
        return Previous(0, Counters(), {})
    skipped = {int(index): str(reason) for _, index, reason in record.get("skipped", [])}
    return Previous(int(record["incarnation"]), Counters.of(record), skipped)


def record_writer(run: Bucket, worker_id: str, previous: Previous) -> RecordWriter:
    return RecordWriter(run, layout.worker_state(worker_id), incarnation_after(previous.incarnation))


def record_body(
    counters: Counters,
    *,
    phase: str,
    started_at: float,
    inflight_groups: int,
    inflight_samples: int,
    live: int,
    redraws: int,
    skipped: Mapping[int, str],
    epoch_size: int,
    scoring_slots: int,
) -> Record:
    """The record that others read. `redraws`: of this life; `epoch_size` turns data indices into epochs."""
    return {
        "phase": phase,
        "started_at": started_at,
        "inflight_groups": inflight_groups,
        "inflight_samples": inflight_samples,
        "live": live,
        "generated_tokens": counters.generated_tokens,
        "wasted_tokens": counters.wasted_tokens,
        "request_failures": counters.request_failures,
        "reward_failures": counters.reward_failures,
        "redraws": counters.redraws + redraws,
        "skipped": [[index // epoch_size, index, reason] for index, reason in sorted(skipped.items())],
        "backpressure_s": round(counters.backpressure_s, 3),
        "scoring_s": round(counters.scoring_s, 3),
        "scoring_slots": scoring_slots,
        "first_named": dict(counters.first_named),
        "first_served": dict(counters.first_served),
    }
