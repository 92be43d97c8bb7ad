"""What is to be done about the jobs of a run, given what there is and what is wanted: no network, no clock."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from grpo_jax.errors import EXIT_USAGE
from grpo_jax.jobs.hub_jobs import Job
from grpo_jax.jobs.launch_spec import LEARNER, slots
from grpo_jax.jobs.launch_state import Desired

_FINAL = ("finished", "failed")
_LONGEST_WAIT_S = 60.0
LASTING_S = 600.0
"""A job that ran for so long is not to blame for its end: whatever it was, it can be started again."""


@dataclass(frozen=True)
class RunView:
    """What the run's own records say; `status` is None before the first learner has written any."""

    status: str | None = None
    step: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Outcome:
    """`of_all`: no other run of the launch can do better."""

    how: Literal["finished", "failed", "cancelled"]
    reason: str = ""
    of_all: bool = False


@dataclass(frozen=True)
class Decision:
    start: list[str] = field(default_factory=list)  # slots
    cancel: list[Job] = field(default_factory=list)
    outcome: Outcome | None = None
    given_up: dict[str, str] = field(default_factory=dict)  # slot -> why it gets no further job


class Fleet:
    """Decides for one launch, again and again, about one run at a time. A slot holds one job at a time.

    A job that ended while the run goes on is replaced, but not more than `restarts` times in a row if it never lasted.
    Generators are not started on a final status that the learner is about to take back: they would leave again.
    """

    def __init__(self, launch: str, restarts: int):
        self._launch, self._restarts = launch, restarts
        self._ended_at: dict[str, float] = {}

    def decide(self, jobs: Sequence[Job], desired: Desired, run: RunView, now: float) -> Decision:
        """Args: `jobs`: the generators' and this run's learners', the oldest first. `now`: monotonic seconds."""
        if desired.state == "cancelled":
            return Decision(outcome=Outcome("cancelled", "it was cancelled", of_all=True))
        wanted = slots(desired.generators)
        by_slot: dict[str, list[Job]] = {slot: [] for slot in wanted}
        for job in jobs:
            if job.launch == self._launch and job.slot in by_slot:
                by_slot[job.slot].append(job)
        live = {slot: _one_of([job for job in found if job.is_live]) for slot, found in by_slot.items()}
        cancel = [job for job in jobs if job.is_live and live.get(job.slot) != job]
        outcome = self._learner_outcome(by_slot[LEARNER]) if live[LEARNER] is None else None
        if outcome is not None:
            return Decision(cancel=cancel, outcome=outcome)
        learner = live[LEARNER]
        learning = learner is not None and learner.stage == "RUNNING"
        start, given_up = [], {}
        for slot in wanted:
            ended = by_slot[slot]
            if live[slot] is not None:
                continue
            if slot != LEARNER:
                if run.status in _FINAL or (ended and not learning):
                    continue
                if self._is_hopeless(ended):
                    given_up[slot] = f"{slot} {ending(ended[-1])}"
                    continue
            if not ended or self._has_waited(ended, now):
                start.append(slot)
        if given_up and len(given_up) == desired.generators:
            reason = f"no generator is left: {next(iter(given_up.values()))}"
            return Decision(cancel=cancel, outcome=Outcome("failed", reason, of_all=True))
        return Decision(start, cancel, None, given_up)

    def _learner_outcome(self, ended: Sequence[Job]) -> Outcome | None:
        """None: there is none yet, or another one is to take its place."""
        if not ended:
            return None
        job = ended[-1]
        if job.stage == "COMPLETED":
            return Outcome("finished")
        if job.stage == "CANCELED":
            return Outcome("cancelled", "the learner's job was cancelled", of_all=True)
        # A config that a job before this one could run is not to blame: the Hub, say, did not hand out the model.
        is_wrong = all(exit_code(each) == EXIT_USAGE for each in ended)
        if is_wrong or self._is_hopeless(ended):
            return Outcome("failed", f"the learner's job {ending(job)}")
        return None

    def _is_hopeless(self, ended: Sequence[Job]) -> bool:
        return _short_lived(ended) > self._restarts

    def _has_waited(self, ended: Sequence[Job], now: float) -> bool:
        ended_at = self._ended_at.setdefault(ended[-1].id, now)
        return now - ended_at >= min(2.0 ** _short_lived(ended) - 1.0, _LONGEST_WAIT_S)


def _short_lived(ended: Sequence[Job]) -> int:
    """How many of a slot's last jobs, in a row, did not last; one that somebody cancelled says nothing."""
    by_itself = [job for job in ended if job.stage != "CANCELED"]
    return len(list(takewhile(lambda job: job.running_s < LASTING_S, reversed(by_itself))))


def exit_code(job: Job) -> int | None:
    """Of a job that failed, as far as its message tells."""
    found = re.search(r"exit code:? *(\d+)", job.message)
    return int(found[1]) if found else None


def ending(job: Job) -> str:
    """How a job ended, to follow its name in a sentence."""
    return f"ended as {job.stage}" + (f" ({job.message.strip().rstrip('.')})" if job.message.strip() else "")


def _one_of(live: Sequence[Job]) -> Job | None:
    """That of several for one slot that stays: the first that runs, or else the first."""
    return next((job for job in live if job.stage == "RUNNING"), live[0] if live else None)
