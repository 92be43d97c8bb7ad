"""What a launch leaves in the bucket, so that any machine can go on with it: three records below `<target>/launch/`."""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from grpo_jax.config.load import parse_config
from grpo_jax.config.schema import Config
from grpo_jax.jobs.launch_spec import Launch, namespace_of
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import Record, RecordReader, RecordWriter, incarnation_after

BEAT_S = 5.0
_SILENT_S = 4 * BEAT_S
_LAUNCH, _DESIRED, _LAUNCHER = "launch", "desired", "launcher"


@dataclass(frozen=True)
class Desired:
    """What is wanted of a target: whoever is attached brings it about."""

    state: Literal["running", "cancelled"]
    generators: int


class LaunchState:
    """Of one target. Each record has many possible writers, one after the other; the newest counts."""

    def __init__(self, place: Bucket):
        """`place`: the target's own."""
        self._place = place
        self._readers = {name: RecordReader(place, _key(name)) for name in (_LAUNCH, _DESIRED, _LAUNCHER)}
        self._beat: RecordWriter | None = None
        self._claimed, self._beat_at = 0, float("-inf")

    def launch(self) -> tuple[tuple[Config, ...], Launch] | None:
        """The launch that was begun last: the configs of its runs and what its jobs have in common."""
        record = self._readers[_LAUNCH].read()
        if record is None or "configs" not in record:  # an earlier version's had one
            return None
        configs = tuple(parse_config(config, "launch.json") for config in record["configs"])
        return configs, Launch(record["id"], record["files"], record["package"], record["labels"])

    def namespace(self) -> str | None:
        """Where its jobs are, as far as that is recorded, also by another version of this package."""
        record = self._readers[_LAUNCH].read() or {}
        return record.get("namespace")

    def write_launch(self, configs: Sequence[Config], launch: Launch) -> None:
        body = {"configs": [config.model_dump(mode="json") for config in configs], **asdict(launch)}
        body["namespace"] = namespace_of(configs[0])
        self._writer(_LAUNCH).write({**body, "started_at": time.time()})

    def desired(self) -> Desired | None:
        record = self._readers[_DESIRED].read()
        return None if record is None else Desired(record["state"], record["generators"])

    def want(self, desired: Desired) -> None:
        self._writer(_DESIRED).write({"state": desired.state, "generators": desired.generators})

    def claim(self) -> None:
        """From now on this process is the one that starts and cancels jobs."""
        self._beat = self._writer(_LAUNCHER)
        self._beat.write(_who())
        record = self._readers[_LAUNCHER].read()
        assert record is not None
        self._claimed = record["incarnation"]

    def beat(self) -> bool:
        """Says now and then that this process lives. False: another one has claimed the run."""
        assert self._beat is not None
        record = self._readers[_LAUNCHER].read()
        if record is not None and record["incarnation"] > self._claimed:
            return False
        if time.monotonic() - self._beat_at >= BEAT_S:
            self._beat_at = time.monotonic()
            self._beat.write(_who())
        return True

    def leave(self) -> None:
        """Says that nobody is attached any more, unless somebody is."""
        record = self._readers[_LAUNCHER].read()
        if self._beat is not None and record is not None and record["incarnation"] == self._claimed:
            self._beat.write({**_who(), "at": 0.0})

    def attached(self) -> bool:
        """Whether another process looks after the target at this time, by the clocks of the two machines."""
        record = self._readers[_LAUNCHER].read()
        return record is not None and abs(time.time() - record["at"]) < _SILENT_S

    def _writer(self, name: str) -> RecordWriter:
        """A life later than any before, whatever the clocks of other machines say."""
        before = self._readers[name].read()
        return RecordWriter(self._place, _key(name), incarnation_after(before["incarnation"] if before else 0))


def _key(name: str) -> str:
    return f"{layout.LAUNCH}/{name}.json"


def _who() -> Record:
    return {"host": socket.gethostname(), "pid": os.getpid(), "at": time.time()}
