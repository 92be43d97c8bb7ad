import uuid
from pathlib import Path

import pytest

from grpo_jax.rollouts.sample import Group
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket, BucketError, Limits
from grpo_jax.storage.spool import SpoolReader, SpoolWriter, group_ids
from tests.storage.objects import group


@pytest.fixture(params=["directory", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    return Bucket(str(tmp_path) if request.param == "directory" else f"memory://{uuid.uuid4()}")


def ids(groups: list[Group]) -> list[str]:
    return [str(g.id) for g in groups]


def test_each_group_is_handed_on_once_in_the_order_of_keys(run: Bucket) -> None:
    writer, reader = SpoolWriter(run, "w0"), SpoolReader(run)
    assert reader.poll() == []
    writer.write(group(2))
    writer.write(group(1))
    assert ids(reader.poll()) == ["e000.i000001.a00", "e000.i000002.a00"]
    writer.write(group(1, attempt=1))
    assert ids(reader.poll()) == ["e000.i000001.a01"]
    assert reader.poll() == []


def test_a_reader_that_starts_late_gets_all_of_all_workers(run: Bucket) -> None:
    SpoolWriter(run, "w1").write(group(1))
    SpoolWriter(run, "w0").write(group(2))
    assert ids(SpoolReader(run).poll()) == ["e000.i000002.a00", "e000.i000001.a00"]
    assert sorted(group_ids(run)) == ["e000.i000001.a00", "e000.i000002.a00"]


def test_an_unsound_file_is_left_out_once_and_stops_nothing(run: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    data = bytearray(group(1).to_bytes())
    data[-1] ^= 1
    key = layout.rollout("w0", "e000.i000001.a00")
    run.put(key, bytes(data))
    SpoolWriter(run, "w0").write(group(2))
    reader = SpoolReader(run, patience_s=0.0)
    assert ids(reader.poll()) == ["e000.i000002.a00"]
    assert reader.poll() == []
    assert list(reader.rejected) == [key]
    assert reader.lost == ["e000.i000001.a00"]
    assert len(caplog.records) == 1


def test_a_group_that_is_listed_before_it_can_be_read_is_looked_at_again(
    run: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    SpoolWriter(run, "w0").write(group(1))
    reader = SpoolReader(run)
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "read_or_none", lambda self, key, max_bytes=None, *, size=0: None)
        assert reader.poll() == []
    assert ids(reader.poll()) == ["e000.i000001.a00"]


def test_a_group_that_comes_torn_at_first_is_not_lost(run: Bucket) -> None:
    data, key = group(1).to_bytes(), layout.rollout("w0", "e000.i000001.a00")
    reader = SpoolReader(run)
    for length in (0, 1, len(data) // 2, len(data) - 1):
        run.replace(key, data[:length])
        assert reader.poll() == []
    run.replace(key, data)
    assert ids(reader.poll()) == ["e000.i000001.a00"]
    assert reader.poll() == []
    assert reader.rejected == {}


def test_an_object_that_no_group_can_be_is_left_out_and_stops_nothing(run: Bucket) -> None:
    small = Bucket(run.url, Limits(object_bytes=2000))
    small.put(layout.rollout("w0", "e000.i000000.a00"), bytes(2001))
    SpoolWriter(small, "w0").write(group(2))
    reader = SpoolReader(small, patience_s=0.0)
    assert ids(reader.poll()) == ["e000.i000002.a00"]
    assert "larger than 2000 bytes" in reader.rejected[layout.rollout("w0", "e000.i000000.a00")]


def test_a_bucket_that_fails_half_way_costs_no_group(run: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(4):
        SpoolWriter(run, "w0").write(group(index))
    reader, read, calls = SpoolReader(run), Bucket.read, []

    def fail_at_times(self: Bucket, key: str, max_bytes: int | None = None, *, size: int = 0) -> bytes:
        calls.append(key)
        if len(calls) in (1, 4):
            raise BucketError("the store is down")
        return read(self, key, max_bytes)

    monkeypatch.setattr(Bucket, "read", fail_at_times)
    with pytest.raises(BucketError, match="down"):
        reader.poll()
    assert [g.id.index for g in reader.poll()] == [0, 1]
    assert [g.id.index for g in reader.poll()] == [2, 3]
    assert reader.poll() == []


def test_the_same_group_from_two_workers_is_read_once_and_the_second_file_is_refused(run: Bucket) -> None:
    SpoolWriter(run, "w1").write(group(1))
    reader = SpoolReader(run)
    assert ids(reader.poll()) == ["e000.i000001.a00"]
    SpoolWriter(run, "w0").write(group(1))
    assert reader.poll() == []
    assert "as rollouts/w1/e000.i000001.a00" in reader.rejected[layout.rollout("w0", "e000.i000001.a00")]
    assert reader.lost == []  # the group is there all the same


def test_of_two_files_of_a_group_the_one_on_record_is_read(run: Bucket) -> None:
    for worker in ("w0", "w1"):
        SpoolWriter(run, worker).write(group(1))
    key = layout.rollout("w1", "e000.i000001.a00")
    reader = SpoolReader(run, files={"e000.i000001.a00": key})
    assert ids(reader.poll()) == ["e000.i000001.a00"]
    assert reader.file("e000.i000001.a00") == key
    assert list(reader.rejected) == [layout.rollout("w0", "e000.i000001.a00")]


def test_a_group_under_another_ones_name_is_refused_at_once(run: Bucket) -> None:
    run.put(layout.rollout("w0", "e000.i000005.a00"), group(1).to_bytes())
    reader = SpoolReader(run)
    assert reader.poll() == []
    assert reader.rejected == {layout.rollout("w0", "e000.i000005.a00"): "it holds the group e000.i000001.a00"}
    assert reader.lost == ["e000.i000005.a00"]


def test_what_a_check_refuses_is_not_handed_on(run: Bucket) -> None:
    for index in range(3):
        SpoolWriter(run, "w0").write(group(index))
    reader = SpoolReader(run, check=lambda g: "it is odd" if g.id.index % 2 else None)
    assert [g.id.index for g in reader.poll()] == [0, 2]
    assert list(reader.rejected.values()) == ["it is odd"]
    assert reader.poll() == []


def test_files_above_the_size_of_a_group_are_not_read(run: Bucket) -> None:
    SpoolWriter(run, "w0").write(group(1))
    reader = SpoolReader(run, patience_s=0.0, max_bytes=100)
    assert reader.poll() == []
    assert "larger than 100 bytes" in reader.rejected[layout.rollout("w0", "e000.i000001.a00")]
