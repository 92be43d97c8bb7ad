"""One facade over every kind of bucket: immutable objects, a few replaceable records, listing and deletion.

A bucket is a URL that fsspec knows (`gs://…`, `memory://…`), a bucket of the Hugging Face Hub (`hf://buckets/…`) or a
plain directory. Keys are relative, `/`-separated. Nothing here relies on rename (but within a local directory), locks,
fresh listings or compare-and-swap of the store.

Every verb ends within its deadline, also where the call below hangs, and is tried again until then. A write that was
given up may still land, at any later time. That harms nobody: an immutable object gets the same bytes again, and
readers of a record refuse one that is older than what they know (`RecordReader`; `RecordWriter.confirm` corrects it).
"""

import copy
import errno
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from grpo_jax.errors import BucketError as BucketError
from grpo_jax.errors import UsageError
from grpo_jax.storage.deadline import call_within
from grpo_jax.storage.scrub import scrubbed
from grpo_jax.storage.stores import FAULTY, TooLarge, open_store

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 10.0
_DENIED_ATTEMPTS, _DENIED_S = 3, 5.0
"""Stores refuse for a moment while a token is renewed: denied is final only after so many tries and so much time."""

_HOPELESS = (TooLarge, TypeError, AttributeError, NotImplementedError, ImportError, MemoryError)
_HOPELESS_ERRNO = {
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.EFBIG,
}
_PASSING_STATUS = {408, 409, 423, 425, 429}
_LONGEST_CAUSE = 300


@dataclass(frozen=True)
class Limits:
    """What a verb may cost."""

    attempt_s: float = 60.0
    """One attempt; beyond a store that takes 30 s for an object."""
    total_s: float = 180.0
    """All attempts and the waits between them."""
    bytes_per_s: float = 1e6
    """Both are longer by what the bytes of an object take at this rate: a checkpoint may be of gigabytes."""
    object_bytes: int = 4 << 30
    """The largest object that is read."""


DEFAULT_LIMITS = Limits()


class ObjectTooLarge(BucketError):
    """An object was not read because of its size."""


class Bucket:
    """A prefix in a store. Thread-safe as far as the filesystem behind it is.

    Every verb raises BucketError once its deadline is over, and at once where no retry can help.
    """

    def __init__(self, url: str, limits: Limits = DEFAULT_LIMITS):
        self.url = _tidy(url)
        self.limits = limits
        self._store, self._root = open_store(self.url)
        self.is_local = self._store.is_local

    def __repr__(self) -> str:
        return f"Bucket({self.address!r})"

    @property
    def address(self) -> str:
        """The URL without credentials, for messages."""
        return scrubbed(self.url)

    def child(self, prefix: str) -> "Bucket":
        """The bucket below `prefix`, with the same limits."""
        child = copy.copy(self)
        child._root = self._path(prefix)
        child.url = _joined(self.url, prefix)
        return child

    def local_path(self, key: str = "") -> Path:
        """The path of `key` on this machine; only for a bucket that is a directory."""
        if not self.is_local:
            raise ValueError(f"{self.address} is not a local directory")
        return Path(self._path(key) if key else self._root or "/")

    def put(self, key: str, data: bytes) -> None:
        """Writes an object that never changes. Writing the same key again must write the same bytes."""
        self._write(key, data)

    def replace(self, key: str, data: bytes) -> None:
        """Writes a record that its single writer replaces now and then. Readers must check what they read."""
        self._write(key, data)

    def read(self, key: str, max_bytes: int | None = None, *, size: int = 0) -> bytes:
        """The bytes of `key`; FileNotFoundError if there is none.

        ObjectTooLarge if they are more than `max_bytes` (`Limits.object_bytes` if None); no more is ever in memory.
        Who knows the size of a large object says it, so that it has the time that it takes (`Limits.bytes_per_s`).
        """
        limit = self.limits.object_bytes if max_bytes is None else max_bytes
        return self._call("reading", key, self._store.read, self._path(key), limit, size=size)

    def read_or_none(self, key: str, max_bytes: int | None = None, *, size: int = 0) -> bytes | None:
        try:
            return self.read(key, max_bytes, size=size)
        except FileNotFoundError:
            return None

    def list(self, prefix: str = "") -> list[str]:
        """Sorted keys of all objects below the folder `prefix` (all of the bucket when empty)."""
        folder = self._path(prefix) if prefix else self._root
        found = self._call("listing", prefix, self._store.find, folder)
        base = len(self._root) + 1
        return sorted(path[base:] for path in found if path.startswith(f"{folder}/") and not _is_temporary(path))

    def delete(self, key: str) -> None:
        """Deletes one object; deleting what is not there is no error."""
        try:
            self._call("deleting", key, self._store.remove, self._path(key))
        except FileNotFoundError:
            return

    def delete_folder(self, prefix: str) -> None:
        """Deletes all objects below `prefix`: those that a listing shows now."""
        try:
            self._call("deleting", prefix, self._store.remove_folder, self._path(prefix))
        except FileNotFoundError:
            return

    def _path(self, key: str) -> str:
        return f"{self._root}/{_checked(key)}"

    def _write(self, key: str, data: bytes) -> None:
        path = self._path(key)
        try:
            self._call("writing", key, self._store.write, path, data, size=len(data))
        except FileNotFoundError as error:  # the bucket itself is not there
            raise self._error("writing", key, 1, 0.0, error) from None

    def _call(self, verb: str, key: str, function: Callable[..., T], *args: Any, size: int = 0) -> T:
        """`size`: bytes that are moved, at most."""
        started, attempts = time.monotonic(), 0
        longer_s = size / self.limits.bytes_per_s
        attempt_s, total_s = self.limits.attempt_s + longer_s, self.limits.total_s + longer_s
        while True:
            left_s = total_s - (time.monotonic() - started)
            attempts += 1
            try:
                return call_within(min(attempt_s, left_s), function, *args)
            except FileNotFoundError:
                raise
            except Exception as error:
                wait_s = random.uniform(0.0, min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(attempts - 1, 20)))
                spent_s = time.monotonic() - started
                if _is_final(error, attempts, spent_s) or spent_s + wait_s >= total_s:
                    # The cause is in the message; as a context it would carry its secrets into every traceback.
                    raise self._error(verb, key, attempts, spent_s, error) from None
                log.info("%s %s in %s is tried again: %s", verb, key, self.address, _told(error))
            time.sleep(wait_s)

    def _error(self, verb: str, key: str, attempts: int, spent_s: float, cause: Exception) -> BucketError:
        tries = f" after {attempts} attempts in {spent_s:.1f} s" if attempts > 1 else ""
        message = f"{verb} {f'{key!r} in ' if key else ''}{self.address} failed{tries}: {_told(cause)}"
        return ObjectTooLarge(message) if isinstance(cause, TooLarge) else BucketError(message)


def _is_final(error: Exception, attempts: int, spent_s: float) -> bool:
    """Whether no further attempt can help."""
    status = _http_status(error)
    if isinstance(error, PermissionError) or status in (401, 403):
        return attempts >= _DENIED_ATTEMPTS and spent_s >= _DENIED_S
    if status is not None and 400 <= status < 500:
        return status not in _PASSING_STATUS
    return isinstance(error, _HOPELESS) or (isinstance(error, OSError) and error.errno in _HOPELESS_ERRNO)


def _http_status(error: Exception) -> int | None:
    """What the store answered, as far as its client tells. They all tell it differently."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int | str) and str(value).isdecimal():
                return int(value)
    text = str(error)  # gcsfs has a plain OSError and a plain ValueError for these
    return 403 if text.startswith("Forbidden: ") else 400 if text.startswith("Bad Request: ") else None


def _told(error: Exception) -> str:
    """The cause in one line."""
    if isinstance(error, OSError) and error.strerror:
        return str(error.strerror)
    text = " ".join(scrubbed(str(error)).split())
    text = text if len(text) <= _LONGEST_CAUSE else f"{text[:_LONGEST_CAUSE]}…"
    if isinstance(error, TooLarge | TimeoutError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _tidy(url: str) -> str:
    """`url` without slashes at its end, but for those that are all of its path."""
    if not url:
        raise UsageError("the bucket has an empty URL")
    if url.startswith(FAULTY):
        options, mark, inner = url.removeprefix(FAULTY).partition(":")
        return f"{FAULTY}{options}{mark}{_tidy(inner) if inner else ''}"
    scheme, mark, path = url.rpartition("://")
    return f"{scheme}{mark}{path.rstrip('/') or path[:1]}"


def _joined(url: str, prefix: str) -> str:
    return f"{url}{prefix}" if url.endswith("/") and not url.endswith("://") else f"{url}/{prefix}"


def _is_temporary(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    return name.startswith(".") and name.endswith(".tmp")


def _checked(key: str) -> str:
    """Refuses keys that would leave the bucket's prefix."""
    parts = key.split("/")
    if not key or any(part in ("", ".", "..") for part in parts) or "\\" in key or "\0" in key:
        raise ValueError(f"bad key {key!r}")
    return key
