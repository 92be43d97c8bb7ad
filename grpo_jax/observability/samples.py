"""Completions of a run as they were sampled: a few for the report, and a table of any of them for the terminal."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.table import Column, Table
from rich.text import Text

from grpo_jax.adapters.names import parse_policy
from grpo_jax.errors import UsageError
from grpo_jax.observability import format as f
from grpo_jax.observability.printable import printable
from grpo_jax.observability.rundata import RunData, batch_ids
from grpo_jax.rollouts.sample import Group, Sample
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import read_record
from grpo_jax.storage.spool import SpoolReader, group_ids

Decode = Callable[[Sequence[int]], str]
Order = Literal["newest", "best", "worst"]

_GROUPS = 4
_LONGEST_CELL = 2000


@dataclass(frozen=True)
class Shown:
    title: str  # which step, or which sample: its group's id and its place in it
    problem: str
    answer: Any
    prompt: str | None  # None: no tokenizer was at hand
    completion: str
    reward: float | None
    tokens: int
    finish_reason: str
    policy: str
    parts: Mapping[str, float | None] = field(default_factory=dict)  # the reward's, by label


def choose_samples(run: RunData, bucket: Bucket, decode: Decode | None) -> list[Shown]:
    """Sample 0 of the first groups of the first and the last step; without batch records, of the oldest and newest."""
    if not run.groups:
        return []
    by_id = {str(group.id): group for group in run.groups}
    steps = sorted({r["step"] for r in run.metrics})
    shown: list[Shown] = []
    for step in dict.fromkeys((*steps[:1], *steps[-1:])):
        groups = [by_id[i] for i in batch_ids(bucket, step) if i in by_id][:_GROUPS]
        shown += [_shown(f"Step {step}", group, group.samples[0], decode) for group in groups]
    if shown:
        return shown
    first, last = run.groups[:_GROUPS], run.groups[_GROUPS:][-_GROUPS:]
    return [
        *(_shown("Sampled first", group, group.samples[0], decode) for group in first),
        *(_shown("Sampled last", group, group.samples[0], decode) for group in last),
    ]


def select_samples(
    bucket: Bucket,
    decode: Decode | None,
    *,
    n: int = 8,
    step: int | None = None,
    policy: str | None = None,
    order: Order = "newest",
) -> list[Shown]:
    """`n` samples of the run whose prefix is `bucket`.

    Args:
      step: of the groups that this step trained.
      policy: of one policy: its name, `v3`, or `3`.
      order: the newest groups first, one sample of each before the second of any; or all samples by their reward.

    Raises:
      UsageError: there is none of that kind.
    """
    wanted: Collection[str] | None = None
    if step is not None:
        wanted = batch_ids(bucket, step)
        if not wanted:
            raise UsageError(f"{bucket.address}: there is no record of a step {step}")
    # Only what is shown is read: of a long run, one step is a small part of the spool.
    skip = () if wanted is None else set(group_ids(bucket)) - set(wanted)
    groups = [g for g in SpoolReader(bucket, skip, patience_s=0.0).poll() if policy is None or _is_of(g, policy)]
    if not groups:
        kind = "" if step is None and policy is None else " of that kind"
        raise UsageError(f"{bucket.address}: there are no samples{kind}")
    groups.sort(key=lambda group: group.provenance.started_at, reverse=True)
    places = range(max(len(group.samples) for group in groups))
    found = [(group, i) for i in places for group in groups if i < len(group.samples)]
    found = [(group, i) for group, i in found if group.samples[i].finish_reason != "failed"]
    if order != "newest":
        scored = [(reward, (group, i)) for group, i in found if (reward := group.samples[i].reward) is not None]
        found = [pair for _, pair in sorted(scored, key=lambda item: item[0], reverse=order == "best")]
    return [_shown(f"{group.id}/{i}", group, group.samples[i], decode) for group, i in found[:n]]


def samples_table(shown: Sequence[Shown]) -> Table:
    """One row a sample. What the model wrote is shown as it is, but for control characters."""
    names = ("sample", "policy", "prompt", "answer", "completion", "reward", "tokens")
    table = Table(*(Column(name, overflow="fold") for name in names), show_lines=True)
    for sample in shown:
        prompt = f"{sample.problem}" if sample.prompt is None else sample.prompt
        parts = [f"{name} {_value(value)}" for name, value in sample.parts.items()]
        cells = (
            sample.title,
            sample.policy,
            prompt,
            "" if sample.answer is None else str(sample.answer),
            sample.completion,
            "\n".join([_value(sample.reward), *(parts if len(parts) > 1 else [])]),
            f"{sample.tokens} {sample.finish_reason}",
        )
        table.add_row(*(Text(printable(cell, _LONGEST_CELL)) for cell in cells))
    return table


def run_model(bucket: Bucket) -> str | None:
    """`model.source` of the run's record, if it has one."""
    record = read_record(bucket, layout.RUN) or {}
    return ((record.get("config") or {}).get("model") or {}).get("source")


def _is_of(group: Group, policy: str) -> bool:
    name = group.provenance.policy
    return policy == name or policy.removeprefix("v") == str(parse_policy(name).version)


def _value(reward: float | None) -> str:
    return "unscorable" if reward is None else f.reward(reward)


def _shown(title: str, group: Group, sample: Sample, decode: Decode | None) -> Shown:
    provenance = group.provenance
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
        parts=sample.reward_parts,
    )
