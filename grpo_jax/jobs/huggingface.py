"""`launch`, `status` and `cancel`: runs as jobs of the Hugging Face Hub, found again by what they left at the Hub."""

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi

from grpo_jax.config.load import load_config
from grpo_jax.config.schema import Config
from grpo_jax.config.sweep import load_sweep
from grpo_jax.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, RunFailed, UsageError
from grpo_jax.jobs.hub_jobs import HubError, HubJobs, Job, patiently
from grpo_jax.jobs.launch import Launcher
from grpo_jax.jobs.launch_package import build_files
from grpo_jax.jobs.launch_show import complain, print_jobs, print_plan, print_runs, say, shown
from grpo_jax.jobs.launch_spec import (
    LEARNER,
    Launch,
    Target,
    bucket_at,
    labels_of,
    namespace_of,
    secret_values,
    slots,
    spec_of,
)
from grpo_jax.jobs.launch_state import Desired, LaunchState
from grpo_jax.jobs.launch_view import summary
from grpo_jax.jobs.preflight import look_at_config, preflight, problems_here
from grpo_jax.storage.bucket import Bucket, BucketError

log = logging.getLogger(__name__)

_CONFIG_FILES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Found:
    """A run or a sweep by its name, and what its last launch has left, if it has left anything."""

    bucket: str
    name: str
    target: Target | None
    launch: Launch | None
    namespace: str | None = None
    unread: str | None = None
    """Why what its last launch has left could not be read."""

    @property
    def state(self) -> LaunchState:
        return LaunchState(Bucket(f"{self.bucket}/{self.name}"))

    @property
    def hub(self) -> HubJobs:
        configs = self.target.configs if self.target is not None else ()
        namespace = namespace_of(configs[0]) if configs else self.namespace or bucket_at(self.bucket).namespace
        return HubJobs(namespace, labels_of(self.bucket, self.name))

    @property
    def launched(self) -> tuple[Target, Launch]:
        if self.target is None or self.launch is None:
            raise UsageError(self.unread or f"{self.bucket}/{self.name}: nothing has launched this")
        return self.target, self.launch


def find(name: str) -> Found:
    """A run or a sweep by its URL in a bucket, or by the config that it was launched with."""
    given = _target_of(name) if name.endswith(_CONFIG_FILES) else None
    if given is not None:
        bucket, name = given.bucket, given.name
    else:
        bucket, _, name = name.rstrip("/").rpartition("/")
    bucket_at(bucket)
    state = LaunchState(Bucket(f"{bucket}/{name}"))
    namespace = unread = None
    try:
        left, namespace = state.launch(), state.namespace()
        above = None if left is not None else LaunchState(Bucket(bucket)).launch()
    except (BucketError, UsageError) as error:  # its jobs are found all the same, by their labels
        log.warning("%s", error)
        left = above = None
        unread = str(error)
        if isinstance(error, UsageError):  # of another version of this package
            namespace = state.namespace()
    if above is not None and any(config.run == name for config in above[0]):
        raise UsageError(f"{name} is a run of the sweep {bucket}: its jobs are launched, shown and ended together")
    if left is None:
        return Found(bucket, name, given, None, namespace, unread)
    configs, launch = left
    return Found(bucket, name, Target(bucket, name, configs), launch)


def _target_of(path: str) -> Target:
    sweep = load_sweep(path)
    if sweep is None:
        return Target.run(load_config(path))
    return Target.sweep(sweep.folder, [variant.config for variant in sweep.variants])


def launch(target: Target, *, detach: bool = False, on_interrupt: str = "ask", compile: bool = True) -> int:
    """Starts or resumes its runs, and looks after them to their end unless `detach`. Returns the exit code.

    Nothing is made before everything has been looked at; what a launch that fails half-way has started is cancelled.
    """
    config = target.configs[0]
    found = preflight(config, os.environ, compile=compile)
    for other in target.configs[1:]:
        found.problems += [f"{other.run}: {problem}" for problem in problems_here(other, os.environ)]
    if not shown(found):
        return EXIT_USAGE
    if found.finished and not target.is_sweep:
        say(f"finished already: {summary(Bucket(target.url), config.steps)}")
        return EXIT_DONE
    hub = HubJobs(namespace_of(config), target.labels)
    files = build_files(target.configs, Path.cwd())
    place = files.folder if target.is_sweep else f"{config.run}/{files.folder}"
    new = Launch(secrets.token_hex(4), place, files.package, target.labels)
    for slot in slots(config.generator.replicas):
        spec_of(config, slot, new, os.environ)
    try:
        for job in hub.all():
            if job.is_live and job.slot == LEARNER:
                raise UsageError(f"{target.name} is going on: `grpo-jax launch --attach {target.url}` follows it")
        make_bucket(config)
        state, bucket = LaunchState(Bucket(target.url)), Bucket(config.bucket)
        for name, data in files.contents.items():
            bucket.put(f"{place}/{name}", data)
        state.write_launch(target.configs, new)
        state.want(Desired("running", config.generator.replicas))
    except (HubError, BucketError) as error:
        raise RunFailed(str(error)) from None
    say(f"bucket {bucket.address}")
    launcher = Launcher(target, new, hub, attached=False, with_logs=not detach)
    if not detach:
        return launcher.run(on_interrupt)
    code = launcher.start()
    if code == EXIT_DONE:
        url = target.url
        say(f"started; `grpo-jax launch --attach {url}` follows the run, `grpo-jax cancel {url}` ends it")
    return code


def attach(name: str, *, on_interrupt: str = "ask") -> int:
    """Looks after what is going on, in place of whoever did so before."""
    found = find(name)
    target, left = found.launched
    _require_variables(target, left)
    try:
        jobs, wanted = found.hub.all(), found.state.desired()
    except (HubError, BucketError) as error:
        raise RunFailed(str(error)) from None
    first = going_on(target, jobs)
    if first is None and wanted is not None and wanted.state != "cancelled":
        first = _last_begun(target, left, jobs)
    if first is None:
        raise UsageError(f"{target.name} has no learner job that goes on; `grpo-jax launch` starts one")
    return Launcher(target, left, found.hub, attached=True, first=first, known=jobs).run(on_interrupt)


def scale(name: str, generators: int) -> int:
    """Says how many generators are wanted; an attached launcher brings it about, or else this process does."""
    found = find(name)
    target, left = found.launched
    try:
        wanted, jobs, is_attached = found.state.desired(), found.hub.all(), found.state.attached()
        if wanted is None or wanted.state == "cancelled" or not any(job.is_live for job in jobs):
            raise UsageError(f"{target.name} is not going on; `grpo-jax launch` goes on with it")
        if not is_attached:
            _require_variables(target, left)
        found.state.want(Desired("running", generators))
        if is_attached:
            say(f"{generators} generators are wanted; the attached launcher starts or cancels what that takes")
            return EXIT_DONE
    except (HubError, BucketError) as error:
        raise RunFailed(str(error)) from None
    first = going_on(target, jobs) or 0
    return Launcher(target, left, found.hub, attached=True, with_logs=False, first=first, known=jobs).start()


def going_on(target: Target, jobs: Sequence[Job]) -> int | None:
    """Index of the run whose learner is live."""
    live = {job.run for job in jobs if job.slot == LEARNER and job.is_live}
    return next((i for i, config in enumerate(target.configs) if config.run in live), None)


def _last_begun(target: Target, launch: Launch, jobs: Sequence[Job]) -> int | None:
    """Index of the run whose learner this launch has started last; it has died while nobody was attached."""
    learners = [job for job in jobs if job.slot == LEARNER and job.launch == launch.id]
    if not learners or learners[-1].stage == "COMPLETED":
        return None
    return next((i for i, config in enumerate(target.configs) if config.run == learners[-1].run), None)


def _require_variables(target: Target, launch: Launch) -> None:
    """UsageError if a job that takes another's place would lack what it gets from this environment."""
    for slot in slots(1):
        secret_values(spec_of(target.configs[0], slot, launch, os.environ), os.environ, "")


def cancel(name: str) -> int:
    """Ends all jobs of a run or a sweep, whoever has started them; it can be resumed."""
    found = find(name)
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
    say(f"{len(before) - len(left)} jobs cancelled" if before else f"{name}: none of its jobs is live")
    if found.unread is not None and found.namespace is None and found.target is None and not before:
        complain(f"whose they are could not be read, and they were looked for in {bucket_at(found.bucket).namespace}")
        return EXIT_FAILED
    return EXIT_FAILED if left else EXIT_DONE


def status(name: str) -> int:
    """Prints the jobs of a run or a sweep, what they have cost, its replicas, and where it is."""
    found = find(name)
    try:
        jobs = found.hub.all()
        if not jobs and found.launch is None:
            raise UsageError(f"{name}: nothing has launched this")
        print_jobs(jobs, found.target.configs[0].jobs.prices if found.target is not None else {})
        if found.target is not None:
            print_runs(Bucket(found.target.configs[0].bucket), found.target.configs, jobs)
    except (HubError, BucketError) as error:
        raise RunFailed(str(error)) from None
    return EXIT_DONE


def dry_run(target: Target) -> int:
    """Prints what a launch would start. Asks nobody anything."""
    for config in target.configs:
        if not shown(look_at_config(config, os.environ)):
            return EXIT_USAGE
    print_plan(target, os.environ)
    return EXIT_DONE


def make_bucket(config: Config) -> None:
    at = bucket_at(config.bucket)
    api, region = HfApi(), config.jobs.region
    patiently(
        f"making the bucket {at.id}", lambda: api.create_bucket(at.id, private=True, region=region, exist_ok=True)
    )
