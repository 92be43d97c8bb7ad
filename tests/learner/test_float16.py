"""Dynamic loss scaling: a float16 step is a float32 step with coarser numbers."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from grpo_jax.learner.packing import pack
from tests.learner.tiny import base_and_lora, flat, make_step, ragged_groups, samples_of

RATE, CANARY = np.float32(1e-2), np.arange(8, dtype=np.int32)


def batches_of(factor=1.0):
    samples = [replace(s, token_weight=factor * s.token_weight) for s in samples_of(ragged_groups())]
    return pack(samples, row_tokens=64, rows=2, share_prompt=True)


def accumulated(dtype, *, factor=1.0, scale=None, state=None):
    """(state, sums over the batch), weights times a factor and the loss times a scale."""
    step, (base, lora) = make_step(dtype), base_and_lora()
    base = jax.tree.map(lambda x: x.astype(dtype), base)
    state = state or step.init(lora)
    if scale is not None:
        state = state.replace(loss_scale=np.float32(scale))
    acc = step.zeros(state, np.float32(0))
    for batch in batches_of(factor):
        acc, _ = step.accumulate(base, lora, acc, step.arrays(batch))
    return state, acc


def gradient_of(*args, **options):
    return flat(jax.device_get(accumulated(*args, **options)[1].grads)).astype(np.float64)


def error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def applied(state, acc, dtype="float16"):
    """(state before, state after, what else the update left), on the host."""
    base = jax.tree.map(lambda x: x.astype(dtype), base_and_lora()[0])
    before = jax.device_get(state)
    after, rest = make_step(dtype).apply(base, state, acc, RATE, CANARY)
    return before, jax.device_get(after), rest


def nearly(since_scaled, scale=2.0**15):
    step = make_step("float16")
    state = step.init(base_and_lora()[1])
    return state.replace(since_scaled=np.int32(since_scaled), loss_scale=np.float32(scale))


def finite_sums(state):
    acc = make_step("float16").zeros(state, np.float32(0))
    return acc.replace(grads=jax.tree.map(lambda g: g + 1e-3, acc.grads))


def broken_sums(state):
    acc = finite_sums(state)
    return acc.replace(grads=jax.tree.map(lambda g: g.at[0].set(np.inf), acc.grads))


def test_the_gradient_is_near_that_of_float32():
    assert error(gradient_of("float16"), gradient_of("float32")) < 3e-2


def test_the_loss_scale_does_not_change_the_gradient():
    assert error(gradient_of("float16", scale=2.0**8), gradient_of("float16", scale=2.0**12)) < 2e-3


def test_the_scale_keeps_gradients_that_float16_alone_would_lose():
    exact = 1e-4 * gradient_of("float16")
    assert error(gradient_of("float16", factor=1e-4), exact) < 1e-2
    assert error(gradient_of("float16", factor=1e-4, scale=1.0), exact) > 0.5


def test_an_overflow_halves_the_scale_and_leaves_adapter_and_moments_alone():
    before, after, rest = applied(*accumulated("float16", factor=1e4, scale=2.0**24))
    assert not bool(rest.finite)
    assert (after.loss_scale, after.since_scaled, after.updates) == (2.0**23, 0, 0)
    jax.tree.map(np.testing.assert_array_equal, after.lora, before.lora)
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, before.opt_state)
    # The same batch trains once the scale has come down.
    before, after, rest = applied(*accumulated("float16", factor=1e4, scale=1.0))
    assert bool(rest.finite)
    assert np.abs(flat(after.lora) - flat(before.lora)).max() > 1e-3


@pytest.mark.parametrize(
    ("since", "scale", "expected"),
    [
        (0, 2.0**15, (2.0**15, 1)),
        (198, 2.0**15, (2.0**15, 199)),
        (199, 2.0**15, (2.0**16, 0)),
        (199, 2.0**24, (2.0**24, 0)),  # as large as it gets
    ],
)
def test_the_scale_doubles_after_two_hundred_finite_updates(since, scale, expected):
    state = nearly(since, scale)
    _, after, rest = applied(state, finite_sums(state))
    assert bool(rest.finite)
    assert (float(after.loss_scale), int(after.since_scaled)) == expected
    assert after.updates == 1


@pytest.mark.parametrize(("scale", "expected"), [(2.0**15, 2.0**14), (1.0, 1.0)])
def test_an_overflow_starts_the_count_anew_and_never_scales_below_one(scale, expected):
    state = nearly(199, scale)
    _, after, _ = applied(state, broken_sums(state))
    assert (float(after.loss_scale), int(after.since_scaled)) == (expected, 0)


def test_wider_dtypes_are_not_scaled():
    step = make_step("float32")
    state = step.init(base_and_lora()[1]).replace(since_scaled=np.int32(199))
    _, after, _ = applied(state, finite_sums(state), "float32")
    assert (after.loss_scale, after.since_scaled) == (1.0, 199)
