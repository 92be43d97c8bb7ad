"""A few completions of the first and of the last step, as they were sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_jax.observability.rundata import RunData, batch_ids
from grpo_jax.rollouts.sample import Group
from grpo_jax.storage.bucket import Bucket

Decode = Callable[[Sequence[int]], str]

_GROUPS = 4


@dataclass(frozen=True)
class Shown:
    title: str  # which step
    problem: str
    answer: Any
    prompt: str | None  # None: no tokenizer was at hand
    completion: str
    reward: float | None
    tokens: int
    finish_reason: str
    policy: str


def choose_samples(run: RunData, bucket: Bucket, decode: Decode | None) -> list[Shown]:
    """Sample 0 of the first groups of the first and the last step; without batch records, of the oldest and newest."""
    if not run.groups:
        return []
    by_id = {str(group.id): group for group in run.groups}
    steps = sorted({r["step"] for r in run.metrics})
    shown: list[Shown] = []
    for step in dict.fromkeys((*steps[:1], *steps[-1:])):
        groups = [by_id[i] for i in batch_ids(bucket, step) if i in by_id][:_GROUPS]
        shown += [_shown(f"Step {step}", group, decode) for group in groups]
    if shown:
        return shown
    first, last = run.groups[:_GROUPS], run.groups[_GROUPS:][-_GROUPS:]
    return [
        *(_shown("Sampled first", group, decode) for group in first),
        *(_shown("Sampled last", group, decode) for group in last),
    ]


def _shown(title: str, group: Group, decode: Decode | None) -> Shown:
    sample, provenance = group.samples[0], group.provenance
    return Shown(
        title=title,
        problem=provenance.problem_id,
        answer=provenance.answer,
        prompt=decode(group.prompt_tokens.tolist()) if decode else None,
        completion=sample.text,
        reward=sample.reward,
        tokens=len(sample.tokens),
        finish_reason=sample.finish_reason,
        policy=provenance.policy,
    )
