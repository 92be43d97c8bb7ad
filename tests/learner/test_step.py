"""The gradient of a batch is that of its samples, however they are laid out."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from grpo_jax.config.schema import Optimizer
from grpo_jax.learner.optimizer import learning_rate
from grpo_jax.learner.packing import pack
from tests.learner.tiny import (
    MODEL,
    base_and_lora,
    flat,
    gradient,
    make_group,
    make_step,
    ragged_groups,
    samples_of,
)

RATE = np.float32(1e-2)


def blank_sums(step, lora):
    return step.zeros(step.init(lora), np.float32(0))


def test_the_gradient_is_the_derivative_of_the_loss():
    with jax.enable_x64(True):
        step, (base, lora) = make_step("float64"), base_and_lora("float64")
        # Near the sampler, so that the clipped surrogate is smooth where it is differentiated.
        samples = samples_of(ragged_groups(count=2))
        packed = pack(samples, row_tokens=64, rows=2, share_prompt=True, dtype=np.float64)
        own = []
        for batch in packed:
            _, out = step.accumulate(base, lora, blank_sums(step, lora), step.arrays(batch))
            own.append(replace(batch, sampler_logprob_SxN=np.asarray(out.logprob) + 0.01))

        def total(adapter):
            acc = blank_sums(step, adapter)
            for batch in own:
                acc, _ = step.accumulate(base, adapter, acc, step.arrays(batch))
            return float(acc.loss), acc.grads

        _, grads = total(lora)
        keys = iter(jax.random.split(jax.random.key(3), 64))
        direction = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape, x.dtype), lora)
        eps = 1e-6
        up, down = (total(jax.tree.map(lambda x, d, e=e: x + e * d, lora, direction))[0] for e in (eps, -eps))
        slope = sum(
            float((g * d).sum()) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True)
        )
        assert (up - down) / (2 * eps) == pytest.approx(slope, rel=1e-5)


def test_an_empty_micro_batch_changes_nothing():
    step, (base, lora) = make_step(), base_and_lora()
    samples = samples_of(ragged_groups())
    packed = pack(samples, row_tokens=64, rows=2, share_prompt=True)[0]
    blank = {
        name: np.zeros_like(getattr(packed, name))
        for name in ("tokens_BxT", "prompt_ids_BxT", "branch_ids_BxT", "mask_SxN")
    }
    empty = replace(packed, **blank)
    loss, grads = gradient(step, base, lora, samples)
    with_empty, same = gradient(step, base, lora, samples, extra=[empty])
    assert with_empty == loss
    np.testing.assert_array_equal(flat(same), flat(grads))


def test_unscorable_broken_and_empty_samples_cost_only_themselves():
    step, (base, lora) = make_step(), base_and_lora()
    rng = np.random.default_rng(5)
    good, other = make_group(rng, 0), make_group(rng, 1)
    nan_logprob = replace(good.samples[0], logprobs=np.full_like(good.samples[0].logprobs, np.nan))
    unscorable = replace(good.samples[1], reward=None)
    spoiled = replace(good, samples=(*good.samples, nan_logprob, unscorable))
    dead = make_group(rng, 2, rewards=[None] * 4)
    loss, grads = gradient(step, base, lora, samples_of([good, other]))
    for groups in ([spoiled, other], [good, other, dead], [good, dead, other]):
        got, same = gradient(step, base, lora, samples_of(groups))
        assert got == pytest.approx(loss, abs=1e-6)
        np.testing.assert_allclose(flat(same), flat(grads), atol=1e-5 * np.linalg.norm(flat(grads)))

    # An empty completion has no token to train, but its reward is part of the group's mean.
    empty = replace(good.samples[2], tokens=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), reward=100.0)
    with_empty = samples_of([replace(good, samples=(*good.samples, empty)), other])
    assert len(with_empty) == len(samples_of([good, other]))
    assert with_empty[0].advantage < samples_of([good, other])[0].advantage - 5
    assert np.isfinite(flat(gradient(step, base, lora, with_empty)[1])).all()


def test_samples_without_an_advantage_can_be_left_out():
    step, (base, lora) = make_step(), base_and_lora()
    rng = np.random.default_rng(6)
    groups = [make_group(rng, 0), make_group(rng, 1, rewards=[1.0] * 4), make_group(rng, 2)]
    every = samples_of(groups)
    fewer = samples_of(groups, skip_zero_advantage=True)
    assert len(every) - len(fewer) == 4
    loss, grads = gradient(step, base, lora, every)
    same_loss, same = gradient(step, base, lora, fewer)
    assert same_loss == pytest.approx(loss, abs=1e-6)
    np.testing.assert_allclose(flat(same), flat(grads), atol=1e-5 * np.linalg.norm(flat(grads)))


def test_a_batch_without_a_trainable_sample_has_a_zero_gradient():
    step, (base, lora) = make_step(), base_and_lora()
    loss, grads = gradient(step, base, lora, samples_of([make_group(np.random.default_rng(0), rewards=[None] * 4)]))
    assert loss == 0
    assert not flat(grads).any()


def test_a_gradient_that_is_not_finite_leaves_the_state_alone():
    step, (base, lora) = make_step(), base_and_lora()
    state = step.init(lora)
    before = jax.device_get(state)
    acc = blank_sums(step, lora)
    acc = acc.replace(grads=jax.tree.map(lambda g: g.at[0].set(np.nan), acc.grads))
    state, applied = step.apply(base, state, acc, RATE, np.arange(8, dtype=np.int32))
    assert not bool(applied.finite)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)


def test_the_published_copy_outlives_the_donated_state_and_is_rounded_to_the_compute_dtype():
    step, (base, lora) = make_step("bfloat16"), base_and_lora()
    base = jax.tree.map(lambda x: x.astype("bfloat16"), base)
    tokens = np.arange(8, dtype=np.int32)
    state, applied = step.apply(base, step.init(lora), blank_sums(step, lora), RATE, tokens)
    canary = np.asarray(step.canary(base, applied.publish, tokens))
    state, _ = step.apply(base, state, blank_sums(step, lora), RATE, tokens)
    for leaf in jax.tree.leaves(applied.publish):
        array = np.asarray(leaf)  # raises if the buffer was donated with the state
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, np.asarray(leaf.astype("bfloat16").astype("float32")))
    np.testing.assert_allclose(applied.canary_logprobs, canary, atol=0.05)


def test_warm_up_does_not_begin_with_a_step_that_changes_nothing():
    rate = learning_rate(Optimizer(learning_rate=1e-2, warmup_steps=3), 10)
    step = make_step()
    base, lora = base_and_lora()
    acc = blank_sums(step, lora)
    acc = acc.replace(grads=jax.tree.map(lambda g: g + 1.0, acc.grads))
    before = flat(lora)
    tokens = np.arange(MODEL.vocab_size)[:8].astype(np.int32)
    state, _ = step.apply(base, step.init(lora), acc, np.float32(rate(0)), tokens)
    assert np.abs(flat(state.lora) - before).max() > 1e-4
