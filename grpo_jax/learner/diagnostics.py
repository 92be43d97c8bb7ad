"""Metrics of a batch, on the host: of its groups, and of every trained token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_jax.config.schema import Algorithm
from grpo_jax.learner.batch import trainable
from grpo_jax.rollouts.sample import Group


@dataclass(frozen=True)
class TokenRecord:
    """N trained tokens of a batch, in any order. All float64 but `step_lag` (int: learner step − the policy's step)."""

    logprob_N: np.ndarray
    sampler_N: np.ndarray
    advantage_N: np.ndarray
    entropy_N: np.ndarray
    step_lag_N: np.ndarray


def token_metrics(record: TokenRecord, algorithm: Algorithm) -> dict[str, float]:
    """Ratio, KL to the sampler (k3), clip fractions, ESS, and |log π − log μ| in all and by step lag."""
    if not record.logprob_N.size:
        return {}
    delta = record.logprob_N - record.sampler_N
    ratio = np.exp(np.clip(delta, -20, 20))
    up, down = record.advantage_N > 0, record.advantage_N < 0
    metrics = {
        "ratio": float(ratio.mean()),
        "kl": float(np.mean(1 / ratio - 1 + np.log(ratio))),
        "entropy": float(record.entropy_N.mean()),
        "clip_ratio/low": float(np.mean(down & (ratio < 1 - algorithm.clip_low))),
        "clip_ratio/high": float(np.mean(up & (ratio > 1 + algorithm.clip_high))),
        "clip_ratio/dual": float(np.mean(down & (ratio > algorithm.dual_clip))),
        "ess": float(ratio.sum() ** 2 / (ratio**2).sum() / ratio.size),
    }
    metrics.update(_mismatch("mismatch", np.abs(delta)))
    for lag in np.unique(record.step_lag_N):
        metrics.update(_mismatch(f"mismatch/lag{lag}", np.abs(delta[record.step_lag_N == lag])))
    return metrics


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
    rewards = [group.rewards[trainable(group)] for group in groups]
    scored = np.concatenate(rewards)
    lengths = np.array([len(sample.tokens) for group in groups for sample in group.samples])
    cut = np.array([sample.finish_reason == "length" for group in groups for sample in group.samples])
    staleness = np.array([version - group.version for group in groups])
    spread = np.array([r.std() for r in rewards])
    metrics = {
        "reward": float(scored.mean()),
        "reward_std": float(np.mean([r.std(ddof=1) for r in rewards])),
        "completions/mean_length": float(lengths.mean()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_frac": float(cut.mean()),
        "batch/samples": float(len(scored)),
        "batch/unscorable": float(len(lengths) - len(scored)),
        "groups/zero_variance_frac": float(np.mean(spread == 0)),
        "groups/zero_variance_above_frac": float(np.mean([r.mean() > scored.mean() for r in rewards] & (spread == 0))),
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
