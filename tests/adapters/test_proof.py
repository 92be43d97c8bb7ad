"""The proof accepts rounding and nothing else."""

import numpy as np
import pytest

from grpo_jax.adapters.proof import PEAK, REPRODUCED, ROUNDING, NotProved, calibrate, check

DTYPES = sorted(ROUNDING)


def _canary(seed: int, size: int = 23) -> np.ndarray:
    return -np.random.default_rng(seed).exponential(5.0, size)


def _rounded(values: np.ndarray, dtype: str, seed: int = 9) -> np.ndarray:
    """As another sound implementation would give them: noise of a third of the dtype's rounding."""
    return values + np.random.default_rng(seed).normal(scale=ROUNDING[dtype] / 3, size=values.shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sound_replica_is_accepted_and_held_to_its_own_rounding(dtype):
    base, probe, version = _canary(0), _canary(1), _canary(2)
    bound = calibrate(probe, _rounded(probe, dtype), base, dtype)
    assert ROUNDING[dtype] <= bound < 3 * ROUNDING[dtype]
    assert check(version, _rounded(version, dtype), bound) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_noisier_replica_gets_a_wider_bound(dtype):
    base, probe = _canary(0), _canary(1)
    noise = 0.9 * REPRODUCED[dtype] * np.mean(np.abs(probe - base))
    assert calibrate(probe, probe + noise, base, dtype) == pytest.approx(max(ROUNDING[dtype], 3 * noise))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_replica_that_serves_the_base_is_refused(dtype):
    base, probe = _canary(0), _canary(1)
    with pytest.raises(NotProved, match="serves the base"):
        calibrate(probe, _rounded(base, dtype), base, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_function_than_the_probe_is_refused(dtype):
    base, probe = _canary(0), _canary(1)
    with pytest.raises(NotProved, match="does not reproduce the probe"):
        calibrate(probe, probe + 1.1 * REPRODUCED[dtype] * (base - probe), base, dtype)


def test_a_probe_that_changes_too_little_is_refused():
    base = _canary(0)
    with pytest.raises(NotProved, match="proves nothing"):
        calibrate(base + 1e-3, base + 1e-3, base, "float32")


@pytest.mark.parametrize(
    ("measured", "match"),
    [
        (np.full(23, np.nan), "finite"),
        (np.full(23, -np.inf), "finite"),
        (_canary(1)[:-1], "are 22, not 23"),
        ([], "are 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(measured, match):
    base, probe = _canary(0), _canary(1)
    with pytest.raises(NotProved, match=match):
        calibrate(probe, measured, base, "float32")
    assert match in str(check(probe, measured, 0.1))


def test_one_large_difference_is_refused_although_the_mean_is_fine():
    reference, bound = _canary(3, 31), 1e-2
    measured = reference.copy()
    measured[7] += 1.01 * PEAK * bound
    assert np.mean(np.abs(measured - reference)) < bound
    assert "by 0.101 at most" in str(check(reference, measured, bound))


def test_a_constant_shift_is_refused():
    reference = _canary(3)
    assert check(reference, reference - 0.9e-3, 1e-3) is None
    assert "differ" in str(check(reference, reference - 1.1e-3, 1e-3))
