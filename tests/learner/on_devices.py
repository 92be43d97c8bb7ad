"""Run by `test_devices`, in a process of its own with eight forced host devices (or two processes with two each).

Trains the same groups on the mesh of the command line, and prints what came out as JSON behind the word RESULTS.
"""

import json
import sys

import jax
import numpy as np

jax.config.update("jax_enable_x64", True)

from grpo_jax.learner.engine import Engine  # noqa: E402
from grpo_jax.learner.multihost import Leader, connect, follow, make_engine  # noqa: E402
from tests.learner.tiny import flat, make_trainer, ragged_groups, train  # noqa: E402

# Everything that a step may do on the device: π_old, the reference, several updates.
ALGORITHM = (
    ("anchor", "recomputed"),
    ("loss", "ppo_clip"),
    ("weight", "token_tis"),
    ("kl_coef", 0.1),
    ("entropy_coef", 0.01),
    ("minibatches", 2),
    ("num_iterations", 2),
)


def summary(engine: Engine) -> dict[str, list[float]]:
    """Gradient-sensitive numbers only: Adam turns a tiny difference of a tiny gradient into a large one."""
    trained = train(engine, ragged_groups(), ALGORITHM, rate=1e-3)
    record, host = trained.record, engine.host_state()
    order = np.argsort(record.logprob_N)
    return {
        "loss": trained.losses,
        "norm": trained.norms,
        "logprob": record.logprob_N[order].tolist(),
        "entropy": record.entropy_N[order].tolist(),
        "lora": flat(host.lora).tolist(),
        "moments": flat(host.opt_state).tolist(),
        "canary": np.asarray(trained.applied.canary_logprobs).tolist(),
        "published": flat(jax.device_get(engine.published())).tolist(),
    }


def main() -> None:
    sizes = [json.loads(text) for text in sys.argv[1:]]
    if connect() > 0:
        sys.exit(follow(Engine(make_trainer(sizes[0], "float64", ALGORITHM))))
    found = []
    for size in sizes:
        engine = make_engine(make_trainer(size, "float64", ALGORITHM))
        assert isinstance(engine, Leader) == (jax.process_count() > 1)
        found.append(summary(engine))
        if isinstance(engine, Leader):
            engine.dismiss(0)
    print("RESULTS", json.dumps(found))


if __name__ == "__main__":
    main()
