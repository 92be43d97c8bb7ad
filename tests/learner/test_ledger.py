import numpy as np

from grpo_jax.config.schema import Algorithm
from grpo_jax.learner.batch import is_zero_variance
from grpo_jax.learner.ledger import Ledger
from tests.learner.tiny import make_group

NAMES = {v: f"tiny.v{v:06d}.{v:08x}" for v in range(6)}
EQUAL, UNEQUAL = [0.1] * 4, [0.0, 1.0, 0.0, 0.0]


def group(index, version, started_at=None, policy=None, rewards=None):
    rng = np.random.default_rng(index)
    return make_group(rng, index, policy=policy or NAMES[version], started_at=started_at, rewards=rewards)


def test_the_oldest_start_is_taken_first_and_each_group_once():
    ledger = Ledger(max_staleness=1)
    ledger.offer([group(0, 1, started_at=30), group(1, 1, started_at=10), group(2, 1, started_at=20)])
    assert ledger.take(4, version=1) is None
    assert [g.id.index for g in ledger.take(2, version=1)] == [1, 2]
    ledger.offer([group(1, 1), group(2, 1)])  # read again, after a resume say
    assert ledger.take(2, version=1) is None
    assert [g.id.index for g in ledger.take(1, version=1)] == [0]


def test_groups_too_old_or_of_another_lineage_are_dropped_whole():
    ledger = Ledger(max_staleness=1)
    ledger.offer([group(0, 1), group(1, 2), group(2, 2, policy="tiny.v000002.deadbeef"), group(3, 3)])
    ledger.sweep(3, NAMES)
    assert set(ledger.drops.values()) == {"stale", "foreign"}
    assert sorted(ledger.drops) == ["e000.i000000.a00", "e000.i000002.a00"]
    assert [g.id.index for g in ledger.take(2, version=3)] == [1, 3]


def test_groups_of_a_version_that_a_replay_has_not_reached_wait():
    ledger = Ledger(max_staleness=0)
    ledger.offer([group(0, 3)])
    ledger.sweep(2, NAMES)
    assert ledger.ready(2) == 0
    assert ledger.take(1, version=2) is None
    ledger.sweep(3, NAMES)
    assert [g.id.index for g in ledger.take(1, version=3)] == [0]


def test_groups_of_a_version_that_no_replay_will_reach_are_foreign():
    ledger = Ledger(max_staleness=0)
    ledger.offer([group(0, 3), group(1, 4)])
    ledger.sweep(2, NAMES, newest=3)
    assert ledger.drops == {"e000.i000001.a00": "foreign"}


def test_a_group_with_fewer_than_two_scorable_samples_is_invalid():
    ledger = Ledger(max_staleness=1)
    ledger.offer([group(0, 1, rewards=[None, None, None, 1.0])])
    assert ledger.drops == {"e000.i000000.a00": "invalid"}


def test_a_recorded_batch_is_taken_in_its_order_or_not_at_all():
    ledger = Ledger(max_staleness=1)
    ledger.offer([group(0, 1), group(1, 1)])
    ids = ["e000.i000001.a00", "e000.i000000.a00", "e000.i000002.a00"]
    assert ledger.take_recorded(ids) is None
    ledger.offer([group(2, 1)])
    assert [str(g.id) for g in ledger.take_recorded(ids)] == ids


def test_what_was_dropped_when_a_batch_was_recorded_is_on_offer_until_then_and_no_longer():
    ledger = Ledger(max_staleness=1)
    ledger.offer([group(0, 1), group(1, 1), group(2, 1)])
    drops = {"e000.i000002.a00": "stale", "e000.i000009.a00": "foreign"}
    assert ledger.take_recorded(["e000.i000003.a00"], drops) is None
    assert ledger.ready(1) == 3
    assert len(ledger.take_recorded(["e000.i000000.a00"], drops)) == 1
    assert ledger.ready(1) == 1
    ledger.offer([group(2, 1), group(9, 1)])
    assert ledger.ready(1) == 1
    assert ledger.drops == drops


def test_a_file_that_is_no_group_is_dropped_so_that_it_is_drawn_again():
    ledger = Ledger(max_staleness=1)
    ledger.offer([group(0, 1)])
    ledger.take(1, version=1)
    ledger.reject(["e000.i000000.a00", "e000.i000007.a00", "notes", "../e000.i000008.a00"])
    assert ledger.drops == {"e000.i000007.a00": "invalid"}


def take(ledger, count, max_candidates):
    groups = ledger.take(
        count, 1, is_replaced=lambda g: is_zero_variance(g, Algorithm(), 9), max_candidates=max_candidates
    )
    return None if groups is None else [g.id.index for g in groups]


def offer(ledger, *rewards, first=0):
    ledger.offer(group(first + i, 1, rewards=values) for i, values in enumerate(rewards))


def dropped(ledger):
    return {int(key.split(".i")[1][:6]): reason for key, reason in ledger.drops.items()}


def test_groups_of_equal_rewards_make_room_for_others():
    ledger = Ledger(max_staleness=1)
    offer(ledger, EQUAL, UNEQUAL, EQUAL)
    assert take(ledger, 2, 8) is None  # the equal ones are gone already, so that the worker can draw others
    assert dropped(ledger) == {0: "zero_variance", 2: "zero_variance"}
    offer(ledger, EQUAL, UNEQUAL, UNEQUAL)  # the first three again: a dropped one does not come back
    assert take(ledger, 2, 8) is None
    offer(ledger, UNEQUAL, EQUAL, first=3)
    assert take(ledger, 2, 8) == [1, 3]
    assert dropped(ledger) == {0: "zero_variance", 2: "zero_variance"}  # 4 was not looked at


def test_after_so_many_candidates_a_batch_takes_what_is_left_of_them():
    ledger = Ledger(max_staleness=1)
    offer(ledger, EQUAL, UNEQUAL, EQUAL, EQUAL, UNEQUAL)
    assert take(ledger, 2, 4) == [1]
    assert sorted(dropped(ledger)) == [0, 2, 3]


def test_a_batch_may_be_left_with_no_group_at_all():
    ledger = Ledger(max_staleness=1)
    offer(ledger, EQUAL, EQUAL)
    assert take(ledger, 2, 3) is None
    offer(ledger, EQUAL, UNEQUAL, UNEQUAL, first=2)
    assert take(ledger, 2, 3) == []
    assert take(ledger, 2, 3) == [3, 4]


def test_each_batch_counts_its_own_candidates():
    ledger = Ledger(max_staleness=1)
    offer(ledger, EQUAL, EQUAL, UNEQUAL)
    assert take(ledger, 1, 3) == [2]
    offer(ledger, EQUAL, EQUAL, first=3)
    assert take(ledger, 1, 3) is None  # two of three
    offer(ledger, UNEQUAL, first=5)
    assert take(ledger, 1, 3) == [5]


def test_without_replacement_equal_rewards_are_taken_like_others():
    ledger = Ledger(max_staleness=1)
    offer(ledger, EQUAL, UNEQUAL)
    assert [g.id.index for g in ledger.take(2, 1)] == [0, 1]
    assert ledger.drops == {}


def test_an_exact_staleness_takes_groups_of_one_version_and_leaves_the_newer_ones_for_their_batch():
    ledger = Ledger(max_staleness=2, exactly=True)
    ledger.offer([group(0, 0), group(1, 1), group(2, 2), group(3, 1)])
    assert [ledger.ready(version) for version in range(5)] == [1, 1, 1, 2, 1]
    assert ledger.take(2, version=2) is None
    assert [g.id.index for g in ledger.take(1, version=1)] == [0]  # v0 until version 2, the first that is two old
    assert [g.id.index for g in ledger.take(2, version=3)] == [1, 3]
    ledger.sweep(4, NAMES)
    assert ledger.drops == {}
    assert [g.id.index for g in ledger.take(1, version=4)] == [2]


def test_what_an_exact_batch_had_no_place_for_is_stale_once_its_version_is_over():
    ledger = Ledger(max_staleness=1, exactly=True)
    ledger.offer([group(0, 1), group(1, 1)])
    assert [g.id.index for g in ledger.take(1, version=2)] == [0]
    ledger.sweep(3, NAMES)
    assert ledger.drops == {"e000.i000001.a00": "stale"}
