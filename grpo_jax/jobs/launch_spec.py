"""From configs to what the Hub is asked to run: learner jobs and n generator jobs. Pure: no network, no files."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grpo_jax.config.jobs import RoleJobs
from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.storage import layout
from grpo_jax.storage.scrub import scrubbed

MOUNT = "/bucket"
LEARNER, GENERATOR = "learner", "generator"
LABEL_NAME, LABEL_BUCKET, LABEL_LAUNCH = "grpo-jax", "grpo-jax-bucket", "grpo-jax-launch"
LABEL_RUN = "grpo-jax-run"
LABEL_ROLE, LABEL_SLOT = "grpo-jax-role", "grpo-jax-slot"
HUB_TOKEN, FLEET_TOKEN = "HF_TOKEN", "GRPO_JAX_TOKEN"
EXPOSED_HOSTS = "*.hf.jobs"

_BUCKETS = "hf://buckets/"
_EXPOSED_URL = "https://{JOB_ID}--{GRPO_JAX_PORT}.hf.jobs"
_GROUP_URL = "http://{HF_NETWORK_GROUP_PREFIX}%s:{GRPO_JAX_PORT}"

# What a job begins with, in an image that has nothing of ours: it reads start.py (`launch_start`) from the bucket. The
# Hub redirects to where the bytes lie; the token must not follow there, which is what `unredirected` means.
STUB = """\
import os, time, urllib.parse, urllib.request
def fetch(name):
    for wait in 1, 3, 10, 30, 0:
        try:
            return read(os.environ["GRPO_JAX_BUCKET"], os.environ["GRPO_JAX_FILES"] + "/" + name)
        except Exception as error:
            print("reading " + name + ":", error, flush=True)
            if not wait:
                raise
        time.sleep(wait)
def read(bucket, key):
    if not bucket.startswith("hf://"):
        with open(bucket + "/" + key, "rb") as file:
            return file.read()
    owner, name, *prefix = bucket[len("hf://buckets/"):].strip("/").split("/")
    path = urllib.parse.quote("/".join(prefix + [key]), safe="")
    host = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    request = urllib.request.Request(host + "/buckets/" + owner + "/" + name + "/resolve/" + path)
    request.add_unredirected_header("Authorization", "Bearer " + os.environ["HF_TOKEN"])
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read()
exec(compile(fetch("start.py"), "start.py", "exec"), {"__name__": "__main__", "fetch": fetch})
"""


@dataclass(frozen=True)
class BucketAt:
    """Where a bucket of the Hub is: `<namespace>/<name>`, and the folder in it, "" for all of it."""

    id: str
    prefix: str

    @property
    def namespace(self) -> str:
        return self.id.partition("/")[0]


@dataclass(frozen=True)
class Spec:
    """One job, without the values of its secrets."""

    role: str
    slot: str
    image: str
    command: list[str]
    flavor: str
    timeout: str
    attempts: int
    env: dict[str, str]
    secrets: list[str]
    labels: dict[str, str]
    mount: BucketAt | None = None
    expose: list[int] = field(default_factory=list)
    network_group: str | None = None
    network_aliases: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """What is launched: a run, or runs of a sweep, one after the other, that share their generators.

    Attributes:
      bucket: URL of what it lies in.
      name: of the run or of the sweep. Its own place is `url`.
      configs: of the runs, in their order.
    """

    bucket: str
    name: str
    configs: tuple[Config, ...]

    @classmethod
    def run(cls, config: Config) -> "Target":
        return cls(config.bucket.rstrip("/"), config.run, (config,))

    @classmethod
    def sweep(cls, folder: str, configs: Sequence[Config]) -> "Target":
        """Args: `folder`: the bucket of its runs, see `Sweep`."""
        bucket, _, name = folder.rstrip("/").rpartition("/")
        return cls(bucket, name, tuple(configs))

    @property
    def url(self) -> str:
        return f"{self.bucket}/{self.name}"

    @property
    def is_sweep(self) -> bool:
        return self.configs[0].bucket.rstrip("/") == self.url

    @property
    def labels(self) -> dict[str, str]:
        """By which all of its jobs are found, whoever started them and whatever became of that."""
        return labels_of(self.bucket, self.name)


@dataclass(frozen=True)
class Launch:
    """What all jobs of one `launch` have in common.

    Attributes:
      id: tells its jobs from those of earlier launches of the same target.
      files: key in the bucket of the runs: the folder of what `launch_package` has made.
      package: the wheel's name there, or a pip requirement.
      labels: of the target.
    """

    id: str
    files: str
    package: str
    labels: Mapping[str, str]


def bucket_at(url: str) -> BucketAt:
    """UsageError if the bucket is none that jobs of the Hub can share."""
    owner, _, rest = url.removeprefix(_BUCKETS).strip("/").partition("/")
    name, _, prefix = rest.partition("/")
    if not url.startswith(_BUCKETS) or not name:
        raise UsageError(f"bucket: jobs of the Hub share {_BUCKETS}<namespace>/<name>, and this is {scrubbed(url)!r}")
    return BucketAt(f"{owner}/{name}", prefix)


def namespace_of(config: Config) -> str:
    return config.jobs.namespace or bucket_at(config.bucket).namespace


def slots(generators: int) -> list[str]:
    """The names of all jobs of a run, the learner's last: it is started when the generators have been asked for."""
    return [*(f"{GENERATOR}-{i}" for i in range(generators)), LEARNER]


def labels_of(bucket: str, name: str) -> dict[str, str]:
    """See `Target.labels`."""
    digest = hashlib.sha256(bucket.rstrip("/").encode()).hexdigest()
    return {LABEL_NAME: name, LABEL_BUCKET: digest[:12]}


def config_file(role: str, run: str) -> str:
    """Among the files of a launch: a list of one config for a learner, of all for a generator."""
    return f"{LEARNER}-{run}.json" if role == LEARNER else f"{GENERATOR}.json"


def role_config(config: Config, role: str) -> Config:
    """The config as the jobs of a role get it."""
    if role == LEARNER:
        fleet = config.fleet
        if config.jobs.network == "exposed" and EXPOSED_HOSTS not in fleet.allowed_hosts:
            fleet = fleet.model_copy(update={"allowed_hosts": [*fleet.allowed_hosts, EXPOSED_HOSTS]})
        alone = config.generator.model_copy(update={"replicas": 0})
        return config.model_copy(update={"fleet": fleet, "generator": alone})
    return config


def spec_of(config: Config, slot: str, launch: Launch, environ: Mapping[str, str]) -> Spec:
    """The job of a slot.

    Args:
      config: of the run whose learner it is; for a generator that of any of them.
      environ: of the launching process, for the values of `jobs.<role>.env`. UsageError if one is not set.
    """
    jobs, role = config.jobs, LEARNER if slot == LEARNER else GENERATOR
    asked: RoleJobs = jobs.learner if role == LEARNER else jobs.generator
    extras = jobs.learner.installed_extras if role == LEARNER else []
    at = bucket_at(config.bucket)
    env = {
        "GRPO_JAX_BUCKET": MOUNT if jobs.mount else config.bucket,
        "GRPO_JAX_FILES": launch.files,
        "GRPO_JAX_PACKAGE": launch.package,
        "GRPO_JAX_ROLE": role,
        "GRPO_JAX_CONFIG": config_file(role, config.run),
        "GRPO_JAX_EXTRAS": ",".join(extras),
        "GRPO_JAX_PIP": "\n".join(asked.packages),
        **{name: _value(environ, name, f"jobs.{role}.env") for name in asked.env},
    }
    if environ.get("HF_ENDPOINT"):
        env["HF_ENDPOINT"] = environ["HF_ENDPOINT"]
    group, aliases = None, []
    if jobs.network == "group":
        group = _group(launch.labels)
    if role == GENERATOR:
        # A job that takes another's place may start before that one is gone, so a name is never used twice.
        alias = f"{slot}-{secrets.token_hex(4)}"
        env |= {
            "GRPO_JAX_SLOT": slot,
            "GRPO_JAX_HOST": "0.0.0.0",
            "GRPO_JAX_PORT": str(jobs.port),
            "GRPO_JAX_URL": _EXPOSED_URL if group is None else _GROUP_URL % alias,
        }
        aliases = [alias] if group else []
    return Spec(
        role=role,
        slot=slot,
        image=asked.image,
        command=["python3", "-c", STUB],
        flavor=asked.flavor,
        timeout=asked.timeout,
        attempts=asked.attempts,
        env=env,
        secrets=[HUB_TOKEN, *([FLEET_TOKEN] if role == LEARNER else []), *asked.secrets],
        labels={
            **launch.labels,
            LABEL_LAUNCH: launch.id,
            LABEL_ROLE: role,
            LABEL_SLOT: slot,
            **({LABEL_RUN: config.run} if role == LEARNER else {}),
            "name": f"{config.run if role == LEARNER else launch.labels[LABEL_NAME]}-{slot}",
        },
        mount=at if jobs.mount else None,
        expose=[jobs.port] if role == GENERATOR and group is None else [],
        network_group=group,
        network_aliases=aliases,
    )


def secret_values(spec: Spec, environ: Mapping[str, str], hub_token: str) -> dict[str, str]:
    """The values of a job's secrets, for the one call that hands them to the Hub."""
    own = {HUB_TOKEN: hub_token, FLEET_TOKEN: environ.get(FLEET_TOKEN) or hub_token}
    where = f"jobs.{spec.role}.secrets"
    return {name: own[name] if name in own else _value(environ, name, where) for name in spec.secrets}


def launch_folder() -> str:
    return f"{layout.LAUNCH}/files"


def _value(environ: Mapping[str, str], name: str, key: str) -> str:
    if name not in environ:
        raise UsageError(f"{key}: {name} is not set in this environment")
    return environ[name]


def _group(labels: Mapping[str, str]) -> str:
    """46 characters at most, of a-z, 0-9 and dashes; no two runs or sweeps share one."""
    name = labels[LABEL_NAME]
    digest = hashlib.sha256(f"{labels[LABEL_BUCKET]}/{name}".encode()).hexdigest()[:8]
    return f"{name.replace('_', '-')[:37].strip('-')}-{digest}"
