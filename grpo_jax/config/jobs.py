"""The section `jobs` of a config: how `launch` turns it into jobs of the Hugging Face Hub."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from grpo_jax.config.section import Section

# Reserved: what the launcher itself tells a job.
_OURS = ("GRPO_JAX_", "JOB_ID", "HF_ENDPOINT", "HF_TOKEN", "PYTHONPATH")


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("expected the name of an environment variable; its value comes from where `launch` is called")
    if name.startswith(_OURS):
        raise ValueError(f"{name} is set by the launcher itself")
    return name


def _duration(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?[smhd]", text):
        raise ValueError("expected a number and s, m, h or d, such as 90m")
    return text


def _image(name: str) -> str:
    """An image that means the same thing tomorrow: with a tag that is not `latest`, or a digest."""
    tag = name.rpartition("/")[2].partition(":")[2]
    if name.split() != [name] or not (tag or "@sha256:" in name):
        raise ValueError("an image needs a tag, such as python:3.12-slim")
    if tag == "latest":
        raise ValueError("the tag 'latest' is another image tomorrow; name a version")
    return name


Variable = Annotated[str, AfterValidator(_variable)]
Duration = Annotated[str, AfterValidator(_duration)]
Image = Annotated[str, AfterValidator(_image)]


class RoleJobs(Section):
    """The jobs of one role."""

    image: Image
    flavor: str
    timeout: Duration = Field("12h", description="after which the Hub ends a job, whatever it does")
    attempts: int = Field(1, ge=1, description="the Hub's own: it starts a failed job again, whoever looks on")
    env: list[Variable] = Field([], description="variables of the launching environment that a job gets too")
    secrets: list[Variable] = Field([], description="the same, kept secret by the Hub")
    packages: list[str] = Field([], description="pip requirements beside this package's own")

    @field_validator("env")
    @classmethod
    def _is_public(cls, names: list[str]) -> list[str]:
        for name in names:
            if any(word in name.upper() for word in ("TOKEN", "SECRET", "KEY", "PASSWORD")):
                raise ValueError(f"{name} is named like a secret, and a job's page shows env; put it into secrets")
        return names


class GeneratorJobs(RoleJobs):
    """As many as `generator.replicas`."""

    image: Image = "vllm/vllm-openai:v0.32.0"
    flavor: str = "l4x1"


class LearnerJob(RoleJobs):
    """Learner, proxy and worker in one job."""

    image: Image = "python:3.12-slim"
    flavor: str = "a100-large"
    extras: list[str] | None = Field(
        None, description="of this package, to be installed; None: learner on a cpu flavor, cuda on any other"
    )

    @property
    def installed_extras(self) -> list[str]:
        if self.extras is not None:
            return self.extras
        return ["learner" if self.flavor.startswith("cpu-") else "cuda"]


class Jobs(Section):
    backend: Literal["local", "huggingface"] = Field("local", description="where `launch` starts the roles")
    namespace: str | None = Field(None, description="user or organization that the jobs belong to; None: the bucket's")
    region: Literal["us", "eu"] | None = Field(None, description="of a bucket that is made")
    network: Literal["exposed", "group"] = Field(
        "exposed",
        description="how the proxy reaches replicas: by a public address with a bearer token, or in a network group",
    )
    port: int = Field(8000, ge=1024, le=65535, description="of a replica")
    mount: bool = Field(False, description="the bucket as a volume of each job, instead of over the Hub's API")
    package: str = Field("wheel", description="wheel: this package as it is here; else a pip requirement")
    code: list[str] | None = Field(
        None,
        description="files and folders of the current directory that go along; None: the modules there that task, "
        "rewards and loss name",
    )
    prices: dict[str, Annotated[float, Field(ge=0)]] = Field({}, description="flavor -> USD an hour")
    restarts: int = Field(
        2, ge=0, description="new jobs in a row for one that ended too soon; one that ran for 10 min is always replaced"
    )
    generator: GeneratorJobs = GeneratorJobs()
    learner: LearnerJob = LearnerJob()
