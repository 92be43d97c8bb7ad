"""The flow of groups through a run, measured: from its metrics, or where those are thin from its groups' times."""

from collections.abc import Iterable, Sequence
from statistics import NormalDist

import numpy as np

from grpo_jax.observability.metrics import Metrics
from grpo_jax.observability.replay import Flow, Station
from grpo_jax.observability.rundata import RunData

_ANY_NUMBER = 1e6  # slots of a station where nobody ever waits
_OUTLIER = 5.0  # times the median: a step that compiles, or waits for a restart
_FEWEST_STEPS = 4
_FEWEST_GROUPS, _MOST_GROUPS = 16, 800


def measured_flow(run: RunData) -> Flow | None:
    """None where too little is recorded: fewer than a handful of steps, or no batch shape.

    Used are `perf/step_s`, `perf/rollout_wait_s`, `completions/mean_length` and `max_length`,
    `rollout/generated_tok_s`; of the generators `fleet/slots` and `fleet/running`, of the rewards
    `rollout/scoring_slots` and `rollout/scoring` (means over a step, in samples); `policy/time_to_name_s`, else
    `policy/publish_s`; `rollout/inflight_cap`, if there is one beside the pacing.
    """
    records = steady(run.metrics)
    prompts, samples = (run.config_value(f"batch.{key}", None) for key in ("prompts_per_step", "group_size"))
    staleness = run.config_value("max_staleness", None)
    if len(records) < _FEWEST_STEPS or not prompts or not samples or not isinstance(staleness, int):
        return None
    cycle = mean_of(records, "perf/step_s")
    wait = mean_of(records, "perf/rollout_wait_s")
    if not cycle or wait is None:
        return None
    rate = _sampled(records) or prompts * samples / cycle
    generation = _station(records, rate, "fleet/slots", "fleet/running") or _from_groups(run, samples)
    if generation is None:
        return None
    scoring = _station(records, rate, "rollout/scoring_slots", "rollout/scoring")
    publish = mean_of(records, "policy/time_to_name_s")
    if publish is None:
        publish = mean_of(records, "policy/publish_s") or 0.0
    return Flow(
        prompts=prompts,
        samples=samples,
        window=staleness + 1.0,
        step_s=max(cycle - wait, 1e-6),
        publish_s=publish,
        generation=generation,
        reward=scoring or Station(_ANY_NUMBER, 0.0),
        sync_every=run.config_value("sync_every", 1),
        cap=mean_of(records, "rollout/inflight_cap") or float("inf"),
        spread=_spread(records, prompts * samples),
    )


def steady(metrics: Sequence[Metrics]) -> list[Metrics]:
    """Without the first steps, which compile and wait for the start, and without those that something interrupted."""
    timed = [r for r in metrics if r.get("perf/step_s", 0.0) > 0 and "perf/rollout_wait_s" in r]
    later = timed[min(2, len(timed) // 4) :]
    if not later:
        return []
    longest = _OUTLIER * float(np.median([r["perf/step_s"] for r in later]))
    return [r for r in later if r["perf/step_s"] <= longest]


def _sampled(records: Sequence[Metrics]) -> float | None:
    """Samples a second. While a run fills its window they are more than it trains."""
    tokens, length = _over_time(records, "rollout/generated_tok_s"), mean_of(records, "completions/mean_length")
    return tokens / length if tokens and length else None


def _station(records: Sequence[Metrics], rate: float, slots: str, running: str) -> Station | None:
    """By Little's law: as many are at work as arrive during one service."""
    size, busy = (_over_time(records, key) for key in (slots, running))
    return None if not size or busy is None else Station(size, busy / rate)


def _from_groups(run: RunData, samples: int) -> Station | None:
    """From how the time for a token grows with the number of samples in flight, group by group.

    A token takes a + b · c seconds where c samples are in flight: from c = a / b on a replica works on more of them no
    faster. It has as many slots, but never more than its engine allows.
    """
    groups = run.groups[-_MOST_GROUPS:]
    if len(groups) < _FEWEST_GROUPS:
        return None
    starts, ends = (np.array([getattr(g.provenance, f"{x}_at") for g in groups]) for x in ("started", "finished"))
    longest = np.array([max((len(s.tokens) for s in g.samples), default=0) for g in groups], np.float64)
    known = (ends > starts) & (longest > 0)
    starts, ends, longest = starts[known], ends[known], longest[known]
    if len(starts) < _FEWEST_GROUPS:
        return None
    shared = np.minimum(ends[:, None], ends[None]) - np.maximum(starts[:, None], starts[None])
    inflight = samples * np.clip(shared, 0.0, None).sum(1) / (ends - starts)
    token_s = (ends - starts) / longest
    engines = max(len(run.replicas), 1)
    most = float(engines * run.config_value("generator.max_num_seqs", 64))
    slope, fixed = np.polyfit(inflight, token_s, 1) if np.ptp(inflight) > 0 else (0.0, float(token_s.mean()))
    usual = float(np.mean([len(s.tokens) for g in groups for s in g.samples if len(s.tokens)]))
    if slope <= 0:  # no slower with more of them
        return Station(most, usual * float(token_s.mean()))
    fixed = max(float(fixed), float(slope))
    return Station(min(max(fixed / slope, 1.0), most), usual * fixed)


def _spread(records: Sequence[Metrics], batch: int) -> float:
    """Of the logarithm of lengths, from how far the longest of a batch is above the mean, if they are log-normal."""
    ratios = [
        r["completions/max_length"] / r["completions/mean_length"]
        for r in records
        if r.get("completions/mean_length") and "completions/max_length" in r
    ]
    if not ratios or batch < 2:
        return 0.0
    z = NormalDist().inv_cdf(1 - 0.56 / batch)  # where the largest of so many lies, in the middle
    log_ratio = float(np.log(np.median(ratios)))
    return float(z - np.sqrt(max(z * z - 2 * max(log_ratio, 0.0), 0.0)))


def _over_time(records: Sequence[Metrics], key: str) -> float | None:
    """The mean of what is a mean over each step."""
    known = [r for r in records if key in r]
    seconds = sum(r["perf/step_s"] for r in known)
    return sum(r[key] * r["perf/step_s"] for r in known) / seconds if known else None


def mean_of(records: Iterable[Metrics], key: str) -> float | None:
    values = [r[key] for r in records if key in r]
    return float(np.mean(values)) if values else None
