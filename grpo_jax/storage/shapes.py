"""What readers of a record rely on: the types of what it holds. Keys that are missing, or not known here, are no fault.

A checksum says that a record came as it was written, not who wrote it, nor with which version.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_LARGEST = 2**53  # above it a JSON number is not the same to every reader
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Pair = Annotated[list[str], Field(min_length=2, max_length=2)]
Seconds = Annotated[float, Field(ge=0, le=_LARGEST)]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Base(_Shape):
    source: str = ""
    digest: str


class _Run(_Shape):
    run: str = ""
    status: str = ""
    error: str | None = None
    config: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    base: _Base | None = None
    created_at: Seconds | None = None
    finished_at: Seconds | None = None


class _Pointer(_Shape):
    current: str = ""
    window: list[str] = []
    pinned: str | None = None
    probe: str = ""


class _Learner(_Shape):
    step: Count = 0
    version: Count = 0
    total_steps: Count = 0
    phase: str = ""
    drops: list[Pair] = []
    dropped: dict[str, list[Annotated[tuple[Count, Count, list[Count]], Field(strict=False)]]] = {}
    quarantined: list[Pair] = []
    quarantined_total: Count = 0


class _Worker(_Shape):
    phase: str = ""
    started_at: Seconds = 0
    inflight_groups: Count = 0
    inflight_samples: Count = 0
    live: Count = 0
    generated_tokens: Count = 0
    wasted_tokens: Count = 0
    request_failures: Count = 0
    reward_failures: Count = 0
    redraws: Count = 0
    skipped: list[Annotated[tuple[Count, Count, str], Field(strict=False)]] = []  # JSON has no tuples
    backpressure_s: Seconds = 0
    scoring_s: Seconds = 0
    scoring_slots: Count = 0
    first_named: dict[str, Seconds] = {}
    first_served: dict[str, Seconds] = {}


class _Replica(_Shape):
    state: str = ""
    proved: list[str] = []
    loaded: list[str] = []
    quarantined: dict[str, str] = {}
    engine: str | None = None
    running: Count = 0
    waiting: Count = 0
    restarts: Count = 0
    proofs: Count = 0
    refused_total: Count = 0
    error: str | None = None


class _Evaluation(_Shape):
    policy: str
    split: str = ""
    problems: Count = 0
    samples: Count = 0
    reward: float | None
    rewards: dict[str, float | None] = {}
    pass_at: dict[str, float | None] = {}
    pass_reward: float | None = None
    pass_on: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    unscorable: Count = 0
    finished_at: Seconds = 0


_NAMED: dict[str, type[_Shape]] = {"run.json": _Run, "policy.json": _Pointer, "state.json": _Learner}
_IN_FOLDER: dict[str, type[_Shape]] = {"workers": _Worker, "replicas": _Replica, "evaluations": _Evaluation}


def misfit(key: str, record: Any) -> str | None:
    """What in a record is not of the type that it has in those of its kind, told by its key; None if all is.

    Of other kinds nothing is known.
    """
    *folders, name = key.split("/")
    shape = _IN_FOLDER.get(folders[-1]) if folders else None
    shape = shape or _NAMED.get(name)
    if shape is None:
        return None
    try:
        shape.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return None
