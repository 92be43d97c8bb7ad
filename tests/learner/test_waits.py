"""What the learner says of its waits, and when it gives one up."""

import time
import uuid

import pytest

from grpo_jax.config.schema import Config
from grpo_jax.errors import RunFailed
from grpo_jax.learner.activity import Activity
from grpo_jax.learner.surroundings import Alone, Surroundings
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter
from tests.jobs.harness import wait_for


@pytest.fixture
def config():
    return Config.model_validate(
        {
            "run": "tiny",
            "bucket": f"memory://{uuid.uuid4()}",
            "model": {"source": "m"},
            "task": {"source": "a:b"},
            "rewards": [{"source": "a:b"}],
            "fleet": {"idle_exit_s": 60, "alone_exit_s": 1},
        }
    )


@pytest.fixture
def surroundings(config):
    it = Surroundings(config)
    yield it
    it.close()


def test_a_worker_that_never_comes_is_not_waited_for_for_ever(surroundings):
    surroundings.check_alive(waited_s=0.5)
    assert surroundings.workers_say == "no worker has written its state"
    with pytest.raises(RunFailed, match="no rollout worker has written its state for 60 s"):
        surroundings.check_alive(waited_s=61)


def test_as_long_as_a_worker_is_alive_it_is_waited_for(config, surroundings):
    run = Bucket(config.bucket).child(config.run)
    RecordWriter(run, layout.worker_state("w0"), 1).write({"inflight_groups": 3})
    wait_for(lambda: "3 are in flight at 1 worker" in surroundings.workers_say, what="the worker's record")
    RecordWriter(Bucket(config.bucket), layout.replica(config.fleet_name, "r0"), 1).write({"state": "starting"})
    wait_for(lambda: not _is_alone(surroundings), what="the replica's heartbeat")
    surroundings.check_alive(waited_s=10_000)


def test_a_learner_for_which_nobody_samples_does_not_wait_for_ever(config, surroundings):
    run = Bucket(config.bucket).child(config.run)
    RecordWriter(run, layout.worker_state("w0"), 1).write({"inflight_groups": 3})
    wait_for(lambda: "3 are in flight at 1 worker" in surroundings.workers_say, what="the worker's record")
    time.sleep(1.1)
    with pytest.raises(Alone, match=r"no replica of the fleet tiny .* fleet\.alone_exit_s = 1 s"):
        surroundings.check_alive(waited_s=9)
    surroundings.check_alive(waited_s=0.5)  # it has not waited for anything so far
    RecordWriter(Bucket(config.bucket), layout.replica(config.fleet_name, "r0"), 1).write({"state": "starting"})
    wait_for(lambda: not _is_alone(surroundings), what="the replica's heartbeat")


def _is_alone(surroundings):
    try:
        surroundings.check_alive(waited_s=9)
    except Alone:
        return True
    return False


def test_how_long_something_lasts_is_counted_from_its_beginning(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("grpo_jax.learner.activity.time.monotonic", lambda: now[0])
    activity = Activity()
    activity.set("waiting for groups", "2 groups")
    now[0] += 5
    activity.set("waiting for groups", "1 group")
    assert activity.body() == {"doing": "waiting for groups", "doing_s": 5.0, "waits_for": "1 group"}
    activity.set("training")
    assert activity.body() == {"doing": "training", "doing_s": 0.0, "waits_for": None}
