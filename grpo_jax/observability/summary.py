"""The key numbers of a run, and the verdict on what it waited for."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from grpo_jax.observability.evaluations import passed_at
from grpo_jax.observability.flow import mean_of
from grpo_jax.observability.metrics import Metrics
from grpo_jax.observability.rundata import RunData
from grpo_jax.observability.timeline import overlap
from grpo_jax.observability.verdict import judge
from grpo_jax.storage.dropped import count_dropped


def summarise(run: RunData) -> dict[str, Any]:
    """Plain JSON values by name; None for what cannot be known from what is there."""
    metrics, times = run.metrics, overlap(run)
    base, trained = (None if e is None else float(e["reward"]) for e in run.held_out)
    judged = judge(run)
    return {
        "run": run.name,
        "status": run.run.get("status") or "unknown",
        "error": run.run.get("error"),
        "steps": metrics[-1]["step"] + 1 if metrics else 0,
        "total_steps": run.config_value("steps", run.learner.get("total_steps")),
        "reward_first3": mean_of(metrics[:3], "reward"),
        "reward_last5": mean_of(metrics[-5:], "reward"),
        "held_out_base": base,
        "held_out_trained": trained,
        "held_out_pass_at": _pass_at(run),
        "step_s_median": _percentile(metrics, "perf/step_s", 50),
        "fwd_bwd_s_median": _percentile(metrics, "perf/fwd_bwd_s", 50),
        "overlap": times,
        "overlap_fraction": times["fraction"],
        "staleness_mean": mean_of(metrics, "sample/staleness_mean"),
        "staleness_max": _percentile(metrics, "sample/staleness_max", 100),
        "publish_stall_s_p50": _percentile(metrics, "perf/publish_stall_s", 50),
        "publish_stall_s_p99": _percentile(metrics, "perf/publish_stall_s", 99),
        "time_to_serve_s_p50": _percentile(metrics, "policy/time_to_serve_s", 50),
        "mismatch_p50": _percentile(metrics, "mismatch/p50", 50),
        "mismatch_p99": _percentile(metrics, "mismatch/p99", 50),
        "mismatch_max": _percentile(metrics, "mismatch/max", 100),
        "groups": len(run.groups),
        "dropped": dict(count_dropped(run.learner).most_common()),
        "skipped": _reasons(s[-1] for w in run.workers.values() for s in w.get("skipped", [])),
        "generated_tokens": _sum(run.workers, "generated_tokens"),
        "wasted_tokens": _sum(run.workers, "wasted_tokens"),
        "request_failures": _sum(run.workers, "request_failures"),
        "reward_failures": _sum(run.workers, "reward_failures"),
        "redraws": _sum(run.workers, "redraws"),
        "quarantined": {key: _quarantined(run, record) for key, record in run.replicas.items()},
        "quarantined_groups": run.learner.get("quarantined_total"),
        "learner_starts": run.learner.get("incarnation"),
        "worker_starts": _sum(run.workers, "incarnation"),
        "replica_restarts": _sum(run.replicas, "restarts"),
        "learner_wait_share": _wait_share(metrics),
        "backpressure_share": _backpressure_share(run, times["span_s"]),
        "verdict": judged.sentence,
        "bottleneck": judged.kind,
        "gains": judged.gains,
        "missing": run.missing,
    }


def _pass_at(run: RunData) -> dict[str, tuple[float | None, float | None]]:
    """By k: pass@k of the base and of the trained policy."""
    base, trained = ({} if e is None else passed_at(e) for e in run.held_out)
    return {str(k): (base.get(k), trained.get(k)) for k in sorted(base.keys() | trained.keys())}


def _wait_share(metrics: list[Metrics]) -> float | None:
    """The share of the learner's time spent waiting for rollouts, after the first step (which waits for the start)."""
    both = [r for r in metrics if "perf/rollout_wait_s" in r and r.get("perf/step_s")]
    steady = both[1:] or both
    total = sum(r["perf/step_s"] for r in steady)
    return sum(r["perf/rollout_wait_s"] for r in steady) / total if total else None


def _backpressure_share(run: RunData, span_s: float) -> float | None:
    """The share of the run in which only the limit on staleness kept the workers from starting a group."""
    held = [w["backpressure_s"] for w in run.workers.values() if "backpressure_s" in w]
    return min(sum(held) / (len(held) * span_s), 1.0) if held and span_s else None


def _percentile(metrics: list[Metrics], key: str, q: float) -> float | None:
    values = [r[key] for r in metrics if key in r]
    return float(np.percentile(values, q)) if values else None


def _sum(records: dict[str, dict[str, Any]], key: str) -> int | None:
    values = [r[key] for r in records.values() if key in r]
    return sum(values) if values else None


def _reasons(reasons: Iterable[str]) -> dict[str, int]:
    """Counts by the word before the colon; what follows is about one group."""
    return dict(Counter(str(reason).partition(":")[0] for reason in reasons).most_common())


def _quarantined(run: RunData, replica: dict[str, Any]) -> dict[str, str]:
    """{policy: reason} of this run; a fleet may serve several."""
    return {k: v for k, v in (replica.get("quarantined") or {}).items() if k.startswith(f"{run.name}.")}
