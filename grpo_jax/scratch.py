"""Folders for what is needed for a while, which no death leaves behind for good.

`tempfile` removes its folders unless the process is killed. Here each has a file that its owner keeps locked, and the
kernel unlocks that of a dead one; whoever needs a folder first removes those that nobody holds.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX, _LOCK, _FILES = "grpo_jax-scratch-", "lock", "files"


class Scratch:
    """An empty folder, `path`, until `close`. OSError if there is no room for one."""

    def __init__(self, parent: str | None = None):
        """parent: default is the system's folder for temporary files."""
        parent = parent or tempfile.gettempdir()
        _remove_what_nobody_holds(Path(parent))
        self._lock: int | None = None
        self._folder = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
        try:
            self._lock = os.open(self._folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            (self._folder / _FILES).mkdir()
            # It gets its name once it is locked: nobody may take it for a dead one's before.
            self._folder = self._folder.rename(self._folder.with_name(self._folder.name[1:]))
        except OSError:
            self._remove()
            raise
        self.path = self._folder / _FILES

    def close(self) -> None:
        if self._lock is not None:
            self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder for the time of a `with`."""
    folder = Scratch()
    try:
        yield folder.path
    finally:
        folder.close()


def _remove_what_nobody_holds(parent: Path) -> None:
    """Of this user. What cannot be looked at or removed is left alone."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
