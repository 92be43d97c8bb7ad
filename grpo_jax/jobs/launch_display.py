"""What an attached launcher shows: the stages of jobs as they change, their logs, and its own words once."""

from collections.abc import Iterable

from grpo_jax.jobs.hub_jobs import HubJobs, Job
from grpo_jax.jobs.hub_logs import JobLogs
from grpo_jax.jobs.launch_show import say
from grpo_jax.observability.logs import mask_secrets

_LAST_LINES_S = 10.0


class Display:
    """Of the jobs of one launch."""

    def __init__(self, hub: HubJobs, launch: str, *, attached: bool, with_logs: bool):
        """`attached`: of the logs that are there already only the last lines are shown."""
        self._launch, self._attached, self._with_logs = launch, attached, with_logs
        self._logs = JobLogs(hub.logs, lambda slot, line: say(f"{slot} | {line}"))
        self._stages: dict[str, str] = {}
        self._said: set[str] = set()

    def jobs(self, jobs: Iterable[Job]) -> None:
        """To be called with all of them each time that they have been looked at."""
        for job in jobs:
            before = self._stages.get(job.id)
            self._stages[job.id] = job.stage
            if job.launch != self._launch or before == job.stage or (before is None and not job.is_live):
                continue
            message = f" {mask_secrets(job.message)}" if job.message else ""
            say(f"job {job.id} {job.slot} on {job.flavor}: {job.stage}{message}")
            if self._with_logs and job.stage != "SCHEDULING":
                self._logs.follow(job.id, job.slot, from_start=not self._attached or before is not None)

    def once(self, text: str, about: str = "") -> None:
        """Not again, or until all is `well` with what it is about."""
        if (about or text) not in self._said:
            self._said.add(about or text)
            say(text)

    def well(self, about: str) -> None:
        self._said.discard(about)

    def last_line(self, job: Job) -> str:
        """Of the log of a job that has ended."""
        self._logs.wait(job.id, _LAST_LINES_S)
        return self._logs.last_line(job.id)

    def close(self) -> None:
        self._logs.close()
