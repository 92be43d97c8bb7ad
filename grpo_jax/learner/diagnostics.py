"""Metrics of a batch, on the host: of its groups, and of every trained token."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from grpo_jax.learner.batch import trainable
from grpo_jax.rollouts.sample import Group


@dataclass(frozen=True)
class TokenRecord:
    """N trained tokens of a step, each once for every update that it was part of, in any order."""

    logprob_N: np.ndarray  # float64, log π at that update
    proximal_N: np.ndarray  # float64, log π_old where it was recomputed, else log π
    reference_N: np.ndarray  # float64, log π_ref, or empty where there is no KL to the base
    sampler_N: np.ndarray  # float64
    advantage_N: np.ndarray  # float64
    entropy_N: np.ndarray  # float64
    factor_N: np.ndarray  # float64, off-policy weight times masks
    clipped_N: np.ndarray  # int8, −1 and +1 where the objective clipped at its lower and upper bound
    step_lag_N: np.ndarray  # int, learner step − the policy's step

    def at_lag(self, lag: int) -> "TokenRecord":
        chosen = self.step_lag_N == lag
        columns = (getattr(self, field.name) for field in fields(self))
        return TokenRecord(*(column[chosen] if column.size else column for column in columns))


def token_metrics(record: TokenRecord, *, weighted: bool) -> dict[str, float]:
    """What the objective did with the tokens, and how far the sampler was from the learner, in all and by step lag.

    `ratio` and `kl` (k3) are π against μ; `clip_ratio/*` are fractions of all tokens; `masked/positive` is the fraction
    of the tokens with A > 0 that a mask or a weight left without any loss, `masked/negative` likewise; `ess` is
    (Σ w)² / (N Σ w²); `mismatch/*` are of |log π_prox − log μ|.

    Args:
      weighted: whether the factors hold the ratio to the sampler (an off-policy weight) already.
    """
    if not record.logprob_N.size:
        return {}
    ratio = np.exp(np.clip(record.logprob_N - record.sampler_N, -20, 20))
    metrics = {
        "ratio": float(ratio.mean()),
        "kl": float(np.mean(1 / ratio - 1 + np.log(ratio))),
        "entropy": float(record.entropy_N.mean()),
        **_by_lag(record, "", weighted),
    }
    if record.reference_N.size:
        difference = np.clip(record.logprob_N - record.reference_N, -20, 20)
        metrics["kl_ref"] = float(np.mean(np.expm1(-difference) + difference))
    for lag in np.unique(record.step_lag_N):
        metrics.update(_by_lag(record.at_lag(lag), f"/lag{lag}", weighted))
    return metrics


def _by_lag(record: TokenRecord, lag: str, weighted: bool) -> dict[str, float]:
    delta = record.proximal_N - record.sampler_N
    weight = record.factor_N * (1.0 if weighted else np.exp(np.clip(delta, -20, 20)))
    masked = record.factor_N == 0
    return {
        f"clip_ratio{lag}/low": float(np.mean(record.clipped_N < 0)),
        f"clip_ratio{lag}/high": float(np.mean(record.clipped_N > 0)),
        f"masked{lag}/positive": _share(masked, record.advantage_N > 0),
        f"masked{lag}/negative": _share(masked, record.advantage_N < 0),
        f"ess{lag}": float(weight.mean() ** 2 / np.mean(weight**2)) if weight.any() else 0.0,
        **_mismatch(f"mismatch{lag}", np.abs(delta)),
    }


def _share(values: np.ndarray, among: np.ndarray) -> float:
    """The mean of some values, 0 when there are none."""
    return float(values[among].mean()) if among.any() else 0.0


def _mismatch(prefix: str, delta: np.ndarray) -> dict[str, float]:
    p50, p99 = np.percentile(delta, [50, 99])
    return {
        f"{prefix}/mean": float(delta.mean()),
        f"{prefix}/p50": float(p50),
        f"{prefix}/p99": float(p99),
        f"{prefix}/max": float(delta.max()),
    }


def group_metrics(groups: Sequence[Group], *, version: int, now: float) -> dict[str, float]:
    """Rewards, completion lengths, staleness (versions) and time in the queue (seconds) of the groups of a batch."""
    if not groups:
        return {}
    rewards = [group.rewards[trainable(group)] for group in groups]
    scored = np.concatenate(rewards)
    lengths = np.array([len(sample.tokens) for group in groups for sample in group.samples])
    cut = np.array([sample.finish_reason == "length" for group in groups for sample in group.samples])
    staleness = np.array([version - group.version for group in groups])
    spread, means = np.array([np.ptp(r) for r in rewards]), np.array([r.mean() for r in rewards])
    metrics = {
        "reward": float(scored.mean()),
        "reward_std": float(np.mean([r.std(ddof=1) for r in rewards])),
        "completions/mean_length": float(lengths.mean()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_frac": float(cut.mean()),
        "batch/samples": float(len(scored)),
        "batch/unscorable": float(len(lengths) - len(scored)),
        "groups/zero_variance_frac": float(np.mean(spread == 0)),
        "groups/zero_variance_above_frac": float(np.mean((means > scored.mean()) & (spread == 0))),
        "groups/zero_variance_below_frac": float(np.mean((means <= scored.mean()) & (spread == 0))),
        "sample/staleness_mean": float(staleness.mean()),
        "sample/staleness_max": float(staleness.max()),
        "sample/time_in_queue_s": float(np.mean([now - group.provenance.finished_at for group in groups])),
    }
    parts: dict[str, list[float]] = {}
    for group in groups:
        for sample in group.samples:
            for label, value in sample.reward_parts.items():
                if value is not None and np.isfinite(value):
                    parts.setdefault(label, []).append(value)
    return metrics | {f"rewards/{label}": float(np.mean(values)) for label, values in parts.items()}
