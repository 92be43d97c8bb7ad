"""What the terms beside the policy loss do, on groups of equal rewards, where nothing else has a gradient."""

import numpy as np

from grpo_jax.learner.diagnostics import token_metrics
from grpo_jax.learner.engine import Engine
from tests.learner.tiny import make_group, make_trainer, train


def metrics_of_steps(algorithm, *, count=6):
    rng = np.random.default_rng(4)
    groups = [make_group(rng, i, rewards=[1.0] * 4) for i in range(3)]
    engine = Engine(make_trainer(algorithm=algorithm))
    return [token_metrics(train(engine, groups, algorithm).record, weighted=False) for _ in range(count)]


def test_a_kl_to_the_base_pulls_the_adapter_towards_it():
    found = [m["kl_ref"] for m in metrics_of_steps((("kl_coef", 1.0), ("kl_estimator", "k2")))]
    assert found[-1] < 0.2 * found[0]


def test_an_entropy_bonus_raises_the_entropy():
    found = [m["entropy"] for m in metrics_of_steps((("entropy_coef", 1.0),))]
    assert found[-1] > found[0] + 0.3
