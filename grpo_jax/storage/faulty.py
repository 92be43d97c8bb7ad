"""Buckets that misbehave on purpose: `faulty:<fault>=<value>,…:<url of the bucket below>`.

For tests, and for whole runs to show what they stand (`bucket=faulty:late=0.5,error=0.05:/tmp/runs`). The faults are
those of real stores and mounts. They lie below the retries of `Bucket`, and reach other processes through nothing but
the bucket below. Each `Bucket` that is opened on such a URL (with its children) is one reader with a view of its own.

Which call is hit is drawn from `seed`, the command line of the process and the order of opening: another process draws
otherwise, the same one again draws alike. Seconds, or probabilities per call, all 0 if not given:

seed=N         what all draws begin with.
delay=S        every call takes up to S seconds longer.
slow=S         every object that is written takes S seconds.
late=S         what others wrote is seen up to S seconds after it was written, by each reader at a time of its own. Till
               then the reader has what it read last under that path, or nothing; listings leave the object out.
stale_list=S   a listing may be one that this reader got up to S seconds ago: new objects missing, deleted ones in it.
torn=P         a write shows the beginning of the object for up to 0.3 s, then all of it.
reorder=P      a write returns before it lands, up to 1 s later; a later write of the same path is overwritten by it.
               The writer itself sees it meanwhile. It lands at the latest when its process ends.
error=P        OSError as from a store that answers 503; half of the writes that fail so have been done all the same.
denied=P       PermissionError, although nothing is forbidden.
full=P         a write fails with ENOSPC.
"""

import atexit
import errno
import random
import sys
import threading
import time
from dataclasses import dataclass, fields
from itertools import count

from grpo_jax.errors import UsageError
from grpo_jax.storage.scrub import scrubbed
from grpo_jax.storage.stores import FAULTY, Store, open_store

_TORN_S, _HELD_S = 0.3, 1.0
# What was read is remembered, as long as it is among the last so many paths: a run of days must not grow by its faults.
_REMEMBERED_BYTES, _REMEMBERED_PATHS = 1 << 20, 64

_opened = count()


@dataclass(frozen=True)
class Faults:
    """See the module's docstring."""

    seed: int = 0
    delay: float = 0.0
    slow: float = 0.0
    late: float = 0.0
    stale_list: float = 0.0
    torn: float = 0.0
    reorder: float = 0.0
    error: float = 0.0
    denied: float = 0.0
    full: float = 0.0


def open_faulty(url: str) -> "tuple[FaultyStore, str]":
    """The store of a `faulty:` URL, and the path of the bucket in it. UsageError names what cannot be read."""
    options, mark, inner = url.removeprefix(FAULTY).partition(":")
    if not mark or not inner:
        raise UsageError(f"bucket {scrubbed(url)!r}: it must read {FAULTY}<fault>=<value>,…:<url of the bucket below>")
    values: dict[str, float] = {}
    for option in filter(None, options.split(",")):
        name, _, value = option.partition("=")
        if name not in {field.name for field in fields(Faults)}:
            raise UsageError(f"bucket {scrubbed(url)!r}: there is no fault {name!r}")
        try:
            values[name] = int(value) if name == "seed" else float(value)
        except ValueError:
            raise UsageError(f"bucket {scrubbed(url)!r}: {option!r} has no number") from None
    store, root = open_store(inner)
    return FaultyStore(store, Faults(**values)), root  # type: ignore[arg-type]


class FaultyStore:
    """A store with faults over one without. Thread-safe."""

    is_local = False  # else its user would go past it

    def __init__(self, inner: Store, faults: Faults):
        self._inner, self._faults = inner, faults
        self._reader = f"{faults.seed} {sys.argv} {next(_opened)}"
        self._random = random.Random(self._reader)
        self._lock = threading.Lock()
        self._own: dict[str, float] = {}  # path → when the object was written that this reader wrote last
        self._held: dict[str, list[bytes]] = {}
        self._seen: dict[str, bytes] = {}
        self._listed: dict[str, tuple[float, list[str]]] = {}
        if faults.reorder:
            atexit.register(self._land_all)

    def read(self, path: str, limit: int) -> bytes:
        self._trouble(self._faults.error)
        with self._lock:
            if held := self._held.get(path):
                return held[-1]
        if self._is_hidden(path):
            with self._lock:
                if path in self._seen:
                    return self._seen[path]
            raise FileNotFoundError(path)
        data = self._inner.read(path, limit)
        if len(data) <= _REMEMBERED_BYTES:
            with self._lock:
                self._seen.pop(path, None)
                self._seen[path] = data
                if len(self._seen) > _REMEMBERED_PATHS:
                    del self._seen[next(iter(self._seen))]
        return data

    def write(self, path: str, data: bytes) -> None:
        faults = self._faults
        self._trouble(0.0)
        time.sleep(faults.slow)
        if self._hits(faults.full):
            raise OSError(errno.ENOSPC, "No space left on device")
        if self._hits(faults.error):
            if self._hits(0.5):
                self._land(path, data)
            raise _unavailable()
        if self._hits(faults.reorder):
            with self._lock:
                self._held.setdefault(path, []).append(data)
                wait_s = self._random.uniform(0.0, _HELD_S)
            timer = threading.Timer(wait_s, self._land_held, (path, data))
            timer.daemon = True
            timer.start()
            return
        if len(data) > 1 and self._hits(faults.torn):
            with self._lock:
                length, wait_s = self._random.randrange(1, len(data)), self._random.uniform(0.0, _TORN_S)
            self._land(path, data[:length])
            time.sleep(wait_s)
        self._land(path, data)

    def find(self, path: str) -> list[str]:
        self._trouble(self._faults.error)
        now = time.monotonic()
        with self._lock:
            at, listed = self._listed.get(path, (float("-inf"), []))
            if now - at < self._random.uniform(0.0, self._faults.stale_list):
                return listed
        found = [name for name in self._inner.find(path) if not self._is_hidden(name)]
        with self._lock:
            self._listed[path] = now, found
        return found

    def remove(self, path: str) -> None:
        self._trouble(self._faults.error)
        self._inner.remove(path)

    def remove_folder(self, path: str) -> None:
        self._trouble(self._faults.error)
        self._inner.remove_folder(path)

    def modified(self, path: str) -> float:
        return self._inner.modified(path)

    def _trouble(self, error: float) -> None:
        """What may happen to any call before it has done anything."""
        with self._lock:
            wait_s = self._random.uniform(0.0, self._faults.delay)
        time.sleep(wait_s)
        if self._hits(self._faults.denied):
            raise PermissionError(errno.EACCES, "Permission denied")
        if self._hits(error):
            raise _unavailable()

    def _hits(self, probability: float) -> bool:
        with self._lock:
            return self._random.random() < probability

    def _is_hidden(self, path: str) -> bool:
        """Whether this reader cannot see yet what lies under `path`, which somebody else wrote."""
        if not self._faults.late:
            return False
        try:
            modified = self._inner.modified(path)
        except FileNotFoundError:
            return False
        if self._own.get(path) == modified:
            return False
        late_s = random.Random(f"{self._reader} {path} {modified}").uniform(0.0, self._faults.late)
        return time.time() - modified < late_s

    def _land(self, path: str, data: bytes) -> None:
        self._inner.write(path, data)
        if self._faults.late:
            try:
                self._own[path] = self._inner.modified(path)
            except FileNotFoundError:
                self._own.pop(path, None)

    def _land_held(self, path: str, data: bytes) -> None:
        with self._lock:
            held = self._held.get(path, [])
            if not any(one is data for one in held):
                return  # it has landed at the exit
        try:
            self._land(path, data)
        finally:
            with self._lock:
                self._held[path] = [one for one in self._held.get(path, []) if one is not data]

    def _land_all(self) -> None:
        for path, held in list(self._held.items()):
            for data in held:
                self._land_held(path, data)


def _unavailable() -> OSError:
    return OSError("503 Service Unavailable")
