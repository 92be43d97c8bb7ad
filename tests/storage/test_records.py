import hashlib
import json
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import MAX_RECORD_BYTES, RecordReader, RecordWriter, canonical_json, seal, unseal


@pytest.fixture(params=["directory", "memory"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    return Bucket(str(tmp_path) if request.param == "directory" else f"memory://{uuid.uuid4()}")


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "é"]), values), st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_sealed_record_comes_back(body: dict[str, Any], incarnation: int, seq: int) -> None:
    assert unseal(seal(body, incarnation, seq)) == {**body, "incarnation": incarnation, "seq": seq}


def test_canonical_json_has_one_form_and_refuses_nan() -> None:
    assert canonical_json({"b": 1, "a": [1.5, None, "é"]}) == '{"a":[1.5,null,"é"],"b":1}'.encode()
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON compliant"):
            canonical_json({"x": bad})


def test_every_damaged_byte_and_every_truncation_is_noticed() -> None:
    data = seal({"a": 1, "text": "word", "list": [True, None]}, 3, 14)
    for place in range(len(data)):
        assert unseal(data[:place]) is None
        damaged = bytearray(data)
        damaged[place] ^= 0x01
        assert unseal(bytes(damaged)) is None, f"byte {place}"


@given(st.binary(max_size=50) | values.map(lambda value: json.dumps(value).encode()))
def test_what_is_no_record_is_none_and_no_error(data: bytes) -> None:
    assert unseal(data) is None


def test_a_reader_returns_the_newest_and_keeps_it(bucket: Bucket) -> None:
    reader, writer = RecordReader(bucket, "r.json"), RecordWriter(bucket, "r.json", 1)
    assert reader.read() is None
    writer.write({"x": 1})
    assert reader.read() == {"x": 1, "incarnation": 1, "seq": 1}
    writer.write({"x": 2})
    assert reader.read() == {"x": 2, "incarnation": 1, "seq": 2}
    bucket.delete("r.json")
    assert reader.read() == {"x": 2, "incarnation": 1, "seq": 2}


@pytest.mark.parametrize("garbage", [b"", b"{", b"null", b"[]", b'{"incarnation":9,"seq":9}', b"\xff\xfe"])
def test_a_damaged_record_keeps_the_old_value(bucket: Bucket, garbage: bytes) -> None:
    reader, writer = RecordReader(bucket, "r.json"), RecordWriter(bucket, "r.json", 1)
    writer.write({"x": 1})
    reader.read()
    bucket.replace("r.json", garbage)
    assert reader.read() == {"x": 1, "incarnation": 1, "seq": 1}
    writer.write({"x": 2})
    found = reader.read()
    assert found is not None
    assert found["x"] == 2


@pytest.mark.parametrize(
    ("stamp", "accepted"), [((2, 4), False), ((1, 99), False), ((2, 5), False), ((2, 6), True), ((3, 1), True)]
)
def test_a_record_never_goes_back(bucket: Bucket, stamp: tuple[int, int], accepted: bool) -> None:
    reader = RecordReader(bucket, "r.json")
    bucket.replace("r.json", seal({"x": "old"}, 2, 5))
    reader.read()
    bucket.replace("r.json", seal({"x": "new"}, *stamp))
    found = reader.read()
    assert found is not None
    assert found["x"] == ("new" if accepted else "old")


def test_a_writer_that_was_replaced_cannot_take_it_back(bucket: Bucket) -> None:
    old, new = RecordWriter(bucket, "r.json", 1), RecordWriter(bucket, "r.json", 2)
    reader = RecordReader(bucket, "r.json")
    for _ in range(3):
        old.write({"by": "old"})
    new.write({"by": "new"})
    reader.read()
    old.write({"by": "old"})
    found = reader.read()
    assert found is not None
    assert found["by"] == "new"


def test_silence_is_measured_by_change_on_the_reader_s_own_clock(bucket: Bucket) -> None:
    reader, writer = RecordReader(bucket, "r.json"), RecordWriter(bucket, "r.json", 1)
    writer.write({"at": 0.0})  # whatever time the writer's clock shows
    time.sleep(0.05)
    assert reader.silent_s() >= 0.05
    reader.read()
    changed = reader.changed_at
    time.sleep(0.01)
    reader.read()
    assert reader.changed_at == changed
    writer.write({"at": 0.0})
    reader.read()
    assert reader.changed_at > changed


def test_writes_within_the_interval_are_left_out_unless_forced(bucket: Bucket) -> None:
    writer = RecordWriter(bucket, "r.json", 1, min_interval_s=60.0)
    assert writer.write({"x": 1}, force=False)
    assert not writer.write({"x": 2}, force=False)
    record = unseal(bucket.read("r.json"))
    assert record is not None
    assert record["x"] == 1
    assert writer.write({"x": 3})
    record = unseal(bucket.read("r.json"))
    assert record is not None
    assert (record["x"], record["seq"]) == (3, 2)


@pytest.mark.parametrize("stamp", [True, 1.0, "1", None, [1]])
@pytest.mark.parametrize("field", ["incarnation", "seq"])
def test_a_stamp_is_two_integers(field: str, stamp: Any) -> None:
    body = {"incarnation": 1, "seq": 1, field: stamp}
    body["checksum"] = hashlib.sha256(canonical_json(body)).hexdigest()
    assert unseal(canonical_json(body)) is None


@pytest.mark.parametrize(
    "data",
    [b'{"checksum":"x","incarnation":1,"seq":1,"x":1e999}', b'{"checksum":"x","incarnation":1,"seq":1,"x":"\\ud800"}'],
)
def test_json_that_cannot_be_written_again_is_no_record(data: bytes) -> None:
    assert unseal(data) is None


def test_json_nested_without_end_is_no_record() -> None:
    assert unseal(b'{"x":' + b"[" * 100_000) is None


def test_a_forged_record_without_end_keeps_the_old_value(bucket: Bucket) -> None:
    reader, writer = RecordReader(bucket, "r.json"), RecordWriter(bucket, "r.json", 1)
    writer.write({"x": 1})
    first = reader.read()
    bucket.replace("r.json", seal({"x": "y" * MAX_RECORD_BYTES}, 1, 2))
    assert first is not None
    assert reader.read() == first
    assert not writer.confirm()
    assert RecordReader(bucket, "r.json").read() == first


def test_a_writer_puts_right_what_landed_late(bucket: Bucket) -> None:
    writer = RecordWriter(bucket, "r.json", 2)
    assert writer.confirm()
    assert bucket.list() == []
    writer.write({"x": 1})
    early = bucket.read("r.json")
    writer.write({"x": 2})
    last = bucket.read("r.json")
    assert writer.confirm()
    for damage in (early, b"", seal({"x": 3}, 1, 99)):
        bucket.replace("r.json", damage)
        assert not writer.confirm()
        assert bucket.read("r.json") == last
    bucket.delete("r.json")
    assert not writer.confirm()
    assert bucket.read("r.json") == last
    successor = seal({"x": 0}, 3, 1)
    bucket.replace("r.json", successor)
    assert writer.confirm()
    assert bucket.read("r.json") == successor
