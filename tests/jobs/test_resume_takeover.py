"""Two learners of one run, as processes: the older one stops and changes nothing any more, wherever it was."""

import signal
from pathlib import Path

import pytest

from grpo_jax.errors import EXIT_TAKEN_OVER
from grpo_jax.learner.ending import put_right
from grpo_jax.learner.fence import claim_incarnation, incarnations
from grpo_jax.observability.metrics import read_metrics
from grpo_jax.storage import layout
from grpo_jax.storage.batches import read_batches
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader, RecordWriter, read_record
from tests.jobs.lone_learner import (
    STEPS,
    LoneLearner,
    config_of,
    fill_spool,
    first_policy,
    outcome,
    trained,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_AT_FIRST = 4  # groups for two steps


_RECORDS = (layout.RUN, layout.POLICY, layout.LEARNER_STATE)


def what_counts(run_dir: Path) -> dict:
    """What somebody who comes only now would take for the run, but for its records."""
    run = Bucket(str(run_dir))
    # One of the first learner may have been under way when that was stopped; the second one's is newer, and counts.
    manifests = sorted(
        key for key in run.list(layout.CHECKPOINTS) if "/manifest." in key and "/manifest.000001." not in key
    )
    return {
        "batches": read_batches(run),
        "metrics": read_metrics(run),
        "local": (run_dir / "metrics.jsonl").read_bytes() if (run_dir / "metrics.jsonl").exists() else b"",
        "checkpoints": {key: run.read(key) for key in manifests},
        "adapters": sorted(path.parent.name for path in (run_dir / "adapters").glob("*/manifest.json")),
    }


def check(run_dir: Path) -> None:
    groups = [group for _, group in trained(run_dir)]
    assert groups == [f"e000.i{i:06d}.a00" for i in range(2 * STEPS + 2) if i % 5 != 4]
    found = outcome(run_dir)
    assert [record["step"] for record in found["metrics"]] == list(range(STEPS))
    assert found["status"] == ("finished", None)
    assert len(found["adapters"]) == STEPS + 2  # one for each version, v0 and the probe


def test_a_second_learner_takes_over_and_the_first_one_stops(tiny_model, tmp_path):
    store, config = tmp_path / "bucket", config_of(tiny_model, tmp_path / "bucket")
    run_dir = store / "tiny"
    with LoneLearner(config, store) as first:
        policy = first_policy(run_dir)
        fill_spool(run_dir, policy, count=_AT_FIRST)
        missing = "2 groups of step 2: 0 there, no worker has written its state"
        first.wait_for(lambda: first.state().get("waits_for") == missing, "step 2")
        assert first.state()["doing"] == "waiting for groups"
        with LoneLearner(config, store) as second:
            said = first.ends(code=EXIT_TAKEN_OVER)
            assert "another learner (incarnation 2) has taken over this run; incarnation 1 stops" in said
            fill_spool(run_dir, policy, first=_AT_FIRST)
            second.ends()
    check(run_dir)
    assert incarnations(Bucket(str(run_dir))) == [1, 2]


def test_one_that_was_stopped_and_wakes_up_after_another_took_over_changes_nothing_that_counts(tiny_model, tmp_path):
    store = tmp_path / "bucket"
    run_dir = store / "tiny"
    slow = config_of(tiny_model, f"faulty:slow=0.05:{store}")
    with LoneLearner(slow, store, tmp_path / "first") as first:
        policy = first_policy(run_dir)
        fill_spool(run_dir, policy, count=_AT_FIRST + 1)
        first.wait_for(lambda: first.made("checkpoints/*/*", "manifest.*"), "half a checkpoint")
        first.send(signal.SIGSTOP)
        fill_spool(run_dir, policy, first=_AT_FIRST + 1)
        with LoneLearner(config_of(tiny_model, store), store) as second:
            second.ends()
        check(run_dir)
        readers = [RecordReader(Bucket(str(run_dir)), key) for key in _RECORDS]
        before, records = what_counts(run_dir), [reader.read() for reader in readers]
        kept = [layout.last_word(2, key) for key in _RECORDS]
        assert set(kept) <= set(Bucket(str(run_dir)).list(layout.INCARNATIONS))
        first.send(signal.SIGCONT)
        assert "has taken over this run" in first.ends(code=EXIT_TAKEN_OVER)
    assert what_counts(run_dir) == before
    # A write that was under way when it was stopped may land. Who has seen a newer record does not take it,
    # and who comes only now finds it put right.
    assert [reader.read() for reader in readers] == records
    assert [_said(read_record(Bucket(str(run_dir)), key)) for key in _RECORDS] == list(map(_said, records))


def test_a_record_of_the_older_learner_that_lands_late_is_put_right_when_that_leaves(tmp_path):
    run = Bucket(str(tmp_path)).child("tiny")
    for number in (1, 2):
        assert claim_incarnation(run) == number
    for key in _RECORDS:
        RecordWriter(run, key, 2).write({"of": "the newer", "key": key})
        run.put(layout.last_word(2, key), run.read(key))
    RecordWriter(run, layout.POLICY, 1).write({"of": "the older"})
    put_right(run, 1)
    assert [record["of"] for key in _RECORDS if (record := read_record(run, key))] == ["the newer"] * 3


def test_nothing_is_put_right_while_the_newer_learner_goes_on(tmp_path):
    run = Bucket(str(tmp_path)).child("tiny")
    for _ in range(2):
        claim_incarnation(run)
    RecordWriter(run, layout.POLICY, 1).write({"of": "the older"})
    before = run.read(layout.POLICY)
    put_right(run, 1)
    assert run.read(layout.POLICY) == before


def _said(record: dict) -> dict:
    return {key: value for key, value in record.items() if key not in ("seq", "checksum", "doing", "doing_s")}
