"""One life of the learner: from the claim of a run to the end of the process. What all its parts share."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from grpo_jax.adapters.names import parse_policy
from grpo_jax.adapters.publisher import Publisher
from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_FAILED, RunFailed
from grpo_jax.learner.activity import Activity
from grpo_jax.learner.checkpoint import Checkpointer
from grpo_jax.learner.engine import Engine
from grpo_jax.learner.fence import FencedBucket, claim_incarnation
from grpo_jax.learner.history import History
from grpo_jax.learner.ledger import Ledger
from grpo_jax.learner.records import Heartbeat, persist
from grpo_jax.learner.saving import Saver
from grpo_jax.learner.setup import Trainer
from grpo_jax.learner.surroundings import Surroundings
from grpo_jax.learner.target import RewardTarget
from grpo_jax.observability.metrics import MetricsLog
from grpo_jax.rollouts.pinning import Pin
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.dropped import dropped_body
from grpo_jax.storage.records import RecordWriter
from grpo_jax.storage.spool import SpoolReader

T = TypeVar("T")

FLUSH_S = 600.0
_LOOK_S = 0.5
_SHOWN_QUARANTINED = 50


class Interrupted(Exception):
    """SIGTERM or SIGINT: what is finished is saved, the same command goes on."""


@dataclass(frozen=True)
class Parts:
    """What a learner has once it is ready for its first step."""

    trainer: Trainer
    engine: Engine
    tokens: np.ndarray  # of the canary
    publisher: Publisher
    metrics: MetricsLog
    saver: Saver
    spool: SpoolReader
    target: RewardTarget
    pin: Pin | None


class Life:
    """Claims the run, and beats from then on. `run` is its prefix, behind the fence of this incarnation."""

    def __init__(self, config: Config, run_dir: Path, stop: threading.Event):
        self.config, self.run_dir, self._stop = config, run_dir, stop
        plain = Bucket(config.bucket).child(config.run)
        self.incarnation = claim_incarnation(plain)
        self.run = FencedBucket(plain, self.incarnation)
        self.phase, self.step, self.exit_code = "starting", 0, EXIT_FAILED
        self.activity = Activity()
        self.ledger = Ledger(config.max_staleness, exactly=config.staleness is not None)
        self.history = History()
        self.spool: SpoolReader | None = None
        self.publisher: Publisher | None = None
        self.run_body: dict[str, Any] = {}
        self.run_record = RecordWriter(self.run, layout.RUN, self.incarnation)
        self.checkpointer = Checkpointer(
            self.run, config.checkpoints.keep, config.checkpoints.keep_every, self.incarnation
        )
        self._dropped_body: tuple[int, dict[str, Any]] | None = None
        self.closing = ExitStack()
        """What is to be closed at the end; the last first."""
        self.heartbeat = Heartbeat(self.run, self.incarnation, self._state_body)
        self.closing.callback(self.heartbeat.close)
        self.surroundings = Surroundings(config)
        self.closing.callback(self.surroundings.close)

    @property
    def is_interrupted(self) -> bool:
        return self._stop.is_set()

    def wait_for_the_end(self) -> None:
        self._stop.wait()
        raise Interrupted

    def check_stop(self) -> None:
        """Between any two things that take time. Raises what ends this life: Interrupted, or that it is taken over."""
        if self._stop.is_set():
            raise Interrupted
        if self.heartbeat.lost is not None:
            raise self.heartbeat.lost

    def persist(self, what: str, call: Callable[[], T]) -> T:
        """`call` as often as the bucket fails, for as long as the other roles wait for the learner."""
        return persist(what, call, self.check_stop, self.config.fleet.idle_exit_s)

    def flush(self, publisher: Publisher, what: str) -> None:
        """Waits until everything published so far is in the bucket. RunFailed if that takes too long."""
        deadline = time.monotonic() + FLUSH_S
        while not publisher.flush(_LOOK_S):
            self.check_stop()
            if time.monotonic() > deadline:
                raise RunFailed(f"the bucket {self.run.address} did not take {what} within {FLUSH_S:.0f} s")

    def write_run_record(self, **more: Any) -> None:
        body = {**self.run_body, **more}
        self.persist("writing the run's record", lambda: self.run_record.write(body))

    @property
    def quarantined(self) -> int:
        """How many files of the spool were refused."""
        return 0 if self.spool is None else len(self.spool.rejected)

    def _dropped(self) -> dict[str, Any]:
        """Made anew only when there is more to say: it is asked every second."""
        drops = dict(self.ledger.drops)  # a copy: the loop goes on while this thread sorts
        if self._dropped_body is None or self._dropped_body[0] != len(drops):
            self._dropped_body = len(drops), dropped_body(drops)
        return self._dropped_body[1]

    def _state_body(self) -> dict[str, Any]:
        current = self.publisher.current if self.publisher else None
        refused = [] if self.spool is None else list(self.spool.rejected.items())
        return {
            "run": self.config.run,
            "step": self.step,
            "version": parse_policy(current).version if current else 0,
            "total_steps": self.config.steps,
            "phase": self.phase,
            **self.activity.body(),
            "dropped": self._dropped(),
            "quarantined": refused[-_SHOWN_QUARANTINED:],
            "quarantined_total": len(refused),
        }
