import json

import pytest

from grpo_jax.errors import RunFailed
from grpo_jax.learner.records import read_batches, write_batch
from grpo_jax.storage.bucket import Bucket


@pytest.fixture
def run(tmp_path):
    run = Bucket(str(tmp_path))
    for step in range(3):
        write_batch(run, step, [f"g{step}"], step, {f"d{step}": "stale"})
    return run


def test_batch_records_come_back_by_step(run):
    records = read_batches(run)
    assert list(records) == [0, 1, 2]
    assert records[2]["groups"] == ["g2"]
    assert records[1]["drops"] == {"d1": "stale"}


def test_a_record_that_is_torn_for_a_moment_is_waited_for(run, monkeypatch):
    whole = run.read("batches/000001.json")
    run.replace("batches/000001.json", whole[:10])
    monkeypatch.setattr(
        "grpo_jax.learner.records.time.sleep", lambda s: s and run.replace("batches/000001.json", whole)
    )
    assert read_batches(run)[1]["groups"] == ["g1"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{", json.dumps({"step": 1, "groups": None, "drops": {}}).encode()])
def test_one_that_stays_broken_ends_the_start_in_one_sentence(run, monkeypatch, content):
    monkeypatch.setattr("grpo_jax.learner.records._LOOK_AGAIN_S", 0.0)
    run.replace("batches/000001.json", content)
    with pytest.raises(RunFailed, match=r"batches/000001.json in .* is not a batch record"):
        read_batches(run)
