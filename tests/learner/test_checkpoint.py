import jax
import numpy as np
import pytest

from grpo_jax.learner.checkpoint import Checkpointer
from grpo_jax.storage.bucket import Bucket
from tests.learner.tiny import base_and_lora, make_step


@pytest.fixture(params=["directory", "memory"])
def run(request, tmp_path):
    return Bucket(str(tmp_path / "run") if request.param == "directory" else f"memory://{tmp_path.name}/run")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """What is broken here stays broken."""
    monkeypatch.setattr("grpo_jax.learner.checkpoint._LOOK_AGAIN_S", 0.0)


def states():
    """Two different states of the same shape, and their host copies."""
    step, (base, lora) = make_step(), base_and_lora()
    first = step.init(lora)
    host_first = jax.device_get(first)
    acc = step.zeros(first, np.float32(0))
    acc = acc.replace(grads=jax.tree.map(lambda g: g + 0.5, acc.grads))
    second, _ = step.apply(base, first, acc, np.float32(1e-2), np.arange(8, dtype=np.int32))
    return host_first, jax.device_get(second)


def test_the_newest_state_comes_back_bit_for_bit_with_its_meta(run):
    first, second = states()
    checkpointer = Checkpointer(run, keep=2)
    checkpointer.save(5, first, {"lineage": {"5": "a"}})
    checkpointer.save(10, second, {"lineage": {"5": "a", "10": "b"}})
    checkpointer.wait()
    state, meta = Checkpointer(run, keep=2).restore_newest(first)
    assert meta == {"step": 10, "lineage": {"5": "a", "10": "b"}}
    assert jax.tree.structure(state) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), second)


def test_only_the_newest_are_kept(run):
    first, _ = states()
    checkpointer = Checkpointer(run, keep=2)
    for step in (1, 2, 3, 4):
        checkpointer.save(step, first, {})
    checkpointer.wait()
    assert checkpointer.steps() == [3, 4]
    assert {key.split("/")[1] for key in run.list("checkpoints")} == {"000003", "000004"}


@pytest.mark.parametrize("damage", ["unmarked", "torn", "garbage"])
def test_what_is_not_whole_is_passed_over_for_the_one_before(run, damage):
    first, second = states()
    checkpointer = Checkpointer(run, keep=3)
    checkpointer.save(5, first, {})
    checkpointer.save(10, second, {})
    checkpointer.wait()
    if damage == "unmarked":  # killed before the manifest was written
        run.delete("checkpoints/000010/manifest.json")
    elif damage == "torn":
        key = next(key for key in run.list("checkpoints/000010") if "state/" in key and len(run.read(key)) > 100)
        run.replace(key, run.read(key)[:-7])
    else:
        run.replace("checkpoints/000010/manifest.json", b"{")
    state, meta = Checkpointer(run, keep=3).restore_newest(first)
    assert meta["step"] == 5
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), first)


def test_no_checkpoint_is_none(run):
    assert Checkpointer(run, keep=1).restore_newest(states()[0]) is None


def test_a_checkpoint_that_is_only_late_is_waited_for(run, monkeypatch):
    first, second = states()
    checkpointer = Checkpointer(run, keep=2)
    checkpointer.save(5, first, {})
    checkpointer.save(10, second, {})
    checkpointer.wait()
    key = next(key for key in run.list("checkpoints/000010") if "state/" in key and len(run.read(key)) > 100)
    whole = run.read(key)
    run.replace(key, whole[:-7])
    monkeypatch.setattr("grpo_jax.learner.checkpoint.time.sleep", lambda _: run.replace(key, whole))
    _, meta = Checkpointer(run, keep=2).restore_newest(first)
    assert meta["step"] == 10
