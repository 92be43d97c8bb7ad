"""A new life of a writer is heard, whatever became of the record and of the clock."""

from collections.abc import Callable

import pytest

from grpo_jax.storage import records
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader, RecordWriter, next_incarnation

KEY = "fleets/toy/replicas/r0.json"


def sound(bucket: Bucket) -> None:
    return


def torn(bucket: Bucket) -> None:
    bucket.replace(KEY, bucket.read(KEY)[:40])


def deleted(bucket: Bucket) -> None:
    bucket.delete(KEY)


@pytest.mark.parametrize("happens", [sound, torn, deleted])
def test_a_reader_of_the_earlier_life_hears_the_next_one(
    tmp_path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Bucket], None]
) -> None:
    bucket, now = Bucket(str(tmp_path)), [1_800_000_000.0]
    monkeypatch.setattr(records.time, "time", lambda: now[0])
    reader = RecordReader(bucket, KEY)
    RecordWriter(bucket, KEY, next_incarnation(bucket, KEY)).write({"life": 1})
    assert reader.read()["life"] == 1
    happens(bucket)
    now[0] += 10
    RecordWriter(bucket, KEY, next_incarnation(bucket, KEY)).write({"life": 2})
    assert reader.read()["life"] == 2


def test_a_clock_that_was_set_back_silences_nobody(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, now = Bucket(str(tmp_path)), [1_800_000_000.0]
    monkeypatch.setattr(records.time, "time", lambda: now[0])
    reader = RecordReader(bucket, KEY)
    for life in range(3):
        RecordWriter(bucket, KEY, next_incarnation(bucket, KEY)).write({"life": life})
        assert reader.read()["life"] == life
        now[0] -= 86_400
