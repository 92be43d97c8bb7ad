"""One facade over every kind of bucket: immutable objects, a few replaceable records, listing and deletion.

A bucket is a URL that fsspec knows (`gs://…`, `hf://buckets/…`, `memory://…`) or a plain directory. Keys are relative,
`/`-separated. Nothing here relies on rename, locks, fresh listings or compare-and-swap of the store.
"""

import os
import threading
import uuid
from pathlib import Path
from typing import Any

import fsspec

from grpo_jax.errors import UsageError


class Bucket:
    """A prefix in a store. Thread-safe as far as the fsspec filesystem behind it is."""

    def __init__(self, url: str):
        self.url = url.rstrip("/") or "/"
        try:
            # Listings are cached by default in several filesystems and would hide what other jobs write.
            self._fs, self._root = fsspec.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise UsageError(f"bucket {self.url!r} cannot be opened: {error}") from None
        self._root = self._root.rstrip("/")
        self.is_local = "file" in _protocols(self._fs)

    def __repr__(self) -> str:
        return f"Bucket({self.url!r})"

    def child(self, prefix: str) -> "Bucket":
        return Bucket(f"{self.url}/{_checked(prefix)}")

    def local_path(self, key: str = "") -> Path:
        """The path of `key` on this machine; only for a bucket that is a directory."""
        if not self.is_local:
            raise ValueError(f"{self.url} is not a local directory")
        return Path(self._path(key) if key else self._root)

    def put(self, key: str, data: bytes) -> None:
        """Writes an object that never changes. Writing the same key again must write the same bytes."""
        self._write(key, data)

    def replace(self, key: str, data: bytes) -> None:
        """Writes a record that its single writer replaces now and then. Readers must check what they read."""
        self._write(key, data)

    def read(self, key: str) -> bytes:
        """The bytes of `key`; FileNotFoundError if there is none."""
        return self._fs.cat_file(self._path(key))

    def read_or_none(self, key: str) -> bytes | None:
        try:
            return self.read(key)
        except FileNotFoundError:
            return None

    def list(self, prefix: str = "") -> list[str]:
        """Sorted keys of all objects below the folder `prefix` (all of the bucket when empty)."""
        root = self._path(prefix) if prefix else self._root
        try:
            found = self._fs.find(root)
        except FileNotFoundError:
            return []
        base = len(self._root) + 1
        return sorted(path[base:] for path in found if not _is_temporary(path))

    def delete(self, key: str) -> None:
        """Deletes one object; deleting what is not there is no error."""
        try:
            self._fs.rm_file(self._path(key))
        except FileNotFoundError:
            return

    def delete_folder(self, prefix: str) -> None:
        """Deletes all objects below `prefix`."""
        try:
            self._fs.rm(self._path(prefix), recursive=True)
        except FileNotFoundError:
            return

    def _path(self, key: str) -> str:
        return f"{self._root}/{_checked(key)}"

    def _write(self, key: str, data: bytes) -> None:
        path = self._path(key)
        if not self.is_local:
            self._fs.pipe_file(path, data)
            return
        # A process may be killed in mid-write; on a directory a torn object would otherwise stay under its name.
        folder, name = os.path.split(path)
        os.makedirs(folder, exist_ok=True)
        temporary = os.path.join(folder, f".{name}.{os.getpid()}.{threading.get_ident()}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _is_temporary(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    return name.startswith(".") and name.endswith(".tmp")


def _checked(key: str) -> str:
    """Refuses keys that would leave the bucket's prefix."""
    parts = key.split("/")
    if not key or any(part in ("", ".", "..") for part in parts) or "\\" in key or "\0" in key:
        raise ValueError(f"bad key {key!r}")
    return key
