import errno
import os
from pathlib import Path

import pytest

from grpo_jax.errors import UsageError
from grpo_jax.storage.bucket import Bucket, BucketError, Limits
from grpo_jax.storage.scrub import scrubbed


def test_a_write_that_fails_leaves_the_old_object_and_no_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(str(tmp_path), Limits(total_s=0.3))
    bucket.replace("a/record.json", b"old")
    calls = []

    def fail(source: str, target: str) -> None:
        calls.append(source)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(BucketError, match=r"writing 'a/record.json' in .* after \d+ attempts .*: No space left on dev"):
        bucket.replace("a/record.json", b"new")
    assert len(set(calls)) > 1
    assert bucket.read("a/record.json") == b"old"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["record.json"]


def test_a_full_disk_that_is_cleared_costs_a_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, replace, failures = Bucket(str(tmp_path)), os.replace, [errno.ENOSPC, errno.EIO, errno.ESTALE]

    def fail_first(source: str, target: str) -> None:
        if failures:
            raise OSError(failures.pop(), "not now")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_first)
    bucket.put("x", b"1")
    assert failures == []
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_what_no_retry_mends_fails_at_once(tmp_path: Path) -> None:
    bucket = Bucket(str(tmp_path))
    bucket.put("a", b"1")
    bucket.put("d/x", b"1")
    for key in ("a/b", "d", "x" * 300):
        with pytest.raises(BucketError) as error:
            bucket.put(key, b"2")
        assert "attempts" not in str(error.value)
    assert bucket.list() == ["a", "d/x"]


def test_an_error_is_one_sentence_without_credentials() -> None:
    bucket = Bucket("faulty:error=1:memory://someone:hunter2@x/b", Limits(total_s=0.3))
    with pytest.raises(BucketError) as error:
        bucket.child("c").read("k")
    message = str(error.value)
    assert message.startswith("reading 'k' in faulty:error=1:memory://***@x/b/c failed after ")
    assert message.endswith(": OSError: 503 Service Unavailable")
    assert error.value.__context__ is None or error.value.__suppress_context__
    assert "hunter2" not in message + repr(bucket)
    with pytest.raises(UsageError) as usage:
        Bucket("nonsense://someone:hunter2@x")
    assert "hunter2" not in str(usage.value)


@pytest.mark.parametrize(
    "text",
    [
        "GET https://someone:s3cr3t@host/x failed",
        "403 for https://host/x?X-Goog-Algorithm=RSA&X-Goog-Signature=s3cr3t&y=1",
        "https://host/x?token=s3cr3t",
        "https://host/x?a=1&X-Amz-Security-Token=s3cr3t",
        "header Authorization: Bearer s3cr3t",
        "token hf_s3cr3ts3cr3t is not valid",
    ],
)
def test_secrets_are_taken_out_of_what_clients_say(text: str) -> None:
    assert "s3cr3t" not in scrubbed(text)
    assert scrubbed(scrubbed(text)) == scrubbed(text)


@pytest.mark.parametrize("text", ["gs://bucket/a/b@2", "hf://buckets/a/b", "/tmp/x y", "key 'a/b' at 10:30"])
def test_what_is_no_secret_stays(text: str) -> None:
    assert scrubbed(text) == text


class Answer(Exception):
    def __init__(self, status: int | str):
        super().__init__(f"answered {status}")
        self.code = status


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (PermissionError(13, "Permission denied"), 3),
        (Answer(403), 3),
        (Answer("401"), 3),
        (OSError("Forbidden: https://x\nno access"), 3),
        (Answer(400), 1),
        (ValueError("Bad Request: https://x\nThe bucket name is invalid"), 1),
        (NotImplementedError("no"), 1),
        (OSError(errno.EROFS, "Read-only file system"), 1),
        (Answer(429), 9),
        (Answer(503), 9),
        (OSError(errno.EIO, "Input/output error"), 9),
        (ConnectionResetError("reset"), 9),
        (RuntimeError("any client's own"), 9),
    ],
)
def test_how_often_a_failing_call_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, attempts: int
) -> None:
    monkeypatch.setattr("grpo_jax.storage.bucket._FIRST_WAIT_S", 0.001)
    monkeypatch.setattr("grpo_jax.storage.bucket._DENIED_S", 0.0)
    bucket, calls = Bucket(str(tmp_path)), []

    def read(path: str, limit: int) -> bytes:
        calls.append(path)
        if len(calls) < 9:
            raise error
        return b"at last"

    monkeypatch.setattr(bucket._store, "read", read)
    if attempts == 9:
        assert bucket.read("x") == b"at last"
    else:
        with pytest.raises(BucketError):
            bucket.read("x")
    assert len(calls) == attempts


def test_a_store_that_denies_for_a_moment_is_asked_until_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, calls = Bucket(str(tmp_path)), []

    def read(path: str, limit: int) -> bytes:
        calls.append(path)
        if len(calls) < 5:
            raise PermissionError(errno.EACCES, "Permission denied")
        return b"at last"

    monkeypatch.setattr("grpo_jax.storage.bucket._FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(bucket._store, "read", read)
    assert bucket.read("x") == b"at last"


def test_a_large_object_has_the_time_that_its_bytes_take(tmp_path: Path) -> None:
    bucket = Bucket(f"faulty:slow=0.4:{tmp_path}", Limits(attempt_s=0.2, total_s=0.2, bytes_per_s=1e6))
    with pytest.raises(BucketError):
        bucket.put("small", b"x")
    bucket.put("large", bytes(1_000_000))
