"""`grpo-jax reward`: stored samples, scored by a config's rewards without a model, a generator or a learner."""

import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_DONE, UsageError
from grpo_jax.jobs.stored import StoredGroup, read_stored
from grpo_jax.observability import format as f
from grpo_jax.observability.printable import printable
from grpo_jax.rollouts.rewards import Reward, load_rewards, missing_packages
from grpo_jax.rollouts.scoring import Score, Scorer

# Prompts scored at one time: enough to keep threads, pools and judges at work.
_AT_ONCE = 32
_SLOWEST = 3
_COLUMNS = ("weight", "mean", "std", "min", "", "max", "none", "failed", "longest")
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Scored:
    group: StoredGroup
    scores: list[Score]


def score_stored(config: Config, on: str) -> int:
    """Scores the samples in `on` (see `read_stored`) with the config's rewards and prints what comes out.

    UsageError: there are no samples, or a reward cannot be used at all. A reward that fails on samples is reported.
    """
    rewards = load_rewards(config.rewards)
    for missing in missing_packages(rewards):
        raise UsageError(missing)
    stored = read_stored(config, on)
    for note in stored.notes:
        print(f"note: {note}")
    _print(rewards, asyncio.run(_score(rewards, config.rollouts.reward_timeout_s, stored.groups)))
    return EXIT_DONE


async def _score(rewards: Sequence[Reward], timeout_s: float, groups: Sequence[StoredGroup]) -> list[Scored]:
    scorer, slots = Scorer(rewards, timeout_s), asyncio.Semaphore(_AT_ONCE)

    async def one(group: StoredGroup) -> Scored:
        async with slots:
            return Scored(group, await scorer.score(group.completions))

    try:
        return list(await asyncio.gather(*map(one, groups)))
    finally:
        scorer.close()


def _print(rewards: Sequence[Reward], scored: Sequence[Scored]) -> None:
    scores = [score for one in scored for score in one.scores]
    console = Console()
    columns = [Column("reward", overflow="fold", min_width=10), *(Column(name, no_wrap=True) for name in _COLUMNS)]
    table = Table(*columns, box=None, padding=(0, 1), pad_edge=False)
    for reward in rewards:
        label = reward.label
        failed = sum(any(error.startswith(f"reward {label}: ") for error in score.errors) for score in scores)
        values = [score.parts[label] for score in scores]
        longest = f.duration(max(score.seconds[label] for score in scores))
        table.add_row(Text(printable(label)), f"{reward.config.weight:g}", *_row(values, failed), longest)
        for part in dict.fromkeys(key for score in scores for key in score.parts if key.startswith(f"{label}/")):
            table.add_row(Text(printable(f"  {part}")), "", *_row([score.parts.get(part) for score in scores], None))
    table.add_row("weighted sum", "", *_row([score.reward for score in scores], None))
    console.print(table)
    print(f"{len(scores)} completions of {len(scored)} prompts{_mixed(scored)}")
    _print_failures(scores)
    _print_slowest(rewards, scored)


def _row(values: Sequence[float | None], failed: int | None) -> list[str]:
    known = [value for value in values if value is not None]
    none = str(len(values) - len(known) - (failed or 0))
    failures = "" if failed is None else str(failed)
    if not known:
        return [f.UNKNOWN] * 5 + [none, failures]
    mean, spread, low, high = (
        f.number(value) for value in (statistics.fmean(known), statistics.pstdev(known), min(known), max(known))
    )
    return [mean, spread, low, histogram(known), high, none, failures]


def histogram(values: Sequence[float], bins: int = 8) -> str:
    """How often values fall into equal parts of their range, as bars; a space where none does."""
    low, high = min(values), max(values)
    if low == high:
        return _BARS[-1]
    counts = Counter(min(int((value - low) / (high - low) * bins), bins - 1) for value in values)
    most = max(counts.values())
    return "".join(_BARS[-(-counts[i] * len(_BARS) // most) - 1] if counts[i] else " " for i in range(bins))


def _mixed(scored: Sequence[Scored]) -> str:
    """What share of the prompts with several completions could teach anything."""
    groups = [[score.reward for score in one.scores if score.reward is not None] for one in scored]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return ""
    mixed = sum(max(group) > min(group) for group in groups) / len(groups)
    return f"; {mixed:.0%} of those with several have different rewards (only those teach anything)"


def _print_failures(scores: Sequence[Score]) -> None:
    """Each kind of failure with its count; its traceback is in the log."""
    failures = Counter(error for score in scores for error in score.errors)
    for error, count in failures.most_common(5):
        print(f"failed {count}×: {printable(error)}")
    if len(failures) > 5:
        print(f"… and {len(failures) - 5} other kinds of failure")


def _print_slowest(rewards: Sequence[Reward], scored: Sequence[Scored]) -> None:
    calls: dict[Any, tuple[float, str]] = {}
    for one in scored:
        for place, score in enumerate(one.scores):
            for reward in rewards:
                # All completions of a prompt share the call of a batched reward.
                where = one.group.name if reward.batched else f"{one.group.name}, completion {place}"
                calls[reward.label, where] = (score.seconds[reward.label], f"{reward.label} on {where}")
    slowest = sorted(calls.values(), reverse=True)[:_SLOWEST]
    print("slowest: " + "; ".join(f"{printable(what)} ({f.duration(seconds)})" for seconds, what in slowest))
