"""What a learner's state says of the groups that it has dropped."""

import random

from grpo_jax.rollouts.sample import GroupId
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.dropped import count_dropped, dropped_body, dropped_in
from grpo_jax.storage.records import RecordWriter, read_record


def test_what_is_said_is_read_and_so_is_what_was_said_before() -> None:
    drops = {"e000.i000007.a00": "stale", "e000.i000003.a01": "invalid", "e001.i000011.a00": "stale"}
    state = {"dropped": dropped_body(drops)}
    assert {str(group): reason for group, reason in dropped_in(state)} == drops
    before = {"drops": [*sorted(drops.items()), ["no group", "stale"]]}
    assert {str(group): reason for group, reason in dropped_in(before)} == drops
    assert count_dropped(state) == {"stale": 2, "invalid": 1}
    assert count_dropped(None) == {}
    assert list(dropped_in({})) == []


def test_half_a_million_drops_fit_into_a_record(tmp_path) -> None:
    """A run that draws a million groups and replaces every other one goes on."""
    draws = random.Random(0)
    drops = {str(GroupId(i // 17_000, i)): "zero_variance" for i in range(1_000_000) if draws.random() < 0.5}
    run = Bucket(str(tmp_path))
    RecordWriter(run, layout.LEARNER_STATE, 1).write({"step": 1, "dropped": dropped_body(drops)})
    state = read_record(run, layout.LEARNER_STATE)
    assert state is not None
    assert count_dropped(state)["zero_variance"] == len(drops)
    assert sum(1 for _ in dropped_in(state)) == len(drops)
