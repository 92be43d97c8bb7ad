"""Groups that the learner replaces, because all their samples earned the same, against those it wants drawn again."""

import pytest

from grpo_jax.rollouts.admission import Admission, Ticket

SAME = "zero_variance"


def started(a: Admission, version: int = 0) -> list[Ticket]:
    found = []
    while (ticket := a.start(version)) is not None:
        found.append(ticket)
    return found


def admission(total: int = 100) -> Admission:
    return Admission(max_staleness=0, groups_per_version=4, total=total, max_redraws=2)


def test_a_replaced_group_gives_its_number_back_and_its_index_is_not_drawn_again() -> None:
    a = admission()
    for ticket in started(a):
        a.finish(ticket)
    a.drop(Ticket(1, 0), SAME)
    assert (a.live, a.skipped, a.redraws) == (3, {1: SAME}, 0)
    assert started(a) == [Ticket(4, 0)]
    a.drop(Ticket(1, 0), SAME)
    assert a.live == 4
    assert started(a) == []


@pytest.mark.parametrize("reason", ["stale", "foreign", "invalid", "unscorable"])
def test_a_group_dropped_for_any_other_reason_is_drawn_again(reason: str) -> None:
    a = admission()
    started(a)
    a.drop(Ticket(1, 0), reason)
    assert (a.live, a.skipped, a.redraws) == (3, {}, 1)
    assert started(a) == [Ticket(1, 1)]


def test_a_later_attempt_can_be_replaced_as_well() -> None:
    a = admission()
    started(a)
    a.drop(Ticket(2, 0), "stale")
    started(a)
    a.drop(Ticket(2, 1), SAME)
    assert a.skipped == {2: SAME}
    assert started(a) == [Ticket(4, 0)]


def test_replaced_groups_do_not_use_up_the_run_s_total() -> None:
    a = admission(total=4)
    started(a)
    for index in range(4):
        a.drop(Ticket(index, 0), SAME)
    assert [ticket.index for ticket in started(a)] == [4, 5, 6, 7]


def test_a_new_life_of_the_worker_does_not_draw_a_replaced_index_either() -> None:
    a = admission()
    spool = [Ticket(index, 0) for index in (0, 1, 2, 3)]
    a.restore(spool, {Ticket(1, 0): SAME, Ticket(2, 0): "stale"})
    assert (a.live, a.skipped) == (2, {1: SAME})
    assert started(a) == [Ticket(2, 1), Ticket(4, 0)]
    # Once more, with what that life had recorded.
    b = admission()
    b.restore(spool, {Ticket(1, 0): SAME, Ticket(2, 0): "stale"}, a.skipped)
    assert (b.live, b.skipped) == (2, {1: SAME})
    assert started(b) == [Ticket(2, 1), Ticket(4, 0)]
