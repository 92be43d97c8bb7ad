"""What `status` says of a run, from what lies in its bucket."""

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_jax.jobs.launch_show import print_jobs, print_runs
from grpo_jax.jobs.launch_start import replica_id
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter
from tests.jobs.test_launch_unit import config_of
from tests.jobs.test_launch_unit_fleet import job


def test_replicas_of_jobs_that_have_ended_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bucket, config = Bucket(str(tmp_path)), config_of()
    jobs = [job("generator-0", "ERROR", id="a" * 24), job("generator-0", id="b" * 24)]
    for name in (*(replica_id(j.slot, j.id) for j in jobs), "vm-2"):
        record = {"id": name, "state": "ready", "proved": ["x"], "error": None}
        RecordWriter(bucket, layout.replica("tiny", name), 1).write(record)
    RecordWriter(bucket.child("tiny"), layout.RUN, 1).write({"status": "failed", "error": "no more"})
    RecordWriter(bucket.child("tiny"), layout.LEARNER_STATE, 1).write({"step": 3})
    print_runs(bucket, [config], jobs)
    text = capsys.readouterr().out
    assert "generator-0-bbbb" in text
    assert "vm-2" in text
    assert "aaaa" not in text
    assert "failed (no more), step 3/4" in text


def test_each_job_has_its_time_and_its_cost(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [job("learner", ran=5400.0), replace(job("generator-0", ran=61.0), flavor="l4x1")]
    print_jobs(jobs, {"cpu-basic": 2.0, "l4x1": 0.0})
    first, learner, generator, total = capsys.readouterr().out.splitlines()
    assert first.split() == ["job", "slot", "stage", "flavor", "time", "cost"]
    assert learner.split()[-3:] == ["90:00", "3.00", "USD"]
    assert "1:01" in generator
    assert total == "cost so far 3.00 USD"
