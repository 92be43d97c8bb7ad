"""Several runs side by side: what each reached, and means with their spread over the seeds of one setting."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_jax.errors import UsageError
from grpo_jax.observability.members import Member
from grpo_jax.observability.metrics import Metrics
from grpo_jax.observability.summary import mean_of

FINAL_STEPS = 5


@dataclass(frozen=True)
class Numbers:
    """What one run reached. None: not reached, or not recorded.

    final: mean reward of the last five steps. `*_to_target`: up to and with the first step whose mean reward is at
    least the target; seconds are those of the steps, waiting for rollouts included. below: of the steps after that one,
    the share whose reward is below the target. drop: how far the reward has fallen at most from an earlier height.
    """

    final: float | None
    held_out: float | None
    steps_to_target: float | None
    samples_to_target: float | None
    seconds_to_target: float | None
    below: float | None
    drop: float | None
    step_s: float | None
    staleness: float | None


@dataclass(frozen=True)
class Spread:
    """A mean over the seeds that have the number; `std` with n - 1, None for one seed."""

    mean: float | None
    std: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread":
        known = [value for value in values if value is not None]
        if not known:
            return cls(None, None, 0)
        return cls(float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else None, len(known))


@dataclass(frozen=True)
class Group:
    """The runs of one setting. Its numbers are those of its finished runs."""

    settings: dict[str, Any]
    members: list[Member]
    numbers: list[Numbers]

    @property
    def finished(self) -> int:
        return len(self.numbers)

    def spread(self, of: Callable[[Numbers], float | None]) -> Spread:
        return Spread.of(of(numbers) for numbers in self.numbers)

    @property
    def final(self) -> Spread:
        return self.spread(lambda n: n.final)


@dataclass(frozen=True)
class Comparison:
    """`factors`: the settings that have more than one value, each with its values in order."""

    title: str
    target: float | None
    groups: list[Group]
    factors: dict[str, list[Any]]

    @property
    def members(self) -> list[Member]:
        return [member for group in self.groups for member in group.members]

    def label(self, settings: dict[str, Any]) -> str:
        return ", ".join(f"{short(key)} {settings[key]}" for key in self.factors if key in settings) or self.title

    @property
    def is_grid(self) -> bool:
        """Whether there are exactly two factors, so that a picture with two axes shows all of it."""
        return len(self.factors) == 2


def compare(title: str, members: Sequence[Member], target: float | None = None) -> Comparison:
    """Args: `target`: a mean reward; None: nine tenths of the best setting's final reward."""
    if not members:
        raise UsageError(f"{title}: there are no runs to compare")
    by_settings: dict[str, list[Member]] = {}
    for member in members:
        by_settings.setdefault(json.dumps(member.settings, sort_keys=True, default=str), []).append(member)
    if target is None:
        finals = [
            Spread.of(numbers_of(m, None).final for m in group if m.is_finished).mean for group in by_settings.values()
        ]
        known = [final for final in finals if final is not None]
        target = max(known) - 0.1 * abs(max(known)) if known else None
    groups = [
        Group(group[0].settings, group, [numbers_of(m, target) for m in group if m.is_finished])
        for group in by_settings.values()
    ]
    return Comparison(title, target, groups, _factors(members))


def numbers_of(member: Member, target: float | None) -> Numbers:
    """Args: `target`: None: then nothing that is measured by it is known."""
    metrics, rewards = member.metrics, [reward for _, reward in member.rewards]
    aim = np.inf if target is None else target
    reached = next((step for step, reward in member.rewards if reward >= aim), None)
    until = [] if reached is None else [r for r in metrics if r["step"] <= reached]
    after = [] if reached is None else [reward for step, reward in member.rewards if step > reached]
    highest = np.maximum.accumulate(rewards) if rewards else np.array([])
    durations = [r["perf/step_s"] for r in metrics if "perf/step_s" in r]
    return Numbers(
        final=mean_of(metrics[-FINAL_STEPS:], "reward"),
        held_out=member.held_out,
        steps_to_target=None if reached is None else reached + 1,
        samples_to_target=_sum(until, "batch/samples"),
        seconds_to_target=_sum(until, "perf/step_s"),
        below=float(np.mean(np.array(after) < aim)) if after else None,
        drop=float(np.max(highest - np.array(rewards))) if rewards else None,
        step_s=float(np.median(durations)) if durations else None,
        staleness=mean_of(metrics, "sample/staleness_mean"),
    )


def as_csv(comparison: Comparison) -> str:
    """One line for each run, finished or not."""
    names = list(Numbers.__dataclass_fields__)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", *comparison.factors, "seed", "status", "steps", *names])
    for member in comparison.members:
        numbers = numbers_of(member, comparison.target)
        values = [getattr(numbers, name) for name in names]
        writer.writerow(
            [
                member.run,
                *(member.settings.get(key, "") for key in comparison.factors),
                "" if member.seed is None else member.seed,
                member.status,
                len(member.metrics),
                *("" if value is None else f"{value:.6g}" for value in values),
            ]
        )
    return out.getvalue()


def short(key: str) -> str:
    """`optimizer.learning_rate` → `learning_rate`; of `staleness.exactly` the first word says more."""
    section, _, word = key.rpartition(".")
    return section if word == "exactly" else word


def _factors(members: Sequence[Member]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for member in members for key in member.settings)
    found = {key: _ordered([m.settings[key] for m in members if key in m.settings]) for key in keys}
    return {key: values for key, values in found.items() if len(values) > 1}


def _ordered(values: Sequence[Any]) -> list[Any]:
    """Each value once: numbers by size, anything else as it came."""
    unique = list({json.dumps(value, default=str): value for value in values}.values())
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in unique):
        return sorted(unique)
    return unique


def _sum(metrics: Sequence[Metrics], key: str) -> float | None:
    values = [r[key] for r in metrics if key in r]
    return float(sum(values)) if values else None
