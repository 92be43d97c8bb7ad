"""What an agent reads of its run: whether it goes on, which base it has, which policies it wants."""

import asyncio
import logging
import time
from typing import Never

from grpo_jax.generator.policies import Wanted
from grpo_jax.rollouts.threads import in_daemon_thread
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import Record, RecordReader

log = logging.getLogger(__name__)

_FINAL = ("finished", "failed")
# A final status that stands there at the start may be that of an earlier life, which a learner is about to resume.
_STALE_END_S = 30.0
_LOOK_S = 1.0
_LOOKS_AWAY_PER_S = 2.0
# Between two looks at the pointer of a local bucket; a mount that takes its time is asked less often.
_SOONEST_S, _LATEST_S, _SHARE_OF_TIME = 0.02, 0.05, 0.1


class Observer:
    """Polls three records.

    `run.json` comes first; the others are not looked for before it exists, and what is absent not more often than twice
    a second: some mounts remember an absence.
    """

    def __init__(self, run: Bucket, of: int = 1, changed: asyncio.Event | None = None):
        """
        Args:
            of: so many runs are looked at from here: the more, the less often those that have nothing to say.
            changed: set whenever another set of policies is wanted.
        """
        self._run = RecordReader(run, layout.RUN)
        self._policy = RecordReader(run, layout.POLICY)
        self._learner = RecordReader(run, layout.LEARNER_STATE)
        self._is_local = run.is_local
        self._away_s = _LOOK_S if run.is_local else max(_LOOK_S, of / _LOOKS_AWAY_PER_S)
        self._first_stamp: tuple[int, int] | None = None
        self._troubled = False
        self._changed = changed or asyncio.Event()
        self.base_digest: str | None = None
        """Of the run, once `run.json` is there."""
        self.wanted: Wanted | None = None
        self.over: str | None = None
        """Why there is nothing more to be done for the run; a learner may take it back."""

    @property
    def wants_anything(self) -> bool:
        return self.wanted is not None and self.over is None

    @property
    def silent_s(self) -> float:
        """Seconds since the learner has last shown any sign of life, or since the start."""
        return min(self._learner.silent_s(), self._run.silent_s())

    async def watch(self) -> Never:
        """Reads until it is cancelled."""
        while True:
            run = await self._read(self._run)
            if run is not None:
                self.base_digest = (run.get("base") or {}).get("digest")
                if run.get("status") == "failed":
                    await self._read(self._learner)
                self.over = self._end(run)
            if run is None or self.over is not None:
                await asyncio.sleep(self._away_s)
                continue
            await self._read(self._learner)
            await self._watch_policy()

    async def _watch_policy(self) -> None:
        """About a second of looking at the pointer alone: that one is wanted fast."""
        until = time.monotonic() + _LOOK_S
        while (began := time.monotonic()) < until:
            if (policy := await self._read(self._policy)) is not None and Wanted.is_in(policy):
                self._want(Wanted.of(policy))
            await asyncio.sleep(self._pause_s(time.monotonic() - began))

    def _pause_s(self, took_s: float) -> float:
        """After a look that took `took_s`."""
        if not self._is_local:
            return _LOOK_S
        return 0.5 if self.wanted is None else min(_LATEST_S, max(_SOONEST_S, took_s / _SHARE_OF_TIME))

    def _want(self, wanted: Wanted) -> None:
        if wanted != self.wanted:
            self.wanted = wanted
            self._changed.set()

    def _end(self, run: Record) -> str | None:
        stamp = (run["incarnation"], run["seq"])
        self._first_stamp = self._first_stamp or stamp
        fresh = stamp != self._first_stamp or self._run.silent_s() >= _STALE_END_S
        status = run.get("status")
        if (
            status == "failed"
        ):  # whoever looks after the learner may start it again; its state beats from the first moment
            fresh = self.silent_s >= _STALE_END_S
        return f"the run has {status}" if status in _FINAL and fresh else None

    async def _read(self, reader: RecordReader) -> Record | None:
        """The newest value, or None; a bucket that fails is one that has nothing new."""
        try:
            record = await in_daemon_thread(reader.read)
        except Exception as error:  # every kind of bucket raises errors of its own
            if not self._troubled:
                log.warning("the bucket cannot be read, and is tried again: %r", error)
            self._troubled = True
            return None
        self._troubled = False
        return record
