import os
import threading
import uuid
from pathlib import Path

import pytest

from grpo_jax.errors import UsageError
from grpo_jax.storage.bucket import Bucket


@pytest.fixture(params=["directory", "file-url", "memory"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    urls = {"directory": str(tmp_path / "b"), "file-url": f"file://{tmp_path}/b", "memory": f"memory://{uuid.uuid4()}"}
    return Bucket(urls[request.param])


def test_what_is_put_can_be_read_and_listed(bucket: Bucket) -> None:
    assert bucket.list() == []
    bucket.put("a/b/one.bin", b"\0\1")
    bucket.put("a/two", b"")
    bucket.put("c", b"x")
    assert bucket.read("a/b/one.bin") == b"\0\1"
    assert bucket.read("a/two") == b""
    assert bucket.list() == ["a/b/one.bin", "a/two", "c"]
    assert bucket.list("a") == ["a/b/one.bin", "a/two"]
    assert bucket.list("a/b") == ["a/b/one.bin"]
    assert bucket.list("nothing") == []


def test_a_folder_is_no_prefix_of_a_name(bucket: Bucket) -> None:
    bucket.put("run/x", b"1")
    bucket.put("run-2/x", b"2")
    assert bucket.list("run") == ["run/x"]


def test_what_is_written_is_seen_at_once_by_another_reader(bucket: Bucket) -> None:
    other = Bucket(bucket.url)
    assert other.list() == []
    bucket.put("a/x", b"1")
    assert other.list() == ["a/x"]
    bucket.replace("a/x", b"22")
    assert other.read("a/x") == b"22"
    bucket.put("a/y", b"3")
    assert other.list("a") == ["a/x", "a/y"]
    bucket.delete("a/x")
    assert other.list() == ["a/y"]
    assert other.read_or_none("a/x") is None


def test_what_is_not_there(bucket: Bucket) -> None:
    assert bucket.read_or_none("a") is None
    with pytest.raises(FileNotFoundError):
        bucket.read("a/b")
    bucket.delete("a/b")
    bucket.delete_folder("a")


def test_a_folder_is_deleted_with_all_below_it_and_nothing_beside_it(bucket: Bucket) -> None:
    for key in ("a/1", "a/b/2", "ab/3", "c"):
        bucket.put(key, b"x")
    bucket.delete_folder("a")
    assert bucket.list() == ["ab/3", "c"]


def test_a_child_is_a_bucket_of_its_own(bucket: Bucket) -> None:
    child = bucket.child("runs/one")
    child.put("x", b"1")
    assert bucket.list() == ["runs/one/x"]
    assert child.list() == ["x"]
    assert child.is_local == bucket.is_local


@pytest.mark.parametrize(
    "key", ["", "/", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a/./b", "..", "a\\..\\b", "a\0b"]
)
def test_no_key_leads_out_of_the_bucket(bucket: Bucket, key: str) -> None:
    inside = bucket.child("inside")
    for call in (inside.read, inside.read_or_none, inside.delete, inside.child, lambda k: inside.put(k, b"x")):
        with pytest.raises(ValueError, match="bad key"):
            call(key)
    assert bucket.list() == []


def test_a_write_that_fails_leaves_the_old_object_and_no_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(str(tmp_path))
    bucket.replace("a/record.json", b"old")

    def fail(source: str, target: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        bucket.replace("a/record.json", b"new")
    assert bucket.read("a/record.json") == b"old"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["record.json"]


def test_what_a_killed_writer_left_behind_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(str(tmp_path))
    monkeypatch.setattr(os, "replace", lambda source, target: None)  # killed just before the rename
    bucket.put("a/x.json", b"1")
    monkeypatch.undo()
    bucket.put("a/y.json", b"2")
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2
    assert bucket.list() == bucket.list("a") == ["a/y.json"]


def test_no_reader_ever_sees_a_torn_object(tmp_path: Path) -> None:
    bucket, values = Bucket(str(tmp_path)), [bytes([i]) * 200_000 for i in range(4)]
    bucket.replace("x", values[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for value in values:
                bucket.replace("x", value)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(200):
            assert bucket.read("x") in values
            assert bucket.list() == ["x"]
    finally:
        stop.set()
        for writer in writers:
            writer.join()


def test_only_a_directory_has_local_paths(tmp_path: Path) -> None:
    bucket = Bucket(str(tmp_path / "b"))
    assert bucket.is_local
    bucket.put("a/x", b"1")
    assert bucket.local_path("a/x").read_bytes() == b"1"
    assert bucket.local_path() == tmp_path / "b"
    memory = Bucket("memory://paths")
    assert not memory.is_local
    with pytest.raises(ValueError, match="not a local directory"):
        memory.local_path()


def test_a_url_that_nothing_understands_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="nonsense://x"):
        Bucket("nonsense://x")
