"""`launch`, `status` and `cancel`: a run as jobs of the Hugging Face Hub, found again by what it left at the Hub."""

import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi

from grpo_jax.config.load import load_config
from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, RunFailed, UsageError
from grpo_jax.jobs.hub_jobs import HubError, HubJobs, patiently
from grpo_jax.jobs.launch import Launcher
from grpo_jax.jobs.launch_package import build_files
from grpo_jax.jobs.launch_show import complain, print_jobs, print_plan, print_run, say, shown
from grpo_jax.jobs.launch_spec import LEARNER, Launch, bucket_at, namespace_of, run_labels, slots, spec_of
from grpo_jax.jobs.launch_state import Desired, LaunchState
from grpo_jax.jobs.launch_view import summary
from grpo_jax.jobs.preflight import look_at_config, preflight
from grpo_jax.storage.bucket import Bucket, BucketError

log = logging.getLogger(__name__)

_CONFIG_FILES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Found:
    """A run by its name, and what its last launch has left, if it has left anything."""

    bucket: str
    run: str
    config: Config | None
    launch: Launch | None

    @property
    def state(self) -> LaunchState:
        return LaunchState(Bucket(self.bucket).child(self.run))

    @property
    def hub(self) -> HubJobs:
        namespace = namespace_of(self.config) if self.config is not None else bucket_at(self.bucket).namespace
        return HubJobs(namespace, run_labels(self.bucket, self.run))

    @property
    def launched(self) -> tuple[Config, Launch]:
        if self.config is None or self.launch is None:
            raise UsageError(f"{self.bucket}/{self.run}: nothing has launched this run")
        return self.config, self.launch


def find(target: str) -> Found:
    """A run by its URL in a bucket, or by the config that it was launched with."""
    given: Config | None = None
    if target.endswith(_CONFIG_FILES):
        given = load_config(target)
        bucket, run = given.bucket, given.run
    else:
        bucket, _, run = target.rstrip("/").rpartition("/")
    bucket_at(bucket)
    try:
        left = LaunchState(Bucket(bucket).child(run)).launch()
    except BucketError as error:  # its jobs are found all the same
        log.warning("%s", error)
        left = None
    if left is None:
        return Found(bucket, run, given, None)
    return Found(bucket, run, *left)


def launch(config: Config, *, detach: bool = False, on_interrupt: str = "ask", compile: bool = True) -> int:
    """Starts or resumes a run, and looks after it to its end unless `detach`. Returns the exit code.

    Nothing is made before everything has been looked at; what a launch that fails half-way has started is cancelled.
    """
    found = preflight(config, os.environ, compile=compile)
    if not shown(found):
        return EXIT_USAGE
    if found.finished:
        say(f"finished already: {summary(Bucket(config.bucket).child(config.run), config.steps)}")
        return EXIT_DONE
    hub = HubJobs(namespace_of(config), run_labels(config.bucket, config.run))
    files = build_files(config, Path.cwd())
    prefix = f"{config.run}/{files.folder}"
    new = Launch(secrets.token_hex(4), prefix, files.package)
    for slot in slots(config.generator.replicas):
        spec_of(config, slot, new, os.environ)
    try:
        live = [job for job in hub.all() if job.is_live]
        for job in live:
            if job.slot == LEARNER:
                url = f"{config.bucket}/{config.run}"
                raise UsageError(f"the run {config.run} is going on: `grpo-jax launch --attach {url}` follows it")
        make_bucket(config)
        state = LaunchState(Bucket(config.bucket).child(config.run))
        bucket = Bucket(config.bucket)
        for name, data in files.contents.items():
            bucket.put(f"{prefix}/{name}", data)
        state.write_launch(config, new)
        state.want(Desired("running", config.generator.replicas))
    except (HubError, BucketError) as error:
        raise RunFailed(str(error)) from None
    say(f"bucket {bucket.address}")
    launcher = Launcher(config, new, hub, attached=False, with_logs=not detach)
    if not detach:
        return launcher.run(on_interrupt)
    code = launcher.start()
    if code == EXIT_DONE:
        url = f"{bucket.address}/{config.run}"
        say(f"started; `grpo-jax launch --attach {url}` follows the run, `grpo-jax cancel {url}` ends it")
    return code


def attach(target: str, *, on_interrupt: str = "ask") -> int:
    """Looks after a run that is going on, in place of whoever did so before."""
    found = find(target)
    config, left = found.launched
    try:
        if not any(job.is_live and job.slot == LEARNER for job in found.hub.all()):
            raise UsageError(f"the run {config.run} has no live learner job; `grpo-jax launch` goes on with it")
    except HubError as error:
        raise RunFailed(str(error)) from None
    return Launcher(config, left, found.hub, attached=True).run(on_interrupt)


def scale(target: str, generators: int) -> int:
    """Says how many generators are wanted; an attached launcher brings it about, or else this process does."""
    found = find(target)
    config, left = found.launched
    try:
        wanted = found.state.desired()
        if wanted is None or wanted.state == "cancelled" or not any(job.is_live for job in found.hub.all()):
            raise UsageError(f"the run {config.run} is not going on; `grpo-jax launch` goes on with it")
        found.state.want(Desired("running", generators))
        if found.state.attached():
            say(f"{generators} generators are wanted; the attached launcher starts or cancels what that takes")
            return EXIT_DONE
    except (HubError, BucketError) as error:
        raise RunFailed(str(error)) from None
    return Launcher(config, left, found.hub, attached=True, with_logs=False).start()


def cancel(target: str) -> int:
    """Ends all jobs of a run, whoever has started them; the run can be resumed."""
    found, where = find(target), target
    try:
        before = [job for job in found.hub.all() if job.is_live]
        try:
            # First, so that an attached launcher starts none of them again.
            wanted = found.state.desired()
            if wanted is not None:
                found.state.want(Desired("cancelled", wanted.generators))
        except BucketError as error:
            log.warning("%s", error)
        left = found.hub.cancel_all()
    except HubError as error:
        raise RunFailed(str(error)) from None
    for job in left:
        complain(f"job {job.id} {job.slot} could not be cancelled: it is {job.stage}; see {job.url}")
    say(f"{len(before) - len(left)} jobs cancelled" if before else f"{where}: none of its jobs is live")
    return EXIT_FAILED if left else EXIT_DONE


def status(target: str) -> int:
    """Prints the jobs of a run, what they have cost, its replicas, and where it is."""
    found = find(target)
    try:
        jobs = found.hub.all()
        if not jobs and found.launch is None:
            raise UsageError(f"{target}: nothing has launched this run")
        print_jobs(jobs, found.config.jobs.prices if found.config is not None else {})
        if found.config is not None:
            print_run(Bucket(found.bucket), found.run, found.config, jobs)
    except (HubError, BucketError) as error:
        raise RunFailed(str(error)) from None
    return EXIT_DONE


def dry_run(config: Config) -> int:
    """Prints what a launch would start. Asks nobody anything."""
    if not shown(look_at_config(config, os.environ)):
        return EXIT_USAGE
    print_plan(config, os.environ)
    return EXIT_DONE


def make_bucket(config: Config) -> None:
    at = bucket_at(config.bucket)
    api, region = HfApi(), config.jobs.region
    patiently(
        f"making the bucket {at.id}", lambda: api.create_bucket(at.id, private=True, region=region, exist_ok=True)
    )
