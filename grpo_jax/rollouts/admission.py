"""Which group may start when. Pure bookkeeping: no clock, no I/O.

Data index d (0, 1, 2, …) is one place in the endless sequence of problems. Each index is fresh, pending (to be drawn
again), running, done or skipped. *Live* groups are those running, and those done that nobody dropped; the k-th of them
(k from 0) starts iff `k < (S + 1 + s) * gpv`, s the version it is sampled with, and `k < total`.

Why that bounds staleness by S: a group that is consumed as the j-th in start order was started when at least j groups
were live, so j < (S + 1 + s) * gpv, and the learner that consumes it is at version j // gpv <= S + s.

Where the staleness is to be exactly S, version v samples as many groups as the learner will train on it, no more and no
fewer: (S + 1) * gpv if v is 0, else gpv. The oldest version that is short of groups samples the next one, even if newer
ones are published. None is ever needed that is more than S versions older than the newest: the learner, at the newest
or beyond it, has taken all its groups. And it is there to be named, for a learner that still lacks groups of v trains
on v, so it is at version v + S at most, or at S if v is 0.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from grpo_jax.storage.layout import ZERO_VARIANCE


@dataclass(frozen=True, order=True)
class Ticket:
    """One attempt at one data index."""

    index: int
    attempt: int


class Admission:
    """Call it from one thread. Every call names the attempt it is about, so a late or repeated one changes nothing.

    `exactly`: the staleness is to be `max_staleness`, not at most that; `next_version` then says which policy samples.

    Attributes:
      total: groups that the run trains in all; may grow when a run is continued with more steps.
      skipped: data index → reason, for those given up: after `max_redraws` further attempts, or replaced at once
        because all samples earned the same.
      redraws: attempts that were put back to be drawn again since this object was made.
    """

    def __init__(
        self, *, max_staleness: int, groups_per_version: int, total: int, max_redraws: int, exactly: bool = False
    ):
        self._max_staleness, self._groups_per_version = max_staleness, groups_per_version
        self._max_redraws, self._exactly = max_redraws, exactly
        self.total = total
        self.skipped: dict[int, str] = {}
        self.redraws = 0
        self._fresh = 0  # the lowest index that was never started
        self._pending: list[Ticket] = []  # heap: the lowest index is drawn again first
        self._running: dict[int, int] = {}  # index → attempt
        self._done: dict[int, int] = {}
        self._versions: dict[Ticket, int] = {}  # of the live groups
        self._live_of = Counter[int]()  # version → its live groups

    @property
    def live(self) -> int:
        return len(self._running) + len(self._done)

    @property
    def running(self) -> int:
        return len(self._running)

    def start(self, version: int) -> Ticket | None:
        """The next group to sample, now running; None while none may start. `version`: of the newest policy."""
        sampled_with = self.next_version(version)
        if sampled_with is None:
            return None
        if self._pending:
            ticket = heapq.heappop(self._pending)
        else:
            ticket = Ticket(self._fresh, 0)
            self._fresh += 1
        self._running[ticket.index] = ticket.attempt
        self._count(ticket, sampled_with)
        return ticket

    def next_version(self, newest: int) -> int | None:
        """The version that the next group is to be sampled with, `newest` if that does not matter; None: as `start`."""
        if not self._exactly:
            return newest if self.live < self._room(newest) else None
        for version in range(max(0, newest - self._max_staleness), newest + 1):
            before = self._room(version - 1) if version else 0
            if self._live_of[version] < self._room(version) - before:
                return version
        return None

    def is_paced(self, version: int) -> bool:
        """Whether staleness alone keeps the next group from starting: there is work left, and no room for it yet."""
        return self.live < self.total and self.next_version(version) is None

    def finish(self, ticket: Ticket) -> None:
        """The group of `ticket` is in the spool."""
        if self._running.get(ticket.index) == ticket.attempt:
            self._done[ticket.index] = self._running.pop(ticket.index)

    def drop(self, ticket: Ticket, reason: str) -> None:
        """The group of `ticket` will never be trained: its number is free again, its index is drawn again or skipped.

        The worker drops what it could not score, the learner what is in the spool. Dropping twice is dropping once.
        """
        for table in (self._running, self._done):
            if table.get(ticket.index) == ticket.attempt:
                del table[ticket.index]
                self._live_of[self._versions.pop(ticket)] -= 1
                self._put_back(ticket, reason)
                self.redraws += ticket.index not in self.skipped

    def restore(
        self,
        in_spool: Iterable[Ticket],
        drops: Mapping[Ticket, str],
        skipped: Mapping[int, str] | None = None,
        versions: Mapping[Ticket, int] | None = None,
    ) -> None:
        """Goes on where an earlier life of the worker stopped; call it first.

        What that life had started and not finished left no trace: those indices are started again, as the same attempt.

        Args:
          in_spool: every group that was ever written.
          drops: what the learner has dropped, with its reasons.
          skipped: the indices that the earlier life had given up, with its reasons.
          versions: what the groups in the spool were sampled with; only `exactly` needs to know.
        """
        newest: dict[int, int] = {}
        for ticket in (*in_spool, *drops):
            newest[ticket.index] = max(ticket.attempt, newest.get(ticket.index, 0))
        for ticket in (Ticket(index, attempt) for index, attempt in newest.items()):
            if ticket not in drops:
                self._done[ticket.index] = ticket.attempt
                self._count(ticket, (versions or {}).get(ticket, 0))
            elif ticket.index not in (skipped or {}):
                self._put_back(ticket, drops[ticket])
        self.skipped.update({index: reason for index, reason in (skipped or {}).items() if index not in self._done})
        self._fresh = 1 + max((*newest, *self.skipped), default=-1)
        for index in range(self._fresh):
            if index not in newest and index not in self.skipped:
                heapq.heappush(self._pending, Ticket(index, 0))

    def _room(self, version: int) -> int:
        """How many groups may be live, of all versions up to this one."""
        return min(self.total, (self._max_staleness + 1 + version) * self._groups_per_version)

    def _count(self, ticket: Ticket, version: int) -> None:
        self._versions[ticket] = version
        self._live_of[version] += 1

    def _put_back(self, ticket: Ticket, reason: str) -> None:
        # Samples of a prompt that all earn the same would do so again: another prompt takes its place.
        if reason != ZERO_VARIANCE and ticket.attempt < self._max_redraws:
            heapq.heappush(self._pending, Ticket(ticket.index, ticket.attempt + 1))
        else:
            self.skipped[ticket.index] = reason
