import uuid
from pathlib import Path

import numpy as np
import pytest

from grpo_jax.rollouts.sample import Group, GroupId, Provenance, Sample
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.spool import SpoolReader, SpoolWriter, group_ids


@pytest.fixture(params=["directory", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    return Bucket(str(tmp_path) if request.param == "directory" else f"memory://{uuid.uuid4()}")


def group(index: int, attempt: int = 0) -> Group:
    provenance = Provenance("toy.v000000.00000000", "r0", f"p{index}", 1, {}, 1.0, 2.0)
    sample = Sample(np.array([index], np.int32), np.array([-1.0], np.float32), 1.0, {}, "x", "stop")
    return Group(GroupId(0, index, attempt), np.array([1], np.int32), (sample,), provenance)


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
    reader = SpoolReader(run)
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
