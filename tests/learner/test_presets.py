"""Every published recipe trains."""

import numpy as np
import pytest

from grpo_jax.algorithms.registry import PRESETS
from grpo_jax.learner.diagnostics import token_metrics
from grpo_jax.learner.engine import Engine
from tests.learner.tiny import algorithm_of, flat, make_trainer, ragged_groups, train


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_step_of_a_preset_changes_the_adapter_by_a_finite_loss(name):
    algorithm = (("preset", name),)
    engine = Engine(make_trainer(algorithm=algorithm))
    before = flat(engine.host_state().lora)
    trained = train(engine, ragged_groups(), algorithm)
    assert len(trained.losses) == algorithm_of(algorithm).updates_per_step
    assert all(trained.finite)
    assert np.isfinite(trained.losses).all()
    assert np.isfinite(list(token_metrics(trained.record, weighted=False).values())).all()
    after = flat(engine.host_state().lora)
    assert np.isfinite(after).all()
    assert np.abs(after - before).max() > 1e-4
