"""An agent proves sound policies and quarantines every kind of unsound one, with a reason that names the cause."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from grpo_jax.storage import layout
from tests.generator.injections import KEY, edited
from tests.generator.served import Served
from tests.generator.settings import LORA


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("proof")
    served = Served(folder, tiny_dir)
    yield served
    served.agent.end()


def test_probe_v0_and_v1_are_proved_and_the_probe_leaves(served):
    served.agent.proved(served.v0)
    v1 = served.next(served.tree())
    record = served.agent.proved(served.v0, v1)
    assert record["state"] == "ready"
    assert record["quarantined"] == {}
    assert record["error"] is None
    assert served.learner.probe not in record["loaded"]
    assert record["base_digest"] == served.learner.digest


EDITS = {
    "layers that do not exist": (
        lambda t: {k.replace("layers.1.", "layers.7."): v for k, v in t.items()},
        "has the key",
    ),
    "a missing factor": (lambda t: {k: v for k, v in t.items() if k != KEY}, "lacks the key"),
    "another dtype": (lambda t: {**t, KEY: t[KEY].astype(np.float16)}, "is F16"),
    "a factor that is not a number": (lambda t: {**t, KEY: t[KEY] * np.nan}, "finite"),
}


@pytest.mark.parametrize("fault", EDITS)
def test_weights_that_are_not_the_learners_are_quarantined(served, fault):
    edit, reason = EDITS[fault]
    tree = served.tree()
    name = served.next(tree, files=edited(served.learner.files(tree), edit))
    assert reason in served.agent.quarantined(name)
    assert name not in served.agent.proved(served.v0)["loaded"]


def test_another_rank_is_quarantined(served):
    tree = served.tree()
    wide = jax.tree.map(lambda x: np.concatenate([x, x], axis=int(np.argmax(np.equal(x.shape, LORA.rank)))), tree)
    name = served.next(tree, files=served.learner.files(wide, rank=2 * LORA.rank))
    assert "has r 8, and the probe's has 4" in served.agent.quarantined(name)


def test_a_corrupt_file_is_quarantined(served):
    name = served.next(served.tree(), corrupt=layout.ADAPTER_WEIGHTS)
    assert "does not match its manifest" in served.agent.quarantined(name)


def test_files_that_are_no_tensors_are_quarantined(served):
    tree = served.tree()
    name = served.next(tree, files={**served.learner.files(tree), layout.ADAPTER_WEIGHTS: b"nothing of the kind"})
    assert "cannot be read" in served.agent.quarantined(name)


def test_what_was_not_there_yet_is_proved_once_it_is(served):
    name = served.next(served.tree(), without_manifest=True)
    assert "does not exist" in served.agent.quarantined(name)
    served.learner.finish()
    assert name not in served.agent.proved(name)["quarantined"]


def test_another_base_refuses_everything_until_the_run_has_ours(learner, start_agent):
    right, learner.digest = learner.digest, "f" * 64
    v0 = learner.start()
    agent = start_agent()
    reason = agent.quarantined(v0)
    assert reason.startswith("the base model here has the digest " + right[:12])
    assert agent.heartbeat()["error"] == reason
    learner.digest = right
    v0 = learner.start()
    agent.proved(v0)


def test_a_replica_that_does_not_reproduce_the_probe_serves_nothing(learner, start_agent):
    learner.base = jax.tree.map(lambda x: x * 1.1, learner.base)  # the learner's function is another one
    v0 = learner.start()
    agent = start_agent()
    assert "does not reproduce the probe" in agent.quarantined(learner.probe)
    assert "does not reproduce the probe" in agent.quarantined(v0)
    assert agent.heartbeat()["proved"] == []
    assert agent.heartbeat()["loaded"] == []
