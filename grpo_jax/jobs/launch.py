"""The attached launcher: looks after the jobs of one launch, round after round, until its last run is over."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from grpo_jax.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE
from grpo_jax.jobs.hub_jobs import HubError, HubJobs, Job, hub_token
from grpo_jax.jobs.launch_cost import so_far, usd
from grpo_jax.jobs.launch_display import Display
from grpo_jax.jobs.launch_fleet import Fleet, Outcome, RunView
from grpo_jax.jobs.launch_show import ask_what_to_do, complain, say
from grpo_jax.jobs.launch_spec import LEARNER, Launch, Target, secret_values, slots, spec_of
from grpo_jax.jobs.launch_state import Desired, LaunchState
from grpo_jax.jobs.launch_view import RunRecords, summary
from grpo_jax.jobs.local import stop_on_signals
from grpo_jax.storage.bucket import Bucket, BucketError, Limits

log = logging.getLogger(__name__)

POLL_S = 2.0
_LOOK_S = 5.0
_LEAVE_S = 60.0
_REFUSED_AGAIN_S, _PATIENCE_S = 60.0, 60.0
_LISTED_S = 60.0
_HASTY = Limits(attempt_s=20.0, total_s=30.0)


class Launcher:
    """Use once."""

    def __init__(
        self,
        target: Target,
        launch: Launch,
        hub: HubJobs,
        *,
        attached: bool,
        with_logs: bool = True,
        first: int = 0,
        known: Sequence[Job] = (),
    ):
        """
        Args:
          attached: to jobs that an earlier launcher has started.
          with_logs: shows what they write.
          first: index of the run that is going on, or is the first to be started.
          known: its jobs as they were listed just now, for as long as the Hub does not list them again.
        """
        self._target, self._launch, self._hub, self._attached = target, launch, hub, attached
        self._waiting, self._failed = list(target.configs[first:]), list[str]()
        config = self._waiting[0]
        self._state = LaunchState(Bucket(target.url, _HASTY))
        self._fleet = Fleet(launch.id, config.jobs.restarts)
        self._display = Display(hub, launch.id, attached=attached, with_logs=with_logs)
        self._desired = Desired("running", config.generator.replicas)
        self._known = {job.id: job for job in known}
        self._unlisted: list[tuple[Job, float]] = []
        self._refused: dict[str, float] = {}
        self._failing_since: dict[str, float] = {}
        self._looked_at = float("-inf")
        self._superseded = False
        self._was_complete = self._only_starts = False
        self._take_up_next()

    def run(self, on_interrupt: str) -> int:
        """To the end of all runs, or until a signal; returns the exit code. `on_interrupt`: ask, detach or cancel."""
        return self._attend(lambda: False, on_interrupt)

    def start(self) -> int:
        """Only starts and cancels what is wanted now. 0 once every slot has a job."""
        self._only_starts = True
        return self._attend(self._is_complete, "detach")

    def _attend(self, until: Callable[[], bool], on_interrupt: str) -> int:
        try:
            with stop_on_signals() as stop:
                self._state.claim()
                outcome = self._look_after(stop, until)
                if outcome is not None:
                    return self._finish(outcome)
                if self._superseded:
                    complain("another launcher has taken over, and looks after the jobs from now on")
                    return EXIT_RESUMABLE
                if until():
                    return EXIT_DONE
                if self._is_half:
                    return self._cancelled()
            return self._interrupted(on_interrupt)
        except (HubError, BucketError) as error:
            return self._give_up(str(error))
        except BaseException:
            if self._is_half:
                with stop_on_signals():
                    self._cancel_all()
            raise
        finally:
            self._display.close()
            self._leave()

    def _look_after(self, stop: threading.Event, until: Callable[[], bool]) -> Outcome | None:
        """None: it was stopped, or `until` has come true."""
        while not stop.is_set():
            jobs = [job for job in self._jobs() if job.slot != LEARNER or job.run == self._config.run]
            learners = [job.is_live for job in jobs if job.slot == LEARNER and job.launch == self._launch.id]
            self._look(at_once=bool(learners) and not any(learners))
            if self._superseded:
                return None
            self._display.jobs(jobs)
            decision = self._fleet.decide(jobs, self._desired, self._view, time.monotonic())
            for job in decision.cancel:
                self._display.once(f"job {job.id} {job.slot} is not wanted any more: it is cancelled")
                self._cancel(job)
            for slot, why in decision.given_up.items():
                self._display.once(f"{slot} gets no further job: {why}")
            if decision.outcome is not None:
                if not self._goes_on(decision.outcome):
                    return decision.outcome
                continue
            for slot in decision.start:
                if stop.is_set():
                    return None
                self._start(slot, jobs)
            self._was_complete |= self._is_complete()
            if until():
                return None
            stop.wait(POLL_S)
        return None

    def _take_up_next(self) -> None:
        self._config = self._waiting.pop(0)
        # The jobs need its attention more than a bucket that hangs.
        self._run = Bucket(self._config.bucket, _HASTY).child(self._config.run)
        self._records, self._view, self._looked_at = RunRecords(self._run), RunView(), float("-inf")
        if self._target.is_sweep:
            total = len(self._target.configs)
            say(f"{total - len(self._waiting)} of {total}: {self._config.run}, {self._config.steps} steps")

    def _goes_on(self, outcome: Outcome) -> bool:
        """Whether there is another run to be taken up, after what came of this one."""
        if outcome.of_all or not self._waiting:
            return False
        if outcome.how == "failed":
            self._failed.append(self._config.run)
            complain(f"{self._config.run}: {self._how(outcome)}")
        else:
            say(f"{self._config.run}: {self._how(outcome)}")
        self._take_up_next()
        return True

    def _jobs(self) -> list[Job]:
        """As the Hub lists them, and those that it does not list yet; what was known last while it does not answer."""
        try:
            listed = self._hub.all()
        except HubError as error:
            if not error.passing:
                raise
            self._display.once(f"{error}; it is asked again", "the Hub")
            return list(self._known.values())
        self._display.well("the Hub")
        now, ids = time.monotonic(), {job.id for job in listed}
        self._unlisted = [(job, at) for job, at in self._unlisted if job.id not in ids and now - at < _LISTED_S]
        self._known = {job.id: job for job in (*listed, *(job for job, _ in self._unlisted))}
        return list(self._known.values())

    def _look(self, at_once: bool) -> None:
        """What the bucket says; a bucket that fails says nothing new."""
        if not at_once and time.monotonic() - self._looked_at < _LOOK_S:
            return
        self._looked_at = time.monotonic()
        try:
            self._superseded = not self._state.beat()
            self._desired = self._state.desired() or self._desired
            self._view = self._records.view()
        except BucketError as error:
            self._display.once(f"{error}; it is asked again", "the bucket")
            return
        self._display.well("the bucket")

    def _start(self, slot: str, jobs: list[Job]) -> None:
        now = time.monotonic()
        if now - self._refused.get(slot, float("-inf")) < _REFUSED_AGAIN_S:
            return
        spec = spec_of(self._config, slot, self._launch, os.environ)
        try:
            job = self._hub.start(spec, secret_values(spec, os.environ, hub_token() or ""))
        except HubError as error:
            replaced = any(job.slot == slot and job.launch == self._launch.id for job in jobs)
            lasting = not error.passing or now - self._failing_since.setdefault(slot, now) > _PATIENCE_S
            is_awaited = slot == LEARNER or ((self._is_half or self._only_starts) and not replaced)
            if lasting and is_awaited:
                raise
            # It may have been started all the same: the next listing tells.
            if lasting:
                self._refused[slot] = now
            self._display.once(str(error))
            return
        self._failing_since.pop(slot, None)
        # The answer may lack the labels.
        run = self._config.run if slot == LEARNER else ""
        job = self._known[job.id] = replace(job, slot=slot, role=spec.role, launch=self._launch.id, run=run)
        self._unlisted.append((job, now))
        self._display.jobs([job])

    def _cancel(self, job: Job) -> None:
        try:
            self._hub.cancel(job)
        except HubError as error:
            if not error.passing:
                raise
            self._display.once(f"{error}; it is asked again")

    @property
    def _is_half(self) -> bool:
        """Whether this launcher has begun what is of no use to anybody: not all slots have had their first job yet."""
        return not (self._attached or self._was_complete or self._is_complete())

    def _is_complete(self) -> bool:
        """Whether every slot has, or has had, a job of this launch, and this run a learner."""
        have = {
            job.slot
            for job in self._known.values()
            if job.launch == self._launch.id and (job.slot != LEARNER or job.run == self._config.run)
        }
        return set(slots(self._desired.generators)) <= have

    def _finish(self, outcome: Outcome) -> int:
        told, sweep = self._how(outcome), self._target.is_sweep
        if outcome.how == "failed":
            self._failed.append(self._config.run)
        if outcome.how == "finished" and not self._failed:
            self._wait_for_generators()
        left = self._cancel_all()
        cost, name = self._cost(), f"{self._config.run}: " if sweep else ""
        if outcome.how == "cancelled":
            complain(f"{told}; `grpo-jax launch` goes on with the {'sweep' if sweep else 'run'}; {cost}")
            return EXIT_FAILED if left else EXIT_RESUMABLE
        (complain if outcome.how == "failed" else say)(f"{name}{told}; {cost}")
        if sweep and self._failed:
            say(f"{len(self._failed)} of {len(self._target.configs)} runs failed: {', '.join(self._failed)}")
        if self._waiting:
            say(f"not begun: {', '.join(config.run for config in self._waiting)}")
        if outcome.how == "finished" and not left:
            what = "compares the runs" if sweep else "writes its report"
            say(f"`grpo-jax report {self._target.url}` {what}")
        return EXIT_FAILED if self._failed or left else EXIT_DONE

    def _how(self, outcome: Outcome) -> str:
        """The end of the run that was looked after, as a part of a sentence."""
        if outcome.how == "finished":
            return f"finished: {summary(self._run, self._config.steps)}"
        if outcome.how == "cancelled":
            return outcome.reason
        jobs = [job for job in self._known.values() if job.slot == LEARNER and job.run == self._config.run]
        last_line = self._display.last_line(jobs[-1]) if jobs and not jobs[-1].is_live else None
        said = (self._view.error if self._view.status == "failed" else None) or last_line
        return f"{outcome.reason}{f': {said}' if said else ''}"

    def _wait_for_generators(self) -> None:
        """They see in the bucket that the runs are over, and leave."""
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline:
            jobs = self._jobs()
            self._display.jobs(jobs)
            if not any(job.is_live for job in jobs):
                return
            for job in jobs:
                if job.stage == "SCHEDULING":  # it could not leave by itself
                    self._cancel(job)
            time.sleep(POLL_S / 2)

    def _interrupted(self, on_interrupt: str) -> int:
        if on_interrupt == "ask":
            on_interrupt = ask_what_to_do() if sys.stdin.isatty() else "detach"
        if on_interrupt == "cancel":
            with stop_on_signals():
                return self._cancelled()
        url = self._target.url
        complain(f"detached; `grpo-jax launch --attach {url}` follows the run again, `grpo-jax cancel {url}` ends it")
        if self._waiting:
            complain(f"nobody starts the {len(self._waiting)} runs after this one until somebody is attached again")
        return EXIT_RESUMABLE

    def _cancelled(self) -> int:
        try:
            self._state.want(replace(self._desired, state="cancelled"))
        except BucketError as error:
            log.warning("%s", error)
        left = self._cancel_all()
        complain("cancelled; the same launch goes on with the run")
        return EXIT_FAILED if left else EXIT_RESUMABLE

    def _give_up(self, reason: str) -> int:
        """After an error of the Hub that does not pass: jobs that can do without a launcher are left alone."""
        if not self._is_half:
            complain(f"{reason}; the jobs go on without a launcher: `grpo-jax cancel {self._target.url}` ends them")
        else:
            complain(reason)
            with stop_on_signals():
                self._cancel_all()
        return EXIT_FAILED

    def _cancel_all(self) -> list[Job]:
        try:
            left = self._hub.cancel_all([job for job, _ in self._unlisted])
        except HubError as error:
            complain(f"the jobs could not be cancelled, and some may go on: {error}")
            return list(self._known.values())
        for job in left:
            complain(f"job {job.id} {job.slot} could not be cancelled: it is {job.stage}; see {job.url}")
        return left

    def _cost(self) -> str:
        try:
            return f"cost {usd(so_far(self._jobs(), self._config.jobs.prices))}"
        except HubError as error:
            return str(error)

    def _leave(self) -> None:
        try:
            self._state.leave()
        except BucketError as error:
            log.warning("%s", error)
