"""Loss and gradient of a batch are those of its samples, however they are laid out and computed."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.learner.packing import pack
from tests.learner.tiny import algorithm_of, base_and_lora, flat, make_step, ragged_groups, samples_of

# Sums over samples, masks of whole samples, KL and entropy: everything that could notice how tokens are laid out.
SEQUENCES = (
    ("loss", "gspo"),
    ("loss_args", (("clip_high", 0.1), ("clip_low", 0.1))),
    ("aggregation", "sequence_mean"),
    ("masks", (("geometric_mask", (("high", 1.2), ("low", 0.8))),)),
    ("kl_coef", 0.3),
    ("entropy_coef", 0.1),
)
TOKENS = (("loss", "dual_clip"), ("aggregation", "prompt_mean"), ("advantages", "grpo"))

LAYOUTS = [
    {"row_tokens": 64, "rows": 2, "share_prompt": True},
    {"row_tokens": 64, "rows": 2, "share_prompt": False},
    {"row_tokens": 24, "rows": 1, "share_prompt": True},  # groups are split
    {"row_tokens": 40, "rows": 5, "share_prompt": False},
    {"row_tokens": 40, "rows": 2, "shards": 2, "share_prompt": True},
]
COMPUTATIONS = [{"chunk": 7}, {"chunk": 1000}, {"remat": "dots"}, {"remat": "full"}]


def near_policy(samples, dtype):
    """The same samples with μ near π, each token's distance its own: ratios are not all clipped then."""
    step, (base, lora) = make_step(dtype), base_and_lora(dtype)
    logprobs = [[] for _ in samples]
    for batch in pack(samples, **LAYOUTS[0]):
        found = np.asarray(step.score(base, lora, step.arrays(batch))[0])
        for index, value in zip(batch.sample_SxN[batch.mask_SxN], found[batch.mask_SxN], strict=True):
            logprobs[index].append(value)
    return [
        replace(s, sampler_logprobs=np.array(logprobs[i]) + 0.3 * (s.sampler_logprobs + 4))
        for i, s in enumerate(samples)
    ]


def batch_of(seed, count, algorithm, dtype):
    return near_policy(samples_of(ragged_groups(seed, count), algorithm_of(algorithm)), dtype)


def sums(step, samples, dtype, **layout):
    """(loss, gradient) of a batch, the reference a little off the sampler."""
    base, lora = base_and_lora(dtype)
    acc = step.zeros(step.init(lora), np.float32(0))
    for batch in pack(samples, dtype=np.dtype(dtype), **layout):
        batch = replace(batch, reference_logprob_SxN=batch.sampler_logprob_SxN + 0.1)
        acc, _ = step.accumulate(base, lora, acc, step.arrays(batch))
    return float(acc.loss), flat(jax.device_get(acc.grads)).astype(np.float64)


def assert_same(found, expected, tolerance, terms):
    assert np.linalg.norm(expected[1]) > 1e-4
    assert np.linalg.norm(found[1] - expected[1]) <= tolerance * np.linalg.norm(expected[1])
    assert abs(found[0] - expected[0]) <= tolerance * terms


@pytest.mark.parametrize("algorithm", [TOKENS, SEQUENCES], ids=["tokens", "sequences"])
@settings(deadline=None, max_examples=4)
@given(st.integers(0, 2**16), st.integers(1, 5))
def test_float64_order_rows_splits_shards_and_micro_batches(algorithm, seed, count):
    with jax.enable_x64(True):
        step, samples = make_step("float64", algorithm), batch_of(seed, count, algorithm, "float64")
        shuffled = [samples[i] for i in np.random.default_rng(seed).permutation(len(samples))]
        terms = sum(s.token_weight * len(s.completion) * (1 + abs(s.advantage)) for s in samples)
        expected = sums(step, samples, "float64", **LAYOUTS[0])
        for layout in LAYOUTS:
            assert_same(sums(step, shuffled, "float64", **layout), expected, 1e-9, terms)


@pytest.mark.parametrize("how", COMPUTATIONS, ids=str)
def test_float64_chunks_of_the_head_and_remat(how):
    with jax.enable_x64(True):
        samples = batch_of(3, 4, SEQUENCES, "float64")
        terms = sum(s.token_weight * len(s.completion) * (1 + abs(s.advantage)) for s in samples)
        expected = sums(make_step("float64", SEQUENCES), samples, "float64", **LAYOUTS[0])
        found = sums(make_step("float64", SEQUENCES, **how), samples, "float64", **LAYOUTS[0])
        assert_same(found, expected, 1e-9, terms)


@pytest.mark.slow
def test_float32_layouts_and_computations():
    samples = batch_of(3, 4, TOKENS, "float32")
    terms = sum(s.token_weight * len(s.completion) * (1 + abs(s.advantage)) for s in samples)
    expected = sums(make_step("float32", TOKENS), samples, "float32", **LAYOUTS[0])
    for layout in LAYOUTS:
        assert_same(sums(make_step("float32", TOKENS), samples, "float32", **layout), expected, 1e-5, terms)
    for how in COMPUTATIONS:
        found = sums(make_step("float32", TOKENS, **how), samples, "float32", **LAYOUTS[0])
        assert_same(found, expected, 1e-5, terms)
