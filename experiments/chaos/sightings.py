"""What can be seen of a run from outside, in the store behind its bucket: who is in service, and what was committed."""

import hashlib
import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_jax.jobs.watchdog import LOCAL_REPLICA, WORKER
from grpo_jax.rollouts.sample import Group, GroupError
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.dropped import dropped_in
from grpo_jax.storage.records import Record, RecordReader

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_ASK_S = 2.0
_AT_WORK = ("running", "evaluating", "done", "training", "draining")


class Signs:
    """The records that the parts of a run write, as they stand now."""

    def __init__(self, bucket: Path, name: str, proxy_port: int):
        root = Bucket(str(bucket))
        run = root.child(name)
        self._proxy = f"http://127.0.0.1:{proxy_port}"
        self._readers = {
            "learner": RecordReader(run, layout.LEARNER_STATE),
            "worker": RecordReader(run, layout.worker_state(WORKER)),
            **{f"generator-{i}": RecordReader(root, layout.replica(name, LOCAL_REPLICA.format(i))) for i in range(2)},
        }

    def step(self) -> int:
        """Steps that the learner has finished."""
        return int((self.record("learner") or {}).get("step", 0))

    def record(self, part: str) -> Record | None:
        """Of the part itself; an engine's is its agent's."""
        reader = self._readers.get(part.replace("engine", "generator"))
        return None if reader is None else reader.read()

    def life(self, part: str) -> tuple[int, int]:
        """Which life of the part has last been in service; grows with each one."""
        record = self.record(part)
        if record is None or not _serves(record):
            return (0, 0)
        return record["incarnation"], record.get("restarts", 0) if part.startswith("engine") else 0

    def answers(self, part: str) -> bool:
        """Whether the part does its work at this moment, as far as it can be asked."""
        if part == "proxy":
            return _answers(f"{self._proxy}/v1/policy")
        record = self.record(part)
        if record is None or not _serves(record):
            return False
        return _answers(f"{record['url']}/health") if part.startswith("engine") else True


def _serves(record: Record) -> bool:
    if "proved" in record:
        return record["state"] == "ready" and bool(record["proved"])
    return record["phase"] in _AT_WORK


def _answers(url: str) -> bool:
    try:
        with _OPENER.open(url, timeout=_ASK_S) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


@dataclass
class Committed:
    """The groups that have ever stood whole in the spool, and the batches that have ever been recorded."""

    run: Bucket
    digests: dict[str, str] = field(default_factory=dict)
    """Group id → digest of its file when it was first seen."""
    samples: dict[str, int] = field(default_factory=dict)
    rewritten: set[str] = field(default_factory=set)
    """Groups whose file held something else later."""
    batches: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Key → record, as first seen."""
    changed_batches: set[str] = field(default_factory=set)
    drops: dict[str, str] = field(default_factory=dict)
    _stamps: dict[str, tuple[int, int]] = field(default_factory=dict)
    _contents: dict[str, str] = field(default_factory=dict)
    """Key of a group's file → digest of what it held first."""

    def look(self) -> None:
        for key in self.run.list(layout.ROLLOUTS):
            self._look_at_group(key)
        for key in self.run.list(layout.BATCHES):
            self._look_at_batch(key)
        record = RecordReader(self.run, layout.LEARNER_STATE).read()
        self.drops.update((str(group), reason) for group, reason in dropped_in(record))

    def still_there(self) -> set[str]:
        """The groups that are whole in the spool now."""
        found = set()
        for key in self.run.list(layout.ROLLOUTS):
            try:
                found.add(str(Group.from_bytes(self.run.read(key)).id))
            except (GroupError, OSError):
                continue
        return found

    def _is_news(self, key: str) -> bool:
        try:
            info = self.run.local_path(key).stat()
        except OSError:
            return False
        stamp = info.st_ino, info.st_mtime_ns
        if self._stamps.get(key) == stamp:
            return False
        self._stamps[key] = stamp
        return True

    def _look_at_group(self, key: str) -> None:
        if not self._is_news(key):
            return
        try:
            data = self.run.read(key)
            group = Group.from_bytes(data)
        except (GroupError, OSError):  # torn, or deleted meanwhile
            return
        name, digest = str(group.id), hashlib.sha256(data).hexdigest()
        self.digests.setdefault(name, digest)
        if self._contents.setdefault(key, digest) != digest:
            self.rewritten.add(name)
        self.samples[name] = len(group.samples)

    def _look_at_batch(self, key: str) -> None:
        if not self._is_news(key):
            return
        try:
            record = json.loads(self.run.read(key))
            int(record["step"]), list(record["groups"]), dict(record["drops"])
        except (ValueError, TypeError, KeyError, OSError):
            return
        if self.batches.setdefault(key, record) != record:
            self.changed_batches.add(key)
        self.drops.update(record["drops"])
