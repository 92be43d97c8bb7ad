"""Where a server reads the files of its adapters: copies on an agent's local disk, or the bucket through a mount.

Either way the files are checked against manifest, digest and name before a server is told of them. Calls block.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from grpo_jax.adapters.manifest import FILES, AdapterError, Manifest, download_adapter, file_entry, read_manifest
from grpo_jax.adapters.names import adapter_digest, parse_policy
from grpo_jax.generator.index import write_index
from grpo_jax.generator.sameness import Make, read_make
from grpo_jax.scratch import scratch
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket

# Adapters whose verification is remembered: a window and what has just left it, for several servers.
_REMEMBERED = 32


@dataclass(frozen=True)
class Fetched:
    """A verified adapter, and its directory as the server is told of it."""

    manifest: Manifest
    make: Make
    path: str


class Source(Protocol):
    loads: bool
    """Whether adapters are loaded and unloaded by us; else what a server lists is only judged."""
    may_lag: bool
    """Whether a server may see files later than they were fetched."""

    def fetch(self, name: str) -> Fetched:
        """AdapterError says what is wrong with the adapter in the bucket."""

    def first(self) -> Manifest | None:
        """The manifest of v0, if it is still there."""

    def stored(self) -> set[str]:
        """Policies whose files are kept for the server alone."""

    def offer(self, names: Iterable[str]) -> None:
        """Says which policies, of those that are stored, the server may register again by itself."""

    def release(self, name: str) -> None:
        """Nothing names this policy any more: its files may go."""


class LocalCopies:
    """Copies in `folder`, which is emptied at first: what an earlier agent left there may be of another run."""

    loads, may_lag = True, False

    def __init__(self, run: Bucket, folder: Path):
        """run: the run's prefix."""
        self._run, self._folder = run, folder.resolve()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)

    def fetch(self, name: str) -> Fetched:
        manifest = _manifest(self._run, name)
        folder = self._folder / name
        # A server may be reading what is there: it is written again only if it is not what it should be.
        if not _matches(folder, manifest):
            download_adapter(self._run, manifest, self._folder)
        return Fetched(manifest, read_make(manifest, folder), str(folder))

    def first(self) -> Manifest | None:
        return _first(self._run)

    def stored(self) -> set[str]:
        return {path.name for path in self._folder.iterdir() if path.is_dir()}

    def offer(self, names: Iterable[str]) -> None:
        write_index(self._folder, names)

    def release(self, name: str) -> None:
        if name in self.stored():  # not whatever path a record calls a policy
            shutil.rmtree(self._folder / name, ignore_errors=True)


class Mounted:
    """Of a server that has no agent: it reads the run's prefix where it has the bucket mounted, or nowhere."""

    may_lag = True

    def __init__(self, run: Bucket, name: str, mount: str | None):
        """
        Args:
            run: the prefix of the run `name`.
            mount: the bucket's path as the servers see it; None: they load nothing for us.
        """
        self._run, self.loads = run, mount is not None
        self._adapters = f"{(mount or '').rstrip('/')}/{name}/{layout.ADAPTERS}"
        self._verified = lru_cache(_REMEMBERED)(self._verify)

    def fetch(self, name: str) -> Fetched:
        return self._verified(name)

    def first(self) -> Manifest | None:
        return _first(self._run)

    def stored(self) -> set[str]:
        return set()

    def offer(self, names: Iterable[str]) -> None:
        return

    def release(self, name: str) -> None:
        return

    def _verify(self, name: str) -> Fetched:
        manifest = _manifest(self._run, name)
        with scratch() as folder:
            make = read_make(manifest, download_adapter(self._run, manifest, folder))
        return Fetched(manifest, make, f"{self._adapters}/{name}")


def _manifest(run: Bucket, name: str) -> Manifest:
    try:
        return read_manifest(run, name)
    except ValueError as error:
        raise AdapterError(str(error)) from None


def _matches(folder: Path, manifest: Manifest) -> bool:
    """Whether a directory holds exactly what a manifest and its name promise."""
    try:
        contents = {file: (folder / file).read_bytes() for file in FILES}
    except OSError:
        return False
    digest = adapter_digest(contents[layout.ADAPTER_CONFIG], contents[layout.ADAPTER_WEIGHTS])
    named = digest == manifest.digest and digest.startswith(parse_policy(manifest.name).hex)
    return named and all(file_entry(data) == manifest.files[file] for file, data in contents.items())


def _first(run: Bucket) -> Manifest | None:
    for key in run.list(layout.ADAPTERS):
        name = key.split("/")[1]
        if key == layout.adapter(name, layout.MANIFEST) and _is_first(name):
            return read_manifest(run, name)
    return None


def _is_first(name: str) -> bool:
    try:
        return parse_policy(name).version == 0
    except ValueError:
        return False
