"""Reading the replicas' heartbeats from the bucket: what each says about itself, and whether it is alive."""

import logging
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from yarl import URL

from grpo_jax.proxy.addresses import replica_url
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import Record, RecordReader

log = logging.getLogger(__name__)

# How often a record is read that has been silent for long: it is most likely the last word of a machine that is gone.
_QUIET_POLL_S = 2.0


class Heartbeat(BaseModel):
    """What a generator agent writes. Unknown keys are left out, so that a newer agent is understood."""

    model_config = ConfigDict(extra="ignore", frozen=True, arbitrary_types_allowed=True)
    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")  # it becomes a response header
    url: Annotated[URL, BeforeValidator(lambda value: replica_url(value) if isinstance(value, str) else value)]
    state: Literal["starting", "ready", "draining"]
    proved: list[str]
    quarantined: dict[str, str] = {}
    loaded: list[str] = []
    engine: str | None = None
    engine_version: str | None = None
    dtype: str | None = None
    running: int = 0
    waiting: int = 0
    restarts: int = 0
    error: str | None = None
    proofs: int = 0
    proved_at: dict[str, float] = {}
    refused_total: int = 0


@dataclass(frozen=True)
class Sighting:
    heartbeat: Heartbeat
    live: bool
    changed_at: float  # monotonic seconds

    @property
    def state(self) -> str:
        return self.heartbeat.state if self.live else "silent"


@dataclass
class _Entry:
    reader: RecordReader
    changed_at: float  # monotonic seconds; before the first change, when the key was found
    read_at: float = float("-inf")
    stamp: tuple[int, int] | None = None
    heard: bool = False  # a change has been seen to happen
    heartbeat: Heartbeat | None = None
    complaint: str | None = None

    def silent(self, silent_s: float) -> bool:
        # Measured up to the last successful reading: an unreachable bucket is not the replica's silence.
        return self.read_at - self.changed_at >= silent_s


class HeartbeatReader:
    """Lists and reads the records of one fleet. For one thread; `poll` may take as long as the bucket takes.

    A replica counts as live once its `seq` has been seen to change: what lies in the bucket at the start may be the
    last word of an earlier life, and its policies those of an abandoned lineage.
    """

    def __init__(self, bucket: Bucket, fleet: str, silent_s: float):
        self._bucket, self._prefix, self._silent_s = bucket, layout.replicas(fleet), silent_s
        self._entries: dict[str, _Entry] = {}
        self._troubled: set[str] = set()
        self.listed = False  # the fleet has been listed at least once

    def poll(self) -> list[Sighting]:
        """Every replica that has written a sound heartbeat. Errors of the bucket are logged; old values stay."""
        try:
            listed = {key for key in self._bucket.list(self._prefix) if key.endswith(".json")}
            self.listed = True
            self._note_trouble(self._prefix, None)
        except Exception as error:  # each kind of bucket raises its own errors
            self._note_trouble(self._prefix, error)
            listed = set(self._entries)
        for key in sorted(listed | self._entries.keys()):
            try:
                self._read(key)
                self._note_trouble(key, None)
            except Exception as error:
                self._note_trouble(key, error)
        for key in [key for key, entry in self._entries.items() if key not in listed and entry.silent(self._silent_s)]:
            del self._entries[key]
        return [
            Sighting(entry.heartbeat, entry.heard and not entry.silent(self._silent_s), entry.changed_at)
            for entry in self._entries.values()
            if entry.heartbeat is not None
        ]

    def _note_trouble(self, key: str, error: Exception | None) -> None:
        """Logs the first failure of a series and its end."""
        if error is None:
            if key in self._troubled:
                self._troubled.remove(key)
                log.info("fleet: %s can be read again", key)
        elif key not in self._troubled:
            log.warning("fleet: %s cannot be read, what is known of it stays: %s: %s", key, type(error).__name__, error)
            self._troubled.add(key)

    def _read(self, key: str) -> None:
        now = time.monotonic()
        entry = self._entries.setdefault(key, _Entry(RecordReader(self._bucket, key), now))
        if entry.silent(self._silent_s) and now - entry.read_at < _QUIET_POLL_S:
            return
        record = entry.reader.read()
        entry.read_at = time.monotonic()
        if record is None:
            return
        stamp = record["incarnation"], record["seq"]
        if stamp == entry.stamp:
            return
        first, entry.stamp = entry.stamp is None, stamp
        heartbeat, complaint = self._checked(key, record)
        if heartbeat is not None:
            entry.heartbeat = heartbeat
            if not first:
                entry.heard, entry.changed_at = True, entry.read_at
        elif complaint != entry.complaint:
            log.warning("fleet: %s is left out: %s", key, complaint)
        entry.complaint = complaint

    def _checked(self, key: str, record: Record) -> tuple[Heartbeat | None, str | None]:
        """The heartbeat, or None and what is wrong with it."""
        try:
            heartbeat = Heartbeat.model_validate(record)
        except ValidationError as error:
            first: Any = error.errors()[0]
            return None, f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        if key != f"{self._prefix}/{heartbeat.id}.json":
            return None, f"it names replica {heartbeat.id}"
        return heartbeat, None
