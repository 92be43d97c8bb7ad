import numpy as np

from grpo_jax.learner.ledger import Ledger
from tests.learner.tiny import make_group

NAMES = {v: f"tiny.v{v:06d}.{v:08x}" for v in range(6)}


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


def test_a_file_that_is_no_group_is_dropped_so_that_it_is_drawn_again():
    ledger = Ledger(max_staleness=1)
    ledger.offer([group(0, 1)])
    ledger.take(1, version=1)
    ledger.reject(["e000.i000000.a00", "e000.i000007.a00"])
    assert ledger.drops == {"e000.i000007.a00": "invalid"}
