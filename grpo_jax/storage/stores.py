"""What lies below `Bucket`: a directory, anything that fsspec opens, or a bucket of the Hugging Face Hub.

A store does one thing once: no deadline, no retries, errors as they come. Paths are absolute within the store.
"""

import errno
import os
import shutil
import stat
import uuid
from typing import Any, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from grpo_jax.errors import UsageError
from grpo_jax.storage.scrub import scrubbed

FAULTY = "faulty:"
"""Begins the URL of a bucket that misbehaves on purpose, for tests (`grpo_jax.storage.faulty`)."""


# What mounts that cannot sync say.
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF)


class TooLarge(Exception):
    """The object has more bytes than the reader allows."""

    def __init__(self, limit: int):
        super().__init__(f"the object is larger than {limit} bytes")


class Store(Protocol):
    is_local: bool

    def read(self, path: str, limit: int) -> bytes:
        """The bytes of an object; FileNotFoundError if there is none, TooLarge without reading more than limit + 1."""

    def write(self, path: str, data: bytes) -> None:
        """Creates or replaces an object, with the folders that it needs."""

    def find(self, path: str) -> list[str]:
        """The paths of all objects below a folder, in any order; none if there is no such folder."""

    def remove(self, path: str) -> None:
        """Deletes an object; FileNotFoundError if there is none."""

    def remove_folder(self, path: str) -> None:
        """Deletes all objects below a folder."""

    def modified(self, path: str) -> float:
        """When an object was written, in seconds since the epoch; FileNotFoundError if there is none."""


def open_store(url: str) -> tuple[Store, str]:
    """The store of a bucket URL, and the path of the bucket in it. UsageError if nothing can open it."""
    if url.startswith(FAULTY):
        from grpo_jax.storage.faulty import open_faulty

        return open_faulty(url)
    protocol = fsspec.core.split_protocol(url)[0] or "file"
    if protocol in LocalFileSystem.protocol and "::" not in url:
        return LocalStore(), LocalFileSystem._strip_protocol(url).rstrip("/")
    try:
        if f"{url}/".startswith("hf://buckets/"):
            from grpo_jax.storage.hf import open_hub

            return open_hub(url)
        # Listings are cached by default in several filesystems and would hide what other jobs write.
        filesystem, root = fsspec.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise UsageError(f"bucket {scrubbed(url)!r} cannot be opened: {scrubbed(str(error))}") from None
    return (MemoryStore if protocol == "memory" else FsspecStore)(filesystem), root.rstrip("/")


class LocalStore:
    """Directories of this machine, or mounted here. An object appears whole, by a rename within its directory.

    What has been written is on the disk: of a machine that loses its power no commit outlives what it commits.
    """

    is_local = True

    def read(self, path: str, limit: int) -> bytes:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except NotADirectoryError:
            raise FileNotFoundError(path) from None
        try:
            info = os.fstat(file)
            if stat.S_ISDIR(info.st_mode):
                raise FileNotFoundError(path)
            if info.st_size > limit:
                raise TooLarge(limit)
            parts, length, ask = [], 0, info.st_size + 1
            while part := os.read(file, ask):
                parts.append(part)
                length += len(part)
                if length > limit:
                    raise TooLarge(limit)
                ask = min(max(info.st_size + 1 - length, 1 << 16), limit + 1 - length)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            os.close(file)

    def write(self, path: str, data: bytes) -> None:
        # A process may be killed in mid-write; a torn object would otherwise stay under its name.
        folder, name = os.path.split(path)
        temporary = f"{folder}/.{name}.{uuid.uuid4().hex}.tmp"
        try:
            try:
                _write_file(temporary, data)
            except FileNotFoundError:
                os.makedirs(folder, exist_ok=True)
                _write_file(temporary, data)
            os.replace(temporary, path)
            _sync_folder(folder)
        except FileNotFoundError:
            raise OSError(errno.ESTALE, "its directory was deleted meanwhile") from None
        except BaseException:
            try:
                os.unlink(temporary)
            except OSError:
                pass  # the first error says more
            raise

    def find(self, path: str) -> list[str]:
        found, folders = [], [path or "/"]
        while folders:
            try:
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        elif entry.is_file():
                            found.append(entry.path)
            except (FileNotFoundError, NotADirectoryError):
                continue  # never there, or deleted meanwhile
        return found

    def remove(self, path: str) -> None:
        try:
            os.unlink(path)
        except NotADirectoryError:
            raise FileNotFoundError(path) from None

    def remove_folder(self, path: str) -> None:
        while os.path.isdir(path):
            try:
                shutil.rmtree(path)
            except FileNotFoundError:  # somebody else deletes here too
                continue

    def modified(self, path: str) -> float:
        return os.stat(path).st_mtime


class FsspecStore:
    """Any filesystem of fsspec."""

    is_local = False

    def __init__(self, filesystem: Any):
        self._fs = filesystem

    def read(self, path: str, limit: int) -> bytes:
        try:
            data = self._fs.cat_file(path, start=0, end=limit + 1)
        except FileNotFoundError:
            raise
        except Exception:
            # No range fits an empty object: stores refuse it, each in words of its own.
            if self._fs.info(path)["size"] != 0:
                raise
            return b""
        if len(data) > limit:
            raise TooLarge(limit)
        return data

    def write(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(path, data)

    def find(self, path: str) -> list[str]:
        self._fs.invalidate_cache()  # not every filesystem can be told to keep none
        try:
            found = self._fs.find(path)
        except FileNotFoundError:
            return []
        return [name for name in found if name.startswith(f"{path}/")]  # not the object of that name

    def remove(self, path: str) -> None:
        self._fs.rm_file(path)

    def remove_folder(self, path: str) -> None:
        for _ in range(3):
            found = self.find(path)
            try:
                if found:
                    self._fs.rm(found)
                return
            except FileNotFoundError:  # somebody else deletes here too
                continue

    def modified(self, path: str) -> float:
        return self._fs.modified(path).timestamp()


class MemoryStore(FsspecStore):
    """fsspec's `memory://`: one file object serves all its readers, so it is not read by seeking."""

    def read(self, path: str, limit: int) -> bytes:
        try:
            data = self._fs.store[path].getvalue()
        except KeyError:
            raise FileNotFoundError(path) from None
        if len(data) > limit:
            raise TooLarge(limit)
        return data


def _write_file(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        _sync(file.fileno())


def _sync_folder(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync(folder)
    finally:
        os.close(folder)


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
