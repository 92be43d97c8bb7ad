"""What is looked at before a launch makes anything or costs anything. One sentence per problem."""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from packaging.requirements import InvalidRequirement, Requirement

from grpo_jax.config.compare import differing_keys
from grpo_jax.config.plan import Plan, check_config
from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.jobs.hub_jobs import HubError, hub_token, patiently
from grpo_jax.jobs.launch_spec import GENERATOR, LEARNER, bucket_at, namespace_of
from grpo_jax.jobs.preflight_memory import memory_problems
from grpo_jax.observability.logs import is_secret_name
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket, BucketError
from grpo_jax.storage.records import RecordReader
from grpo_jax.storage.scrub import scrubbed

_CLIENT = (2, 4)  # with all that a job is asked for: ports, network groups, volumes, labels


@dataclass
class Findings:
    """`problems` forbid the launch, `notes` say what could not be looked at; `finished`: there is nothing to launch."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    finished: bool = False


def look_at_config(config: Config, environ: Mapping[str, str]) -> Findings:
    """What needs no network."""
    found, jobs = Findings(), config.jobs
    client = importlib.metadata.version("huggingface_hub")
    if tuple(int(part) for part in client.split(".")[:2]) < _CLIENT:
        needed = ".".join(map(str, _CLIENT))
        found.problems.append(f"huggingface_hub {client} is installed here; to start jobs takes {needed} or newer")
    try:
        bucket_at(config.bucket)
    except UsageError as error:
        found.problems.append(str(error))
    if not config.generator.replicas and not config.fleet.replicas:
        found.problems.append("generator.replicas: there is none, and fleet.replicas names no servers either")
    for role, asked in ((LEARNER, jobs.learner), (GENERATOR, jobs.generator)):
        for name in (*asked.env, *asked.secrets):
            if not environ.get(name):
                found.problems.append(f"jobs.{role}: {name} is not set in this environment")
    for name in config.generator.env:
        if is_secret_name(name):
            found.problems.append(f"generator.env: {name} would lie in the bucket; name it in jobs.generator.secrets")
    found.problems += _requirement_problems(config)
    for argument in config.generator.extra_args:
        if argument.startswith(("--api-key", "--hf-token")):
            flag = argument.partition("=")[0]
            found.problems.append(f"generator.extra_args: {flag} would lie in the bucket, and is not needed")
    for key, source in {"model.source": config.model.source, "lora.init_from": config.lora.init_from or ""}.items():
        if Path(source).is_absolute():
            found.notes.append(f"{key}: whether {source} is there in the jobs' images")
        elif source and Path(source).expanduser().is_dir():
            found.problems.append(f"{key}: {source} is a directory of this machine, and the jobs have no such one")
    return found


def _requirement_problems(config: Config) -> list[str]:
    """Of what is handed to pip and to vLLM as it is: it lies in the bucket, and in what the Hub shows of a job."""
    jobs, problems = config.jobs, []
    given = {
        "jobs.package": [jobs.package],
        "jobs.learner.packages": jobs.learner.packages,
        "jobs.generator.packages": jobs.generator.packages,
        "generator.extra_args": config.generator.extra_args,
    }
    for key, texts in given.items():
        for text in texts:
            shown = text.replace("://git@", "://")  # the user name of every SSH address is no secret
            if scrubbed(shown) != shown:
                problems.append(f"{key}: {scrubbed(text)!r} holds a secret, which would lie in the bucket")
            elif key.endswith("packages"):
                try:
                    Requirement(text)
                except InvalidRequirement:
                    problems.append(f"{key}: {text!r} is no pip requirement; a URL takes a name before it: NAME @ URL")
    return problems


def problems_here(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Of a run that shares jobs with one that `preflight` has seen: what is its own, and needs no network."""
    found = look_at_config(config, environ)
    try:
        check_config(config)
    except UsageError as error:
        found.problems.append(str(error))
    return found.problems


def preflight(config: Config, environ: Mapping[str, str], *, compile: bool = True) -> Findings:
    """Everything. Reads only.

    Args:
      compile: the learner's memory is what its compiled step takes; False: its weights.
    """
    found = look_at_config(config, environ)
    plan: Plan | None = None
    try:
        plan = check_config(config)
        found.notes += plan.unchecked
    except UsageError as error:
        found.problems.append(str(error))
    if any(problem.startswith("bucket") for problem in found.problems):
        return found
    if hub_token() is None:
        found.problems.append("there is no token of the Hub: set HF_TOKEN, or log in with `hf auth login`")
        return found
    api = HfApi()
    try:
        me = patiently("asking the Hub whose token this is", api.whoami)
    except HubError as error:
        expired = "the Hub does not accept the token (HF_TOKEN or `hf auth login`): it is wrong or has expired"
        found.problems.append(expired if error.status == 401 else str(error))
        return found
    found.problems += token_problems(me, namespace_of(config), bucket_at(config.bucket).namespace)
    try:
        _look_at_bucket(api, config, found)
        hardware = patiently("asking the Hub for its flavors", api.list_jobs_hardware)
    except HubError as error:
        found.problems.append(str(error))
        return found
    problems, notes = memory_problems(config, plan, hardware, compile=compile and find_spec("jax") is not None)
    found.problems += problems
    found.notes += notes
    return found


def token_problems(me: Mapping[str, Any], namespace: str, bucket_owner: str) -> list[str]:
    """Of what `whoami` says: what is not there is not judged."""
    problems = []
    names = {me.get("name"), *(org.get("name") for org in me.get("orgs") or [])}
    for key, owner in {"jobs.namespace": namespace, "bucket": bucket_owner}.items():
        if owner not in names:
            problems.append(
                f"{key}: {owner} is neither the user of the token, {me.get('name')}, nor an organization of theirs"
            )
    token = (me.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        problems.append("the token may only read: jobs and buckets need one with the role write")
    if token.get("role") == "fineGrained":
        scopes = token.get("fineGrained") or {}
        for permission, owner, what in (
            ("job.write", namespace, "start jobs"),
            ("repo.write", bucket_owner, "write to buckets"),
        ):
            granted = set(scopes.get("global") or [])
            for scope in scopes.get("scoped") or []:
                if (scope.get("entity") or {}).get("name", "").partition("/")[0] == owner:
                    granted |= set(scope.get("permissions") or [])
            if permission not in granted:
                problems.append(f"the token may not {what} in {owner}: it lacks the permission {permission}")
    return problems


def _look_at_bucket(api: HfApi, config: Config, found: Findings) -> None:
    at = bucket_at(config.bucket)
    try:
        info = patiently(f"looking at the bucket {at.id}", lambda: api.bucket_info(at.id))
    except HubError as error:
        if error.status == 404:
            return  # it will be made
        if error.status in (401, 403):
            found.problems.append(f"bucket: the token gives no access to {at.id}")
            return
        raise
    if not info.private:
        found.notes.append(f"bucket: {at.id} is public, and so will be all that the run writes")
    try:
        record = RecordReader(Bucket(config.bucket).child(config.run), layout.RUN).read()
    except BucketError as error:
        found.problems.append(f"bucket: {error}")
        return
    if record is None:
        return
    differing = differing_keys(record["config"], config.model_dump(mode="json"))
    if differing:
        found.problems.append(f"the run {config.run} exists with another config; differing: {', '.join(differing)}")
    else:
        found.finished = record["status"] == "finished" and record["config"]["steps"] >= config.steps
