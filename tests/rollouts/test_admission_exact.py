"""An exact staleness: worker and learner bookkeeping together, and a whole life of the worker."""

from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.learner.ledger import Ledger
from grpo_jax.rollouts.admission import Admission, Ticket
from grpo_jax.rollouts.sample import Group
from tests.learner.tiny import make_group

NAMES = {v: f"tiny.v{v:06d}.{v:08x}" for v in range(40)}


def admission(k: int, gpv: int = 2, total: int = 100, R: int = 2) -> Admission:
    return Admission(max_staleness=k, groups_per_version=gpv, total=total, max_redraws=R, exactly=True)


def started(a: Admission, newest: int) -> list[int]:
    """The versions of all groups that may start now."""
    found = []
    while (version := a.next_version(newest)) is not None:
        assert a.start(newest) is not None
        found.append(version)
    return found


def test_each_version_samples_as_many_groups_as_are_trained_on_it() -> None:
    a = admission(k=2, total=14)
    assert started(a, 0) == [0] * 6
    assert a.is_paced(0)
    assert started(a, 1) == [1] * 2
    assert started(a, 6) == [4] * 2  # 2 and 3 are more than 2 versions old: a learner at 6 has no use for them


def test_versions_behind_the_newest_are_filled_up_first() -> None:
    a = admission(k=3, total=100)
    started(a, 0)
    assert started(a, 3) == [1, 1, 2, 2, 3, 3]
    assert started(a, 3) == []


def test_the_last_groups_end_with_the_run_whatever_is_newest() -> None:
    a = admission(k=1, gpv=2, total=7)
    assert [started(a, newest) for newest in range(5)] == [[0] * 4, [1] * 2, [2], [], []]
    assert not a.is_paced(4)


def test_a_dropped_group_is_replaced_under_its_own_version() -> None:
    a = admission(k=1, gpv=1, total=10)
    assert a.start(0) == Ticket(0, 0)
    a.start(0)
    assert (a.next_version(1), a.start(1)) == (1, Ticket(2, 0))
    a.finish(Ticket(0, 0))
    a.drop(Ticket(0, 0), "foreign")
    a.drop(Ticket(0, 0), "foreign")
    assert (a.next_version(1), a.start(1)) == (0, Ticket(0, 1))
    assert a.next_version(1) is None


def test_a_new_life_knows_what_each_group_in_the_spool_was_sampled_with() -> None:
    a = admission(k=1, gpv=1, total=10)
    spool = {Ticket(0, 0): 0, Ticket(1, 0): 0, Ticket(3, 0): 2}
    a.restore(spool, {Ticket(1, 0): "invalid"}, {}, spool)
    assert started(a, 2) == [1]  # what was in flight; v0 is too old to be needed
    b = admission(k=2, gpv=1, total=10)
    b.restore(spool, {Ticket(1, 0): "invalid"}, {}, spool)
    assert started(b, 2) == [0, 0, 1]


@dataclass
class World:
    """A learner and a worker that sees its policies late, fails, dawdles and dies as `random` says."""

    random: Random
    k: int
    P: int
    sync: int
    steps: int
    failures: float
    replace: bool
    admission: Admission = field(init=False)
    ledger: Ledger = field(init=False)
    running: list[tuple[Ticket, int]] = field(default_factory=list)
    spool: list[Group] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    step: int = 0
    newest: int = 0  # that the worker has seen

    def __post_init__(self) -> None:
        self.admission, self.ledger = self.fresh_admission(), Ledger(self.k, exactly=True)

    def fresh_admission(self) -> Admission:
        return admission(self.k, self.P * self.sync, self.steps * self.P, R=1)

    @property
    def version(self) -> int:
        return self.step // self.sync

    def look(self, late: bool = True) -> None:
        self.newest = self.random.randint(self.newest, self.version) if late else self.version
        for key, reason in self.ledger.drops.items():
            self.admission.drop(_ticket(key), reason)

    def start(self) -> None:
        version = self.admission.next_version(self.newest)
        ticket = self.admission.start(self.newest)
        assert (version is None) == (ticket is None)
        if version is not None and ticket is not None:
            assert version <= self.newest
            if not self.replace:
                assert version >= self.version - self.k - 1, "the policy is not among those that may be named"
            self.running.append((ticket, version))

    def complete(self) -> None:
        if self.running:
            ticket, version = self.running.pop(self.random.randrange(len(self.running)))
            if self.random.random() < self.failures:
                self.admission.drop(ticket, "unscorable")
                return
            self.spool.append(self.group(ticket, version))
            self.admission.finish(ticket)

    def group(self, ticket: Ticket, version: int) -> Group:
        rewards: list[float | None] = [0.0, 1.0]
        if self.random.random() < self.failures:
            rewards = [0.0, None]
        elif self.replace and self.random.random() < 0.3:
            rewards = [1.0, 1.0]
        made = make_group(np.random.default_rng(0), n=2, policy=NAMES[version], rewards=rewards, longest=1)
        object.__setattr__(made, "id", type(made.id)(0, ticket.index, ticket.attempt))
        object.__setattr__(made.provenance, "started_at", float(len(self.spool)))
        return made

    def learn(self) -> None:
        if self.step == self.steps:
            return
        self.ledger.offer(self.spool)
        self.ledger.sweep(self.version, NAMES)
        same = (lambda group: float(np.ptp(group.rewards)) == 0.0) if self.replace else None
        batch = self.ledger.take(self.P, self.version, is_replaced=same, max_candidates=2 * self.P)
        if batch is not None:
            self.lags += [self.version - group.version for group in batch]
            assert {group.version for group in batch} <= {max(0, self.version - self.k)}
            self.sizes.append(len(batch))
            self.step += 1

    def crash(self) -> None:
        skipped = self.admission.skipped
        self.admission, self.running = self.fresh_admission(), []
        versions = {_ticket(str(group.id)): group.version for group in self.spool}
        drops = {_ticket(key): reason for key, reason in self.ledger.drops.items()}
        self.admission.restore(versions, drops, skipped, versions)


def _ticket(key: str) -> Ticket:
    index, attempt = key.split(".")[1:]
    return Ticket(int(index[1:]), int(attempt[1:]))


worlds = st.builds(
    World,
    random=st.randoms(use_true_random=False),
    k=st.integers(0, 4),
    P=st.integers(1, 3),
    sync=st.integers(1, 2),
    steps=st.integers(1, 10),
    failures=st.sampled_from([0.0, 0.1, 0.3]),
    replace=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(worlds, st.integers(0, 150))
def test_every_batch_is_exactly_k_versions_old_and_every_run_ends(world: World, actions: int) -> None:
    for _ in range(actions):
        world.random.choice([*[world.start, world.complete, world.learn, world.look] * 5, world.crash])()
    # Whatever has happened: a worker and a learner that go on finish the run.
    world.failures = 0.0
    for _ in range(20 * world.steps * world.P):
        world.look(late=False)
        for action in (world.start, world.complete, world.learn):
            action()
    assert world.step == world.steps, "worker and learner wait for each other"
    assert world.lags == [
        min(step // world.sync, world.k) for step, size in enumerate(world.sizes) for _ in range(size)
    ]
    if not world.replace:
        assert world.sizes == [world.P] * world.steps
        assert "stale" not in world.ledger.drops.values()


@pytest.mark.parametrize("k", [0, 2])
def test_without_it_a_fast_learner_trains_on_other_lags(k: int) -> None:
    """What the option is for: pacing alone bounds the staleness and leaves it open."""
    loose = Admission(max_staleness=k, groups_per_version=1, total=10, max_redraws=0)
    for _ in range(k + 1):
        loose.start(0)
    assert loose.next_version(3) == 3
    exact = admission(k, gpv=1, total=10)
    for _ in range(k + 1):
        exact.start(0)
    assert exact.next_version(3) == max(1, 3 - k)
