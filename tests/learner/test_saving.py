import threading

import jax
import pytest

from grpo_jax.errors import RunFailed
from grpo_jax.learner.checkpoint import Checkpointer
from grpo_jax.learner.records import persist
from grpo_jax.learner.saving import Saver
from grpo_jax.storage.bucket import Bucket
from tests.learner.tiny import base_and_lora, make_step


@pytest.fixture
def state():
    return jax.device_get(make_step().init(base_and_lora()[1]))


@pytest.fixture
def gate(monkeypatch):
    """Set: the bucket takes objects. Not set: it takes as long as it likes. `gate.error`: it refuses."""
    event, put = threading.Event(), Bucket.put
    event.error = None

    def gated(self, key, data):
        event.wait(30)
        if event.error is not None:
            raise event.error
        put(self, key, data)

    monkeypatch.setattr(Bucket, "put", gated)
    return event


def saver(checkpointer, state, every=2):
    return Saver(checkpointer, every, lambda: (state, {}), lambda: None, saved_step=-1)


def test_a_bucket_that_takes_for_ever_holds_up_no_step_and_what_was_due_is_saved_afterwards(tmp_path, state, gate):
    checkpointer = Checkpointer(Bucket(str(tmp_path)), keep=5)
    it = saver(checkpointer, state)
    for step in range(1, 8):  # none of these could return if it waited for the first save
        it.after_step(step)
    assert checkpointer.steps() == []
    gate.set()
    checkpointer.wait()
    it.after_step(9)
    checkpointer.wait()
    assert checkpointer.steps() == [2, 9]


def test_a_save_that_fails_is_made_up_for_by_the_next_step(tmp_path, state, gate):
    gate.set()
    checkpointer = Checkpointer(Bucket(str(tmp_path)), keep=5)
    it = saver(checkpointer, state)
    gate.error = OSError("503")
    it.after_step(2)
    while checkpointer.busy:
        pass
    gate.error = None
    it.after_step(4)  # reports the failure, and stays due
    it.after_step(5)
    checkpointer.wait()
    assert checkpointer.steps() == [5]


def test_the_last_checkpoint_is_tried_until_the_bucket_takes_it(tmp_path, state, gate, monkeypatch):
    gate.set()
    gate.error = OSError("503")
    checkpointer = Checkpointer(Bucket(str(tmp_path)), keep=5)
    it = saver(checkpointer, state)

    def mend(_):
        gate.error = None

    monkeypatch.setattr("grpo_jax.learner.saving.time.sleep", mend)
    it.save_for_good(3, timeout_s=60)
    assert checkpointer.steps() == [3]


def test_a_last_checkpoint_that_cannot_be_written_ends_in_one_sentence(tmp_path, state, gate):
    gate.set()
    gate.error = OSError("no space left")
    it = saver(Checkpointer(Bucket(str(tmp_path)), keep=5), state)
    with pytest.raises(RunFailed, match="the checkpoint after step 3 cannot be written: no space left"):
        it.save_for_good(3, timeout_s=0)


def test_persist_goes_on_until_it_works_or_is_stopped(monkeypatch):
    monkeypatch.setattr("grpo_jax.learner.records._RETRY_S", 0.0)
    answers = iter([OSError("503"), OSError("503"), "here"])

    def call():
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    assert persist("reading", call, lambda: None) == "here"

    def stop():
        raise RunFailed("stopped")

    def fail():
        raise OSError("503")

    with pytest.raises(RunFailed, match="stopped"):
        persist("reading", fail, stop)
