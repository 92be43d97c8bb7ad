"""Who was busy when: interval arithmetic over the recorded times of steps and groups, in seconds since the epoch."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from grpo_jax.observability.metrics import Metrics
from grpo_jax.observability.rundata import RunData
from grpo_jax.rollouts.sample import Group

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The covered time as disjoint intervals in order; touching ones are joined, empty and reversed ones left out."""
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The time that both cover; each must be disjoint and in order, as `union` returns it."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if end > start:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def seconds(disjoint: Iterable[Interval]) -> float:
    return sum(end - start for start, end in disjoint)


def largest_gap(disjoint: Sequence[Interval]) -> float:
    """The longest time between two neighbours; 0 for fewer than two."""
    return max((b[0] - a[1] for a, b in pairwise(disjoint)), default=0.0)


def in_flight(intervals: Iterable[Interval], edges: np.ndarray) -> np.ndarray:
    """The mean number of intervals that are open in each bin between two `edges` (ascending). [len(edges) - 1]."""
    spans = np.array(list(intervals), np.float64).reshape(-1, 2)
    covered = np.zeros(len(edges) - 1)
    for start, end in spans:
        covered += np.clip(np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1]), 0.0, None)
    return covered / np.diff(edges)


def learner_intervals(metrics: Iterable[Metrics]) -> dict[int, Interval]:
    """By step: from the complete batch to the end of its computation. Steps without times are left out."""
    keys = ("time/batch_ready", "time/finished")
    return {r["step"]: (r[keys[0]], r[keys[1]]) for r in metrics if all(key in r for key in keys)}


def replica_intervals(groups: Iterable[Group]) -> dict[str, list[Interval]]:
    """By replica: one interval per group, from its first request to its last reward."""
    found: dict[str, list[Interval]] = defaultdict(list)
    for group in groups:
        found[group.provenance.replica].append((group.provenance.started_at, group.provenance.finished_at))
    return dict(sorted(found.items()))


def publishes(run: RunData) -> dict[int, float]:
    """By version: when it was handed to the publisher, at the end of its last step. v0 comes before the first step."""
    every, total = run.config_value("sync_every", 1), run.config_value("steps", None)
    found = {}
    for record in run.metrics:
        steps, time = record["step"] + 1, record.get("time/computed", record.get("time/finished"))
        if time is not None and (steps % every == 0 or steps == total):
            found[-(-steps // every)] = time
    return found


def overlap(run: RunData) -> dict[str, Any]:
    """How far sampling and training ran at the same time.

    The span goes from the first group's start (or the first batch, if that is earlier) to the end of the last step; all
    seconds are counted inside it. `fraction` is None while no step has been finished.
    """
    learner = union(learner_intervals(run.metrics).values())
    generation = union(i for spans in replica_intervals(run.groups).values() for i in spans)
    span: list[Interval] = []
    if learner:
        span = [(min(learner[0][0], generation[0][0]) if generation else learner[0][0], learner[-1][1])]
    inside = intersection(generation, span)
    both = seconds(intersection(learner, inside))
    return {
        "start": span[0][0] if span else None,
        "end": span[0][1] if span else None,
        "span_s": seconds(span),
        "learner_busy_s": seconds(learner),
        "generation_busy_s": seconds(inside),
        "both_s": both,
        "fraction": both / seconds(span) if span else None,
        "largest_generation_gap_s": largest_gap(generation),
        "publishes": publishes(run),
    }
