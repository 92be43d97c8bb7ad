"""What every kind of bucket must stand, run in a process of its own: `python -m tests.storage.remote CHECK URL`.

Clients of real stores read their environment when they are imported, so the tests set it and start this.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo_jax.adapters.manifest import download_adapter, read_manifest
from grpo_jax.adapters.publisher import upload_adapter
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket, BucketError, Limits, ObjectTooLarge
from grpo_jax.storage.records import MAX_RECORD_BYTES, RecordReader, RecordWriter
from grpo_jax.storage.spool import SpoolReader, SpoolWriter
from tests.storage.objects import adapter, group


def verbs(bucket: Bucket) -> None:
    assert bucket.list() == []
    assert bucket.read_or_none("a/x") is None
    objects = {"a/b/one.bin": b"\0\1", "a/two words.é": b"", "ab/x": b"3", "c": os.urandom(300_000)}
    for key, data in objects.items():
        bucket.put(key, data)
    assert {key: bucket.read(key) for key in objects} == objects
    assert bucket.list() == sorted(objects)
    assert bucket.list("a") == ["a/b/one.bin", "a/two words.é"]
    assert bucket.list("a/b") == ["a/b/one.bin"]
    assert bucket.list("c") == bucket.list("nothing") == []
    assert bucket.child("a").read("b/one.bin") == b"\0\1"
    assert bucket.child("a").child("b").list() == ["one.bin"]
    for value in (b"1", b"", b"33"):
        bucket.replace("r/record.json", value)
        assert bucket.read("r/record.json") == value
    bucket.delete("c")
    bucket.delete("c")
    assert bucket.read_or_none("c") is None
    bucket.delete_folder("a")
    bucket.delete_folder("a")
    assert bucket.list() == ["ab/x", "r/record.json"]


def many(bucket: Bucket) -> None:
    """More objects than a page of a listing has."""
    names = [f"w/{i:03d}" for i in range(25)]
    for name in names:
        bucket.put(name, name.encode())
    assert bucket.list("w") == names
    bucket.delete_folder("w")
    assert bucket.list() == []


def side_by_side(bucket: Bucket) -> None:
    """No write is lost to one that goes on beside it."""
    keys = [f"{i}" for i in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: bucket.put(key, key.encode() * 1000), keys))
    assert bucket.list() == sorted(keys)
    assert all(bucket.read(key) == key.encode() * 1000 for key in keys)


def sizes(bucket: Bucket) -> None:
    for size in (0, 1, 1000):
        bucket.put(f"{size}", bytes(size))
        assert len(bucket.read(f"{size}", max_bytes=size)) == size
    for limit in (0, 1, 999):
        with pytest.raises(ObjectTooLarge, match="'1000'"):
            bucket.read("1000", max_bytes=limit)
    RecordWriter(bucket, "r.json", 1).write({"x": 1})
    reader = RecordReader(bucket, "r.json")
    first = reader.read()
    bucket.replace("r.json", b" " * (MAX_RECORD_BYTES + 1))
    assert first is not None
    assert reader.read() == first


def publish(bucket: Bucket) -> None:
    manifest, files = adapter(3, size=200_000)
    upload_adapter(bucket, manifest, files)
    with tempfile.TemporaryDirectory() as folder:
        path = download_adapter(bucket, read_manifest(bucket, manifest.name), Path(folder))
        assert {file: (path / file).read_bytes() for file in files} == files


def spool(bucket: Bucket) -> None:
    writer, reader = SpoolWriter(bucket, "w0"), SpoolReader(bucket)
    for index in range(3):
        writer.write(group(index))
        assert [g.id.index for g in reader.poll()] == [index]
    assert reader.poll() == []


def checkpoint(bucket: Bucket) -> None:
    import jax
    import numpy as np

    from grpo_jax.learner.checkpoint import Checkpointer
    from tests.learner.tiny import base_and_lora, make_step

    state = make_step().init(base_and_lora()[1])
    checkpointer = Checkpointer(bucket, keep=1)
    for step in (5, 10):
        checkpointer.save(step, state, {"lineage": {"5": "a"}})
    checkpointer.wait()
    assert {key.split("/")[1] for key in bucket.list(layout.CHECKPOINTS)} == {"000010"}
    restored = Checkpointer(bucket, keep=1).restore_newest(state)
    assert restored is not None
    assert restored[1] == {"step": 10, "lineage": {"5": "a"}}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored[0]), jax.device_get(state))


def no_such_bucket(bucket: Bucket) -> None:
    with pytest.raises(BucketError) as error:
        bucket.put("x", b"1")
    print(error.value)


def denied(bucket: Bucket) -> None:
    with pytest.raises(BucketError) as error:
        bucket.read("x")
    print(error.value)


def follow(bucket: Bucket) -> None:
    """Tells, as JSON, what lies in the bucket; at first and after every line of its input."""
    print(json.dumps({key: bucket.read(key).decode() for key in bucket.list()}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({key: bucket.read(key).decode() for key in bucket.list()}), flush=True)


def write(bucket: Bucket) -> None:
    """Does what its input says: JSON of [key, text], null for deletion."""
    for line in sys.stdin:
        key, text = json.loads(line)
        if text is None:
            bucket.delete(key)
        else:
            bucket.replace(key, text.encode())
        print(flush=True)


CHECKS = {
    f.__name__: f
    for f in (verbs, many, side_by_side, sizes, publish, spool, checkpoint, no_such_bucket, denied, follow, write)
}


def command(check: str, url: str) -> list[str]:
    return [sys.executable, "-m", "tests.storage.remote", check, url]


def run_check(check: str, url: str, env: Mapping[str, str]) -> str:
    """Runs one check in a process of its own; returns its output."""
    done = subprocess.run(command(check, url), env=env, cwd=_REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_freshness(url: str, env: Mapping[str, str]) -> None:
    """What one process writes, another one that has listed and read before sees with its next look."""
    both = [
        subprocess.Popen(
            command(check, url), env=env, cwd=_REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for check in ("follow", "write")
    ]
    follower, writer = both

    def ask(process: subprocess.Popen, line: str) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        return process.stdout.readline()

    try:
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline()) == {}
        there: dict[str, str] = {}
        for key, text in [("a/x", "1"), ("a/y", "2"), ("b", "3"), ("a/x", "44"), ("a/y", None), ("a/y", "5")]:
            ask(writer, json.dumps([key, text]))
            there = {**there, key: text} if text is not None else {k: v for k, v in there.items() if k != key}
            assert json.loads(ask(follower, "")) == there
    finally:
        for process in both:
            process.kill()
            process.communicate()


_REPO = Path(__file__).parents[2]

if __name__ == "__main__":
    CHECKS[sys.argv[1]](Bucket(sys.argv[2], Limits(attempt_s=30.0, total_s=60.0)))
