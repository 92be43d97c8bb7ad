"""The formulas of `grpo_jax.algorithms`, one token or one sample at a time in float64 Python.

Only the batch type is shared with the code under test. A policy loss is a function of one `Token` and returns its
`Outcome`; the slope is written out by hand. With proximal and anchor log-probs held fixed, the term of a token depends
on no other token's log π (GSPO in its token form included), so one slope per token is the whole gradient.
"""

import math
from typing import NamedTuple

import numpy as np

from grpo_jax.algorithms.tokens import TokenArrays

LAYOUTS = ("one token a sample", "one sample", "interleaved")


class Token(NamedTuple):
    logprob: float
    sampler: float
    anchor: float
    proximal: float
    advantage: float
    staleness: float
    update: float
    sample_mean: float  # the mean of log π − log anchor over the trained tokens of the sample


class Outcome(NamedTuple):
    term: float
    slope: float  # d term / d log π
    clipped_low: bool = False
    clipped_high: bool = False


def random_tokens(seed, layout, spread):
    """32 token slots, some masked, whose log-probs differ by about `spread`. Advantages are of both signs or 0."""
    rng, n = np.random.default_rng(seed), 32
    mask = rng.random(n) < 0.8
    count = mask.sum()
    sample = np.full(n, -1, np.int32)
    if layout == "one token a sample":
        sample[mask] = rng.permutation(count)
    else:
        sample[mask] = 0 if layout == "one sample" else rng.permutation(np.arange(count) % 5)
    middle = rng.uniform(-3, 0, n)
    logprob, sampler, recomputed = -np.abs(middle + spread * rng.normal(size=(3, n)))
    advantage = rng.normal(size=n) * rng.choice([0, 1, 1, 1], n)
    staleness = rng.integers(0, 4, n).astype(float)
    return TokenArrays(logprob, sampler, recomputed, recomputed, advantage, mask, sample, staleness, np.float64(2))


def policy_loss(rule, tokens, **params):
    """`rule` at every trained token: arrays (term, slope, clipped_low, clipped_high), zeros where masked."""
    outcomes = [Outcome(0.0, 0.0)] * len(tokens.mask_N)
    for i in trained(tokens):
        deltas = [tokens.logprob_N[j] - tokens.anchor_logprob_N[j] for j in same_sample(tokens, i)]
        token = Token(
            logprob=tokens.logprob_N[i],
            sampler=tokens.sampler_logprob_N[i],
            anchor=tokens.anchor_logprob_N[i],
            proximal=tokens.proximal_logprob_N[i],
            advantage=tokens.advantage_N[i],
            staleness=tokens.staleness_N[i],
            update=tokens.update,
            sample_mean=sum(deltas) / len(deltas),
        )
        outcomes[i] = rule(token, **params)
    return tuple(np.array(column) for column in zip(*outcomes, strict=True))


def off_policy_weight(rule, tokens, **params):
    """`rule(log-ratio of the token, log-ratios of its sample)` at every trained token, 0 where masked."""
    weight = np.zeros(len(tokens.mask_N))
    for i in trained(tokens):
        deltas = {j: tokens.proximal_logprob_N[j] - tokens.sampler_logprob_N[j] for j in same_sample(tokens, i)}
        weight[i] = rule(deltas[i], list(deltas.values()), **params)
    return weight


def trained(tokens):
    return [i for i in range(len(tokens.mask_N)) if tokens.mask_N[i]]


def same_sample(tokens, i):
    return [j for j in trained(tokens) if tokens.sample_N[j] == tokens.sample_N[i]]


def ratio_and_slope(delta):
    """exp of a log-ratio clamped to ±20, and its derivative: 0 outside."""
    ratio = math.exp(min(max(delta, -20.0), 20.0))
    return ratio, ratio if -20 < delta < 20 else 0.0


def ratio_of(delta):
    return ratio_and_slope(delta)[0]


# Policy losses


def clipped_surrogate(delta, advantage, clip_low, clip_high, cap=math.inf, weight=1.0):
    """weight · −min(r A, clip(r) A), and for A < 0 no larger than weight · −cap A."""
    ratio, slope = ratio_and_slope(delta)
    low = advantage < 0 and ratio < 1 - clip_low
    high = (advantage > 0 and ratio > 1 + clip_high) or (advantage < 0 and ratio > cap)
    if low:
        used, slope = 1 - clip_low, 0.0
    elif high:
        used, slope = (1 + clip_high if advantage > 0 else cap), 0.0
    else:
        used = ratio
    return Outcome(-weight * used * advantage, -weight * slope * advantage, low, high)


def ppo_clip(x, clip_low, clip_high):
    return clipped_surrogate(x.logprob - x.anchor, x.advantage, clip_low, clip_high)


def dual_clip(x, clip_low, clip_high, cap):
    return clipped_surrogate(x.logprob - x.anchor, x.advantage, clip_low, clip_high, cap)


def gspo(x, clip_low, clip_high):
    return clipped_surrogate(x.sample_mean, x.advantage, clip_low, clip_high)


def decoupled_ppo(x, clip_low, clip_high, cap):
    weight = min(ratio_of(x.proximal - x.sampler), cap)
    return clipped_surrogate(x.logprob - x.proximal, x.advantage, clip_low, clip_high, weight=weight)


def a3po(x, clip_low, clip_high, cap):
    alpha = 0.0 if x.staleness == 0 else x.staleness / (x.staleness + x.update)
    between = (1 - alpha) * x.sampler + alpha * x.logprob
    return decoupled_ppo(x._replace(proximal=between), clip_low, clip_high, cap)


def cispo(x, low, high):
    ratio = ratio_of(x.logprob - x.anchor)
    weight = min(max(ratio, low), high)
    return Outcome(-weight * x.advantage * x.logprob, -weight * x.advantage, ratio < low, ratio > high)


def reinforce_clip(x, clip_high):
    ratio = ratio_of(x.logprob - x.anchor)
    weight = min(ratio, 1 + clip_high)
    return Outcome(-weight * x.advantage * x.logprob, -weight * x.advantage, False, ratio > 1 + clip_high)


def importance_sampling(x):
    weight = ratio_of(x.logprob - x.anchor)
    return Outcome(-weight * x.advantage * x.logprob, -weight * x.advantage)


def sapo(x, tau_positive, tau_negative):
    ratio, slope = ratio_and_slope(x.logprob - x.anchor)
    tau = tau_positive if x.advantage > 0 else tau_negative
    z = tau * (ratio - 1)
    gate = 1 / (1 + math.exp(-z))
    shut = math.exp(-z) / (1 + math.exp(-z))  # 1 − gate, without cancellation
    return Outcome(-4 / tau * gate * x.advantage, -4 * gate * shut * slope * x.advantage)


def dppo_tv(x, delta, tau):
    moved = math.exp(x.logprob) - math.exp(x.sampler)
    high = x.advantage > 0 and moved > delta
    low = x.advantage < 0 and moved < -delta
    keep = 0.0 if low or high else 1.0
    distance = x.logprob - x.anchor
    ratio, slope = ratio_and_slope(distance)
    term = -keep * x.advantage * ratio + tau * distance**2
    return Outcome(term, -keep * x.advantage * slope + 2 * tau * distance, low, high)


# Off-policy weights and masks


def token_tis(delta, deltas, cap):
    return min(ratio_of(delta), cap)


def token_mis(delta, deltas, low, high):
    return ratio_of(delta) if low <= ratio_of(delta) <= high else 0.0


def sequence_tis(delta, deltas, cap):
    return min(ratio_of(sum(deltas)), cap)


def sequence_mis(delta, deltas, cap):
    return ratio_of(sum(deltas)) if ratio_of(sum(deltas)) <= cap else 0.0


def geometric_mask(delta, deltas, low, high):
    return 1.0 if low <= ratio_of(sum(deltas) / len(deltas)) <= high else 0.0


def outlier_veto(delta, deltas, low, high):
    return 1.0 if all(low <= ratio_of(d) <= high for d in deltas) else 0.0
