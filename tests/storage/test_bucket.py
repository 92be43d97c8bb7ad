import errno
import os
import threading
import uuid
from pathlib import Path

import pytest

from grpo_jax.errors import UsageError
from grpo_jax.storage.bucket import Bucket, Limits, ObjectTooLarge


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


@pytest.mark.parametrize("url", ["memory://", "memory:///", "memory:///x", "memory://x/", "faulty::memory://x"])
def test_memory_buckets_need_no_name(url: str) -> None:
    bucket, key = Bucket(url), uuid.uuid4().hex
    bucket.put(f"{key}/a", b"1")
    assert Bucket(bucket.url).read(f"{key}/a") == b"1"
    child = bucket.child(key)
    assert child.list() == Bucket(child.url).list() == bucket.child(key).list() == ["a"]
    assert Bucket("memory://").list() != []
    bucket.delete_folder(key)
    assert child.list() == []


def test_the_root_of_the_machine_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"1")
    key = str(tmp_path / "x").removeprefix("/")
    for url in ("/", "///", "file:///"):
        assert Bucket(url).read(key) == b"1"
        child = Bucket(url).child(key.rpartition("/")[0])
        assert child.list() == Bucket(child.url).list() == ["x"]
    monkeypatch.chdir(tmp_path)
    assert Bucket(".").read("x") == Bucket("./").read("x") == b"1"
    with pytest.raises(UsageError, match="empty"):
        Bucket("")


def test_a_folder_is_not_an_object_nor_an_object_a_folder(bucket: Bucket) -> None:
    bucket.put("a/x", b"1")
    for key in ("a", "a/x/y"):
        with pytest.raises(FileNotFoundError):
            bucket.read(key)
        assert bucket.read_or_none(key) is None
    assert bucket.list("a/x") == []
    bucket.delete_folder("a/x")
    bucket.delete("a/x/y")
    assert bucket.list() == ["a/x"]


@pytest.mark.parametrize("size", [0, 1, 5, 70_000])
def test_an_object_is_read_up_to_the_limit_and_no_further(bucket: Bucket, size: int) -> None:
    bucket.put("x", bytes(size))
    assert bucket.read("x", max_bytes=size) == bytes(size)
    assert bucket.read_or_none("x", max_bytes=size + 1) == bytes(size)
    small = Bucket(bucket.url, Limits(object_bytes=size - 1)).child("y")
    bucket.put("y/x", bytes(size))
    if size:
        with pytest.raises(ObjectTooLarge, match=f"'x' in .* is larger than {size - 1} bytes"):
            bucket.read("x", max_bytes=size - 1)
        with pytest.raises(ObjectTooLarge):
            small.read("x")


def test_neither_a_file_without_an_end_nor_an_enormous_one_fills_the_memory(tmp_path: Path) -> None:
    (tmp_path / "endless").symlink_to("/dev/zero")
    with (tmp_path / "enormous").open("wb") as file:
        file.truncate(1 << 43)
    for key in ("endless", "enormous"):
        with pytest.raises(ObjectTooLarge):
            Bucket(str(tmp_path)).read(key, max_bytes=1 << 20)


def test_what_a_directory_holds_is_on_the_disk_before_it_has_its_name_and_so_is_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power must not keep a batch record without its bytes."""
    calls: list[str] = []
    fsync, rename = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        calls.append("file" if os.fstat(descriptor).st_size == 3 else "folder")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("name"), rename(*paths)))
    Bucket(str(tmp_path)).put("a/b", b"abc")
    assert calls == ["file", "name", "folder"]


def test_a_mount_that_cannot_sync_is_written_to_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refused)
    Bucket(str(tmp_path)).put("a/b", b"abc")
    assert Bucket(str(tmp_path)).read("a/b") == b"abc"
