"""Admission, alone and against a simulated learner that is slow, drops groups and sees its worker die."""

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.rollouts.admission import Admission, Ticket


def admission(S: int = 1, gpv: int = 2, total: int = 100, R: int = 2) -> Admission:
    return Admission(max_staleness=S, groups_per_version=gpv, total=total, max_redraws=R)


def start_all(a: Admission, version: int) -> list[Ticket]:
    started = []
    while (ticket := a.start(version)) is not None:
        started.append(ticket)
    return started


@pytest.mark.parametrize("S", [0, 1, 3])
@pytest.mark.parametrize("gpv", [1, 4])
@pytest.mark.parametrize("version", [0, 2])
def test_the_kth_group_starts_within_the_bound_and_not_beyond(S: int, gpv: int, version: int) -> None:
    a = admission(S, gpv)
    assert len(start_all(a, version)) == (S + 1 + version) * gpv
    assert a.is_paced(version)
    assert not a.is_paced(version + 1)


def test_no_group_is_started_beyond_the_total_and_that_is_no_backpressure() -> None:
    a = admission(total=3)
    assert len(start_all(a, 50)) == 3
    assert not a.is_paced(50)
    a.total = 5
    assert [t.index for t in start_all(a, 50)] == [3, 4]


def test_a_drop_gives_the_number_back_and_the_index_comes_before_fresh_ones() -> None:
    a = admission()
    first, second, *_ = start_all(a, 0)
    a.drop(second, "unscorable")
    a.finish(first)
    a.drop(first, "stale")
    assert a.live == 2
    assert start_all(a, 0) == [Ticket(0, 1), Ticket(1, 1)]
    assert start_all(a, 1)[0] == Ticket(4, 0)


def test_after_the_last_redraw_an_index_is_skipped_and_another_takes_its_place() -> None:
    a = admission(R=2, total=2)
    start_all(a, 0)
    for attempt in range(3):
        a.drop(Ticket(0, attempt), f"reason {attempt}")
        if attempt < 2:
            assert start_all(a, 0) == [Ticket(0, attempt + 1)]
    assert a.skipped == {0: "reason 2"}
    assert a.redraws == 2
    assert start_all(a, 0) == [Ticket(2, 0)]


def test_dropping_twice_is_dropping_once_and_a_late_finish_changes_nothing() -> None:
    a = admission()
    ticket = start_all(a, 0)[0]
    for _ in range(3):
        a.drop(ticket, "stale")
    a.finish(ticket)
    assert (a.live, a.running, a.redraws) == (3, 3, 1)
    assert start_all(a, 0) == [Ticket(0, 1)]
    a.drop(ticket, "stale")
    assert a.live == 4


def test_restore_continues_without_repeating_or_losing_an_index() -> None:
    a = admission(total=100, R=1)
    a.restore(
        in_spool=[Ticket(0, 0), Ticket(1, 0), Ticket(1, 1), Ticket(3, 0), Ticket(6, 0)],
        drops={Ticket(1, 0): "stale", Ticket(3, 0): "foreign"},
        skipped={5: "unscorable"},
    )
    assert a.live == 3  # 0, 1 (its second attempt), 6
    assert a.redraws == 0
    # 2 and 4 were in flight at the crash, 3 was dropped, 5 was given up, 7 is the first fresh one.
    assert start_all(a, 10)[:4] == [Ticket(2, 0), Ticket(3, 1), Ticket(4, 0), Ticket(7, 0)]


def test_restore_skips_what_the_learner_dropped_too_often() -> None:
    a = admission(R=0)
    a.restore([Ticket(0, 0)], {Ticket(0, 0): "stale"})
    assert a.skipped == {0: "stale"}
    assert start_all(a, 0)[0] == Ticket(1, 0)


def test_a_group_in_the_spool_counts_even_if_its_index_was_given_up() -> None:
    a = admission()
    a.restore([Ticket(0, 2)], {}, {0: "unscorable"})
    assert (a.live, a.skipped) == (1, {})


@dataclass
class Spooled:
    ticket: Ticket
    order: int  # of the start
    version: int


@dataclass
class World:
    """A learner and a worker that fails, dawdles and dies as `random` says."""

    random: Random
    S: int
    P: int
    sync: int
    steps: int
    R: int
    in_order: bool  # the learner waits for the oldest start, or takes the oldest that are there
    failures: float
    admission: Admission = field(init=False)
    running: list[Spooled] = field(default_factory=list)
    spool: list[Spooled] = field(default_factory=list)
    drops: dict[Ticket, str] = field(default_factory=dict)
    trained: list[Spooled] = field(default_factory=list)
    step: int = 0
    orders: int = 0

    def __post_init__(self) -> None:
        self.admission = self.fresh_admission()

    def fresh_admission(self) -> Admission:
        return admission(self.S, self.P * self.sync, self.steps * self.P, self.R)

    @property
    def version(self) -> int:
        return self.step // self.sync

    def start(self) -> None:
        before = self.admission.live
        ticket = self.admission.start(self.version)
        if ticket is not None:
            assert before < (self.S + 1 + self.version) * self.P * self.sync
            assert ticket not in [g.ticket for g in (*self.running, *self.spool)]
            self.running.append(Spooled(ticket, self.orders, self.version))
            self.orders += 1

    def complete(self) -> None:
        if self.running:
            group = self.running.pop(self.random.randrange(len(self.running)))
            if self.random.random() < self.failures:
                self.admission.drop(group.ticket, "unscorable")
            else:
                self.spool.append(group)
                self.admission.finish(group.ticket)

    def learn(self) -> None:
        if self.step == self.steps:
            return
        on_offer = [g for g in self.spool if g not in self.trained and g.ticket not in self.drops]
        for group in on_offer:
            if self.version - group.version > self.S:
                self.drops[group.ticket] = "stale"
            elif self.random.random() < self.failures:
                self.drops[group.ticket] = "invalid"
        batch = sorted((g for g in on_offer if g.ticket not in self.drops), key=lambda g: g.order)[: self.P]
        if len(batch) < self.P or (self.in_order and any(g.order < batch[-1].order for g in self.running)):
            return
        self.trained += batch
        self.step += 1

    def tell(self) -> None:
        for ticket, reason in self.drops.items():
            self.admission.drop(ticket, reason)

    def crash(self) -> None:
        skipped = self.admission.skipped
        self.admission, self.running = self.fresh_admission(), []
        self.admission.restore([g.ticket for g in self.spool], self.drops, skipped)

    def check(self) -> None:
        assert self.admission.live <= self.steps * self.P
        indices = [g.ticket.index for g in self.trained]
        assert len(set(indices)) == len(indices), "an index was trained twice"


worlds = st.builds(
    World,
    random=st.randoms(use_true_random=False),
    S=st.integers(0, 3),
    P=st.integers(1, 3),
    sync=st.integers(1, 2),
    steps=st.integers(1, 6),
    R=st.integers(0, 3),
    in_order=st.booleans(),
    failures=st.sampled_from([0.0, 0.1, 0.4]),
)


@settings(max_examples=200, deadline=None)
@given(worlds, st.integers(0, 200))
def test_every_run_ends_with_exactly_its_groups_none_staler_than_allowed(world: World, actions: int) -> None:
    for _ in range(actions):
        world.random.choice([*[world.start, world.complete, world.learn, world.tell] * 5, world.crash])()
        world.check()
    # Whatever has happened: a worker and a learner that go on finish the run.
    world.failures = 0.0
    for _ in range(50 * world.steps * world.P):
        for action in (world.start, world.complete, world.learn, world.tell):
            action()
            world.check()
    assert world.step == world.steps
    assert len(world.trained) == world.steps * world.P
    while world.running:
        world.complete()
    world.tell()
    assert world.admission.live == world.steps * world.P
    assert world.admission.start(world.version) is None
    indices = [group.ticket.index for group in world.trained] + list(world.admission.skipped)
    assert sorted(indices) == list(range(len(indices))), "an index was lost"

    gpv = world.P * world.sync
    lags = [j // gpv - group.version for j, group in enumerate(world.trained)]
    assert all(0 <= lag <= world.S for lag in lags)
    if world.in_order or world.S == 0:
        assert "stale" not in world.drops.values()
