from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.observability.rundata import RunData, load_run
from grpo_jax.observability.timeline import (
    in_flight,
    intersection,
    largest_gap,
    learner_intervals,
    overlap,
    publishes,
    replica_intervals,
    seconds,
    union,
)
from grpo_jax.storage.bucket import Bucket
from tests.observability import synthetic

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def covered(spans: list[tuple[float, float]]) -> set[int]:
    """The unit cells that are covered: the slow, obvious way."""
    return {t for start, end in spans for t in range(int(start), int(end))}


@given(intervals)
def test_a_union_covers_the_same_time_once(spans: list[tuple[float, float]]) -> None:
    merged = union(spans)
    assert covered(merged) == covered(spans)
    assert seconds(merged) == len(covered(spans))
    assert all(a[1] < b[0] for a, b in pairwise(merged))


@given(intervals, intervals)
def test_an_intersection_is_what_both_cover(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> None:
    common = intersection(union(a), union(b))
    assert covered(common) == covered(a) & covered(b)
    assert common == union(common)


def test_the_largest_gap() -> None:
    assert largest_gap(union([(0, 2), (1, 4), (9, 10), (6, 7)])) == 2
    assert largest_gap([(0, 5)]) == 0
    assert largest_gap([]) == 0


@given(intervals)
def test_in_flight_adds_up_to_the_time_of_all(spans: list[tuple[float, float]]) -> None:
    edges = np.array([0.0, 3.0, 10.0, 40.0])
    total = sum(max(end - start, 0) for start, end in spans)
    assert (in_flight(spans, edges) * np.diff(edges)).sum() == pytest.approx(total)


def test_in_flight_is_a_mean_over_each_bin() -> None:
    assert in_flight([(0, 2), (1, 2), (3.5, 9)], np.array([0.0, 1.0, 2.0, 4.0])).tolist() == [1.0, 2.0, 0.25]


def run_of(times: list[tuple[float, float]], groups: list[tuple[float, float, str]], **config: int) -> RunData:
    return RunData(
        name="toy",
        run={"config": config},
        metrics=[{"step": t, "time/batch_ready": a, "time/finished": b} for t, (a, b) in enumerate(times)],
        groups=[synthetic.group(i, 0, *spans) for i, spans in enumerate(groups)],
    )


def test_overlap_is_exact() -> None:
    # learner      ....####..###      4…8, 10…13
    # r0, r1       ######.###......   0…6 (two groups of two replicas), 7…10, 20…21 after the last step
    run = run_of([(4, 8), (10, 13)], [(0, 5, "r0"), (2, 6, "r1"), (7, 10, "r0"), (20, 21, "r1")])
    assert overlap(run) == {
        "start": 0,
        "end": 13,
        "span_s": 13,
        "learner_busy_s": 7,
        "generation_busy_s": 9,
        "both_s": 3,
        "fraction": 3 / 13,
        "largest_generation_gap_s": 10,
        "publishes": {1: 8, 2: 13},
    }


def test_taking_turns_is_no_overlap() -> None:
    assert overlap(run_of([(2, 4), (6, 8)], [(0, 2, "r0"), (4, 6, "r0")]))["fraction"] == 0


def test_sampling_all_the_time_overlaps_as_long_as_the_learner_works() -> None:
    assert overlap(run_of([(2, 4), (6, 8)], [(0, 10, "r0")]))["fraction"] == 0.5


def test_nothing_yet_has_no_fraction() -> None:
    found = overlap(run_of([], [(0, 2, "r0")]))
    assert (found["fraction"], found["span_s"], found["start"]) == (None, 0, None)
    assert overlap(run_of([(1, 3)], []))["fraction"] == 0


def test_publishes_come_every_so_many_steps_and_at_the_end() -> None:
    steps = [(float(t), t + 0.5) for t in range(5)]
    assert publishes(run_of(steps, [], sync_every=2, steps=5)) == {1: 1.5, 2: 3.5, 3: 4.5}
    assert publishes(run_of(steps, [], sync_every=2, steps=9)) == {1: 1.5, 2: 3.5}


def test_of_a_recorded_run(root: Bucket, tmp_path: Path) -> None:
    run = load_run(tmp_path, synthetic.write_run(root, tmp_path, steps=5))
    assert learner_intervals(run.metrics)[0] == (synthetic.T0 + 3, synthetic.T0 + 6)
    assert {k: len(v) for k, v in replica_intervals(run.groups).items()} == {"r0": 10, "r1": 10}
    # Groups take the 2 s before each batch: 1 s of it while the step before is still computing, but for the first.
    assert overlap(run)["both_s"] == 4.0
    assert overlap(run)["span_s"] == 5 * 4.0 + 1
