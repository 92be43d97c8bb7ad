import resource

import jax
import numpy as np
import pytest

from grpo_jax.learner.checkpoint import Checkpointer
from grpo_jax.storage.bucket import Bucket, BucketError
from tests.learner.tiny import base_and_lora, make_step


@pytest.fixture(params=["directory", "memory"])
def run(request, tmp_path):
    return Bucket(str(tmp_path / "run") if request.param == "directory" else f"memory://{tmp_path.name}/run")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """What is broken here stays broken."""
    monkeypatch.setattr("grpo_jax.learner.checkpoint._LOOK_AGAIN_S", 0.0)


def manifest(run, step):
    return next(key for key in run.list(f"checkpoints/{step:06d}") if "/manifest." in key)


def large_file(run, step):
    found = [key for key in run.list(f"checkpoints/{step:06d}") if "/manifest." not in key]
    return next(key for key in found if len(run.read(key)) > 100)


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


@pytest.mark.parametrize("damage", ["unmarked", "torn", b"{", b"[]", b'{"files":{"../x":{"size":1,"sha256":"y"}}}'])
def test_what_is_not_whole_is_passed_over_for_the_one_before(run, damage):
    first, second = states()
    checkpointer = Checkpointer(run, keep=3)
    checkpointer.save(5, first, {})
    checkpointer.save(10, second, {})
    checkpointer.wait()
    if damage == "unmarked":  # killed before the manifest was written
        run.delete(manifest(run, 10))
    elif damage == "torn":
        key = large_file(run, 10)
        run.replace(key, run.read(key)[:-7])
    else:
        run.replace(manifest(run, 10), damage)
    state, meta = Checkpointer(run, keep=3).restore_newest(first)
    assert meta["step"] == 5
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), first)


def test_a_disk_that_takes_no_more_is_trouble_that_passes(tmp_path):
    """TensorStore has a ValueError for it. The save after it, with room again, is whole."""
    first, second = states()
    checkpointer = Checkpointer(Bucket(f"memory://{tmp_path.name}/full"), keep=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        checkpointer.save(5, first, {})
        with pytest.raises(OSError, match=r"writing it to .* failed"):
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpointer.save(10, second, {})
    checkpointer.wait()
    assert checkpointer.steps() == [10]


def test_no_checkpoint_is_none(run):
    assert Checkpointer(run, keep=1).restore_newest(states()[0]) is None


def test_a_checkpoint_that_is_only_late_is_waited_for(run, monkeypatch):
    first, second = states()
    checkpointer = Checkpointer(run, keep=2)
    checkpointer.save(5, first, {})
    checkpointer.save(10, second, {})
    checkpointer.wait()
    key = large_file(run, 10)
    whole = run.read(key)
    run.replace(key, whole[:-7])
    monkeypatch.setattr("grpo_jax.learner.checkpoint.time.sleep", lambda _: run.replace(key, whole))
    _, meta = Checkpointer(run, keep=2).restore_newest(first)
    assert meta["step"] == 10


def test_the_first_of_every_so_many_steps_stays_too(run):
    first, _ = states()
    checkpointer = Checkpointer(run, keep=1, keep_every=10)
    for step in (4, 8, 12, 16, 20, 24, 32, 36):  # 10 and 30 came while another one was being written
        checkpointer.save(step, first, {})
    checkpointer.wait()
    assert checkpointer.steps() == checkpointer.kept == [12, 20, 32, 36]
    again = Checkpointer(run, keep=1, keep_every=10)
    again.restore_newest(first)
    again.save(40, first, {})
    again.wait()
    assert again.steps() == [12, 20, 32, 40]


def test_a_save_that_was_stopped_half_way_and_goes_on_later_breaks_no_other_of_the_same_step(run):
    first, second = states()
    old, new = Checkpointer(run, keep=2, incarnation=1), Checkpointer(run, keep=2, incarnation=2)

    def meanwhile():  # all files of the old one are there, and its manifest is not
        new.save(5, second, {"by": 2})
        new.wait()

    old.save(5, first, {"by": 1}, meanwhile)
    old.wait()
    state, meta = Checkpointer(run, keep=2).restore_newest(first)
    assert meta == {"step": 5, "by": 2}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), second)


def test_a_checkpoint_that_does_not_count_is_passed_over_and_deleted_in_time(run):
    first, second = states()
    good = Checkpointer(run, keep=2, incarnation=2)
    good.save(5, first, {})
    good.wait()
    zombie = Checkpointer(run, keep=2, incarnation=1)
    zombie.save(8, second, {})
    zombie.wait()
    checkpointer = Checkpointer(run, keep=2, incarnation=3)
    _, meta = checkpointer.restore_newest(first, lambda step, incarnation: incarnation >= 2)
    assert meta["step"] == 5
    assert checkpointer.kept == [5]
    checkpointer.save(10, first, {})
    checkpointer.wait()
    assert checkpointer.steps() == [5, 10]


def test_what_has_to_be_there_first_is_there_before_the_commit(run):
    first, _ = states()
    checkpointer, seen = Checkpointer(run, keep=2), []
    checkpointer.save(5, first, lambda: {"seen": list(seen)}, lambda: seen.append(checkpointer.steps()))
    checkpointer.wait()
    _, meta = checkpointer.restore_newest(first)
    assert meta == {"step": 5, "seen": [[]]}


def test_a_bucket_that_fails_is_no_reason_to_go_back_further(run, monkeypatch):
    first, _ = states()
    checkpointer = Checkpointer(run, keep=2)
    for step in (5, 10):
        checkpointer.save(step, first, {})
    checkpointer.wait()
    read = Bucket.read

    def fail(self, key, max_bytes=None, *, size=0):
        if "/000010/" in key:
            raise BucketError("503")
        return read(self, key, max_bytes)

    monkeypatch.setattr(Bucket, "read", fail)
    with pytest.raises(BucketError, match="503"):
        checkpointer.restore_newest(first)


def test_what_a_killed_save_has_left_goes_with_the_next(run):
    first, _ = states()
    checkpointer = Checkpointer(run, keep=1)
    checkpointer.save(3, first, {})
    checkpointer.wait()
    run.put("checkpoints/000004/0123abcd", b"half a checkpoint")
    checkpointer.save(5, first, {})
    checkpointer.wait()
    assert {key.split("/")[1] for key in run.list("checkpoints")} == {"000005"}
