"""What the worker reads from the bucket about its run: is it still on, how far is the learner, what has it dropped."""

import time

from grpo_jax.adapters.names import parse_policy
from grpo_jax.config.schema import Fleet
from grpo_jax.errors import RunFailed
from grpo_jax.rollouts.admission import Ticket
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.dropped import dropped_in
from grpo_jax.storage.records import Record, RecordReader

_RUN_EVERY_S = 1.0
_FINAL = ("finished", "failed")


class RunWatch:
    """For one thread at a time; `read` does the I/O, everything else looks at what it found.

    A final record that stands there when the worker starts may be of an earlier life that a learner is about to
    resume. It counts if its incarnation is the newest, and once the learner has been seen alive or has been silent for
    `fleet.silent_s`.

    Attributes:
      drops: what the learner will never train, with its reasons.
      policies: version → name of all that may be named now; only if they are followed.
      to_evaluate: the policies whose evaluation is wanted now; only if they are followed.
    """

    def __init__(self, run: Bucket, fleet: Fleet, *, follow_policies: bool = False):
        self._fleet, self._follow_policies = fleet, follow_policies
        self._run = RecordReader(run, layout.RUN)
        self._state = RecordReader(run, layout.LEARNER_STATE)
        self._policy = RecordReader(run, layout.POLICY)
        self._run_record: Record | None = None
        self._state_record: Record | None = None
        self._run_read_at = float("-inf")
        self._first: tuple[int, int] | None = None
        self._reads = 0
        self.drops: dict[Ticket, str] = {}
        self.policies: dict[int | None, str] = {}
        self.to_evaluate: tuple[str, ...] = ()

    def read(self) -> None:
        """Reads the records; raises what the bucket raises."""
        if time.monotonic() - self._run_read_at >= _RUN_EVERY_S:
            self._run_record = self._run.read()
            self._run_read_at = time.monotonic()
        state = self._state.read()
        if state is not self._state_record:
            self._state_record = state
            self.drops = {Ticket(group.index, group.attempt): reason for group, reason in dropped_in(state)}
        if self._follow_policies and (pointer := self._policy.read()) is not None:
            self.policies = _versions(pointer)
            # The state was read before: the pointer of a learner that drains is the last one.
            wanted = [pointer.get("pinned"), pointer.get("current") if self.is_draining else None]
            self.to_evaluate = tuple(dict.fromkeys(str(name) for name in wanted if name))
        if not self._reads:
            self._first = self._stamp
        self._reads += 1

    @property
    def has_begun(self) -> bool:
        """Whether there is a run to work for: its record and the learner's state are there."""
        return self._run_record is not None and self._state_record is not None

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, as the learner has it now; 0 before it has said so."""
        return 0 if self._state_record is None else int(self._state_record.get("total_steps", 0))

    @property
    def is_draining(self) -> bool:
        """Whether the last policy is published and only its evaluation is waited for."""
        return self._phase == "draining" and self._is_settled

    @property
    def has_ended(self) -> bool:
        if not self._is_settled:
            return False
        run, state = self._run_record, self._state_record
        newest = max((record["incarnation"] for record in (run, state) if record is not None), default=0)
        final = run is not None and run.get("status") in _FINAL and run["incarnation"] == newest
        return final or (self._phase == "done" and state is not None and state["incarnation"] == newest)

    def check_alive(self) -> None:
        """RunFailed once the learner has been silent for too long."""
        if self._state.silent_s() > self._fleet.idle_exit_s:
            raise RunFailed(
                f"the learner has been silent for more than fleet.idle_exit_s = {self._fleet.idle_exit_s:g} s"
            )

    @property
    def _phase(self) -> str | None:
        return None if self._state_record is None else self._state_record.get("phase")

    @property
    def _is_settled(self) -> bool:
        """Whether what the records say is of now, not of a life before this worker's."""
        seen_alive = self._reads > 0 and self._stamp != self._first
        return seen_alive or self._state.silent_s() > self._fleet.silent_s

    @property
    def _stamp(self) -> tuple[int, int] | None:
        record = self._state_record
        return None if record is None else (record["incarnation"], record["seq"])


def _versions(pointer: Record) -> dict[int | None, str]:
    found: dict[int | None, str] = {}
    for name in pointer.get("window", []):
        try:
            found[parse_policy(name).version] = name
        except ValueError:  # nothing of that name is served
            continue
    return found
