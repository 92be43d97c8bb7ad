from pathlib import Path

import pytest

from grpo_jax.config.schema import Fleet
from grpo_jax.errors import RunFailed
from grpo_jax.rollouts import watch as watch_module
from grpo_jax.rollouts.admission import Ticket
from grpo_jax.rollouts.watch import RunWatch
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import seal


@pytest.fixture(autouse=True)
def every_read_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_RUN_EVERY_S", 0.0)


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(str(tmp_path))


def run(bucket: Bucket, status: str, incarnation: int, seq: int = 1) -> None:
    bucket.replace(layout.RUN, seal({"status": status}, incarnation, seq))


def state(bucket: Bucket, phase: str, incarnation: int, seq: int, drops: tuple[tuple[str, str], ...] = ()) -> None:
    body = {"phase": phase, "total_steps": 7, "drops": drops}
    bucket.replace(layout.LEARNER_STATE, seal(body, incarnation, seq))


def pass_time(watch: RunWatch, seconds: float) -> None:
    """As if the learner's state had changed so much earlier."""
    watch._state.changed_at -= seconds


def seen_alive(bucket: Bucket, silent_s: float = 60.0) -> RunWatch:
    """A watch that has seen the learner's state change once."""
    state(bucket, "training", 1, 1)
    watch = RunWatch(bucket, Fleet(silent_s=silent_s))
    watch.read()
    state(bucket, "training", 1, 2)
    watch.read()
    return watch


def test_a_run_has_begun_once_both_records_are_there(bucket: Bucket) -> None:
    watch = RunWatch(bucket, Fleet())
    watch.read()
    assert (watch.has_begun, watch.total_steps, watch.drops) == (False, 0, {})
    state(bucket, "starting", 1, 1)
    watch.read()
    assert not watch.has_begun
    run(bucket, "running", 1)
    watch.read()
    assert watch.has_begun
    assert watch.total_steps == 7


def test_drops_are_read_as_tickets(bucket: Bucket) -> None:
    watch = RunWatch(bucket, Fleet())
    state(bucket, "training", 1, 1, (("e000.i000001.a00", "stale"), ("e002.i000040.a03", "foreign")))
    watch.read()
    assert watch.drops == {Ticket(1, 0): "stale", Ticket(40, 3): "foreign"}


@pytest.mark.parametrize(
    ("status", "run_incarnation", "phase", "state_incarnation", "ended"),
    [
        ("running", 1, "training", 1, False),
        ("running", 1, "draining", 1, False),
        ("running", 1, "done", 1, True),
        ("finished", 1, "done", 1, True),
        ("failed", 1, "training", 1, True),
        ("failed", 2, "training", 1, True),
        ("finished", 1, "starting", 2, False),  # a learner has begun to resume; it rewrites run.json later
        ("failed", 1, "training", 2, False),
        ("running", 2, "done", 1, False),  # the resumed learner's state is still that of its earlier life
    ],
)
def test_the_newest_incarnation_says_whether_the_run_has_ended(
    bucket: Bucket, status: str, run_incarnation: int, phase: str, state_incarnation: int, ended: bool
) -> None:
    watch = seen_alive(bucket)
    run(bucket, status, run_incarnation)
    state(bucket, phase, state_incarnation, 3)
    watch.read()
    assert watch.has_ended is ended


def test_an_end_that_was_there_before_counts_after_a_silence_only(bucket: Bucket) -> None:
    run(bucket, "finished", 1)
    state(bucket, "done", 1, 1)
    watch = RunWatch(bucket, Fleet(silent_s=60))
    watch.read()
    assert not watch.has_ended
    pass_time(watch, 61)
    watch.read()
    assert watch.has_ended


def test_draining_is_believed_of_a_living_learner_only(bucket: Bucket) -> None:
    state(bucket, "draining", 1, 1)
    watch = RunWatch(bucket, Fleet(silent_s=60))
    watch.read()
    assert not watch.is_draining
    state(bucket, "draining", 1, 2)
    watch.read()
    assert watch.is_draining


def test_a_heartbeat_is_any_change_of_the_state(bucket: Bucket) -> None:
    watch = RunWatch(bucket, Fleet(idle_exit_s=60))
    watch.check_alive()
    pass_time(watch, 61)
    with pytest.raises(RunFailed, match="silent"):
        watch.check_alive()
    state(bucket, "training", 1, 1)
    watch.read()
    watch.check_alive()
    pass_time(watch, 61)
    watch.read()  # nothing new
    with pytest.raises(RunFailed, match="silent"):
        watch.check_alive()


def pointer(bucket: Bucket, seq: int, **body: object) -> None:
    bucket.replace(layout.POLICY, seal({"window": [body["current"]], **body}, 1, seq))


V0, V1 = "toy.v000000.00000000", "toy.v000001.00000001"


def test_evaluated_is_what_is_pinned_and_at_the_end_the_last_policy(bucket: Bucket) -> None:
    watch = RunWatch(bucket, Fleet(), follow_policies=True)
    watch.read()
    assert watch.to_evaluate == ()
    state(bucket, "training", 1, 1)
    pointer(bucket, 1, current=V0, pinned=V0)
    watch.read()
    assert watch.to_evaluate == (V0,)
    state(bucket, "training", 1, 2)
    pointer(bucket, 2, current=V1, pinned=None)
    watch.read()
    assert watch.to_evaluate == ()
    state(bucket, "draining", 1, 3)
    watch.read()
    assert watch.to_evaluate == (V1,)
    pointer(bucket, 3, current=V1, pinned=V0)
    watch.read()
    assert watch.to_evaluate == (V0, V1)
