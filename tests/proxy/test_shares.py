"""Whole fleets on a simulated clock: who gets how much of the work."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest
from yarl import URL

from grpo_jax.proxy.affinity import FAN_OUT, prompt_chain
from grpo_jax.proxy.routing import Lease, Router
from grpo_jax.proxy.table import LATEST
from tests.proxy.harness import RUN, V0, V1

GROUP = 8


class Simulation:
    """Calls at times. `router` sees `now`."""

    def __init__(self, *ids: str, proved: tuple[str, ...] = (V0,)):
        self.router, self.rng, self.now = Router(RUN, memory_s=60.0), random.Random(0), 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.answered: list[tuple[float, str, str, int]] = []  # when it was asked, replica, policy, samples
        for id in ids:
            self.prove(id, *proved)

    def prove(self, id: str, *names: str) -> None:
        self.router.observe(id, URL(f"http://{id}:1"), True, names, self.now)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._count), call))

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, call = heapq.heappop(self._queue)
            call()
        self.now = until

    def answer(self, lease: Lease, then: Callable[[], None] | None) -> None:
        self.router.end(lease)
        self.router.succeeded(lease, self.now)
        self.answered.append((lease.began, lease.replica.id, lease.policy, lease.samples))
        if then is not None:
            then()

    def ask(
        self,
        model: str,
        samples: int,
        prompt: list[int],
        named: str | None = None,
        then: Callable[[], None] | None = None,
    ) -> Lease:
        """A request now; its answer comes about two seconds later."""
        chain = prompt_chain(prompt)
        if named is not None:
            self.router.claim(named, samples)
        route = self.router.choose(model, self.now, chain, named)
        assert route is not None
        lease = self.router.begin(route, samples, self.now, chain)
        self.after(self.rng.uniform(1.5, 2.5), lambda: self.answer(lease, then))
        return lease

    def samples(self, since: float = 0.0, until: float = float("inf")) -> Counter[str]:
        found: Counter[str] = Counter()
        for began, id, _, samples in self.answered:
            if since <= began < until:
                found[id] += samples
        return found


def _even(found: Counter[str], ids: str, within: float) -> bool:
    mean = found.total() / len(ids)
    return all(abs(found[id] - mean) <= within * mean for id in ids)


@pytest.mark.parametrize("groups_at_a_time", [6, 24])
def test_a_replica_that_loads_late_keeps_its_share_under_the_older_policy(groups_at_a_time: int) -> None:
    """The worker asks what to name, then, a little later, asks for that; the next answer starts the next group."""
    simulation = Simulation("a", "b", "c")
    router, rng = simulation.router, simulation.rng
    problems = itertools.count()

    def start() -> None:
        route = router.name(simulation.now)
        assert route is not None
        id, policy = route.replica.id, route.policy
        prompt = [*range(16), next(problems)]
        simulation.after(rng.uniform(0.0, 0.03), lambda: simulation.ask(policy, GROUP, prompt, id, start) and None)

    for _ in range(groups_at_a_time):  # all at once, as after a publish
        start()
    simulation.run(5.0)
    for id in "ab":
        simulation.prove(id, V0, V1)
    simulation.run(15.0)
    simulation.prove("c", V0, V1)
    simulation.run(40.0)

    meanwhile = simulation.samples(5.0, 15.0)
    assert _even(meanwhile, "abc", 0.2), meanwhile
    asked = [(began, id, policy) for began, id, policy, _ in simulation.answered]
    # What was named just before a change may be asked for just after it.
    assert {(id, p) for t, id, p in asked if 5.1 < t < 15.0} == {("a", V1), ("b", V1), ("c", V0)}
    assert {p for t, _, p in asked if t > 15.1} == {V1}
    assert _even(simulation.samples(15.0, 35.0), "abc", 0.2)


@pytest.mark.parametrize("replicas", ["abcd", "abcdefghijklmnop"])
@pytest.mark.parametrize("model", [V0, LATEST])
def test_separate_samples_of_a_prompt_go_where_it_was_and_the_load_stays_even(replicas: str, model: str) -> None:
    simulation = Simulation(*replicas)
    rate = 12.0 * len(replicas)

    def arrive(problem: int) -> None:
        prompt = [*range(16), problem, *range(9)]
        for _ in range(GROUP):
            simulation.after(simulation.rng.uniform(0, 0.3), lambda: simulation.ask(model, 1, prompt) and None)
        simulation.after(simulation.rng.expovariate(rate / GROUP), lambda: arrive(problem + 1))

    arrive(0)
    simulation.run(60.0)
    usage = simulation.router.usage.total
    assert usage.samples > 50 * rate
    assert usage.best_hit_rate == pytest.approx(1 - 1 / GROUP, abs=0.005)
    assert usage.hit_rate is not None
    assert usage.hit_rate >= 0.86
    found = simulation.samples()
    assert max(found.values()) * len(replicas) <= 1.1 * found.total()


def test_one_prompt_of_many_samples_is_spread_before_it_makes_a_queue() -> None:
    simulation = Simulation("a", "b", "c", "d")
    for _ in range(400):
        simulation.ask(V0, 1, [1, 2, 3])
    loads = [replica.in_flight for replica in simulation.router.replicas.values()]
    assert max(loads) - min(loads) <= 17


def test_a_few_problems_with_a_system_prompt_do_not_crowd_on_one_replica() -> None:
    simulation = Simulation("a", "b")
    system = list(range(64))
    for problem in range(2 * FAN_OUT):
        simulation.ask(V0, GROUP, [*system, problem])
        loads = [replica.in_flight for replica in simulation.router.replicas.values()]
        assert max(loads) - min(loads) <= GROUP


def test_a_black_hole_holds_a_bounded_number_of_requests() -> None:
    """It accepts, never answers, and its heartbeat says that all is well."""
    simulation = Simulation("a", "b", "hole")
    router = simulation.router
    swallowed: list[tuple[float, Lease]] = []
    given_up: list[float] = []

    def arrive() -> None:
        route = router.choose(V0, simulation.now)
        assert route is not None
        lease = router.begin(route, 1, simulation.now)
        if lease.replica.id == "hole":
            swallowed.append((simulation.now, lease))
        else:
            simulation.after(2.0, lambda: simulation.answer(lease, None))
        simulation.after(0.05, arrive)

    def look() -> None:
        _, gone = router.strike_stalled(simulation.now)
        for replica in gone:
            assert replica.id == "hole"
            given_up.append(simulation.now)
            for _, lease in swallowed:
                if lease.replica.in_flight and lease not in ended:
                    router.strike(lease, simulation.now, "has answered nothing")
                    router.end(lease)
                    ended.append(lease)
        simulation.after(1.0, look)

    ended: list[Lease] = []
    arrive()
    look()
    simulation.run(600.0)
    times = [t for t, _ in swallowed]
    # At first its share of what is under way, then single trials.
    assert len([t for t in times if t < 12.0]) <= 25
    assert len([t for t in times if t >= 12.0]) <= 60
    assert given_up
    assert given_up[0] < 40.0
    assert {id for _, id, _, _ in simulation.answered} == {"a", "b"}
    assert len(simulation.answered) >= 11_000
