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
    assert list(reader.rejected) == [key.rsplit("/", 1)[-1].removesuffix(".safetensors")]
    assert len(caplog.records) == 1


def test_a_group_that_is_listed_before_it_can_be_read_is_looked_at_again(
    run: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    SpoolWriter(run, "w0").write(group(1))
    reader = SpoolReader(run)
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "read_or_none", lambda self, key: None)
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
    assert "larger than 2000 bytes" in reader.rejected["e000.i000000.a00"]


def test_a_bucket_that_fails_half_way_costs_no_group(run: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(4):
        SpoolWriter(run, "w0").write(group(index))
    reader, read, calls = SpoolReader(run), Bucket.read, []

    def fail_at_times(self: Bucket, key: str) -> bytes:
        calls.append(key)
        if len(calls) in (1, 4):
            raise BucketError("the store is down")
        return read(self, key)

    monkeypatch.setattr(Bucket, "read", fail_at_times)
    with pytest.raises(BucketError, match="down"):
        reader.poll()
    assert [g.id.index for g in reader.poll()] == [0, 1]
    assert [g.id.index for g in reader.poll()] == [2, 3]
    assert reader.poll() == []
