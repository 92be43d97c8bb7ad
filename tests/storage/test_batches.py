import json
from pathlib import Path

import pytest

from grpo_jax.errors import RunFailed
from grpo_jax.storage import layout
from grpo_jax.storage.batches import read_batch, read_batches, recorded_steps, write_batch
from grpo_jax.storage.bucket import Bucket


def write(run: Bucket, step: int, incarnation: int, *groups: str) -> None:
    files = [(layout.rollout("w0", group), 10) for group in groups]
    write_batch(
        run, step, incarnation, groups=groups, files=files, version=step, drops={f"d{step}": "stale"}, quarantined=1
    )


@pytest.fixture
def run(tmp_path: Path) -> Bucket:
    run = Bucket(str(tmp_path))
    for step in range(3):
        write(run, step, 1, f"g{step}")
    return run


def test_batch_records_come_back_by_step(run: Bucket) -> None:
    records = read_batches(run)
    assert list(records) == [0, 1, 2]
    assert records[2]["groups"] == ["g2"]
    assert records[2]["files"] == [("rollouts/w0/g2.safetensors", 10)]
    assert records[1]["drops"] == {"d1": "stale"}
    assert read_batch(run, 1) == records[1]
    assert read_batch(run, 3) is None


def test_a_late_write_of_an_earlier_life_overwrites_nothing_and_does_not_count(run: Bucket) -> None:
    write(run, 3, 2, "of the second life")
    counted = read_batches(run)
    write(run, 3, 1, "of the first life, stopped in mid-write")
    write(run, 4, 1, "what it might have gone on with")
    assert read_batches(run) == counted
    write(run, 4, 2, "g4")
    assert read_batches(run)[4]["groups"] == ["g4"]


def test_records_that_a_later_life_has_not_followed_are_given_up(run: Bucket) -> None:
    write(run, 1, 2, "x1")  # it did not see 1 and 2 of the first life
    assert {step: found.incarnation for step, found in recorded_steps(run).items()} == {0: 1, 1: 2}
    write(run, 2, 3, "x2")
    assert {step: record["groups"] for step, record in read_batches(run).items()} == {0: ["g0"], 1: ["x1"], 2: ["x2"]}


def test_records_without_a_life_are_the_oldest(tmp_path: Path) -> None:
    run = Bucket(str(tmp_path))
    run.put(layout.batch(0), json.dumps({"step": 0, "groups": ["a"], "version": 0, "drops": {}}).encode())
    assert read_batches(run)[0]["files"] == []
    write(run, 0, 1, "b")
    assert read_batches(run)[0]["groups"] == ["b"]


def test_a_record_that_is_torn_for_a_moment_is_waited_for(run: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    key = layout.batch(1, 1)
    whole = run.read(key)
    run.replace(key, whole[:10])
    monkeypatch.setattr("grpo_jax.storage.batches.time.sleep", lambda s: s and run.replace(key, whole))
    assert read_batches(run)[1]["groups"] == ["g1"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"step": 1, "groups": null, "version": 1, "drops": {}}',
        b'{"step": 1, "groups": "abc", "version": 1, "drops": {}}',
        b'{"step": 1, "groups": [], "drops": {}}',
        b'{"step": 2, "groups": [], "version": 1, "drops": {}}',
        b'{"step": 1e400, "groups": [], "version": 1, "drops": {}}',
    ],
)
def test_one_that_stays_broken_ends_the_start_in_one_sentence(
    run: Bucket, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr("grpo_jax.storage.batches._LOOK_AGAIN_S", 0.0)
    run.replace(layout.batch(1, 1), content)
    with pytest.raises(RunFailed, match=r"batches/000001.000001.json in .* is not a batch record"):
        read_batches(run)
    assert read_batch(run, 1) is None
