"""Which replica answers which request. Rules and state only: no I/O, and callers tell the time (monotonic seconds)."""

from collections.abc import Iterable
from typing import NamedTuple

from grpo_jax.proxy.affinity import Affinity, Chain
from grpo_jax.proxy.backoff import Backoff
from grpo_jax.proxy.pace import ABANDON_FACTOR, Pace
from grpo_jax.proxy.replica import Replica
from grpo_jax.proxy.table import LATEST, Table
from grpo_jax.proxy.usage import UsageTable

# A replica that was sent a prompt before, or was named to a group, is passed over once it waits for so many samples
# more than the least loaded one, and for so large a part more: from then on another prefill is cheaper than the queue.
SPILL_SAMPLES, SPILL_PART = 16, 1 / 8
# The samples where it was sent only a beginning of the prompt.
SPILL_SAMPLES_BEGINNING = 4
# How long a group that was told a policy counts as load of the replica that it was told of, until its request comes.
NAMED_S = 1.0


class Route(NamedTuple):
    replica: Replica
    policy: str


class Lease(NamedTuple):
    """One attempt under way."""

    replica: Replica
    policy: str
    samples: int
    began: float
    seen: bool = False  # the prompt had been sent to some replica under this policy
    seen_there: bool = False  # and to this one


class Router(Table):
    """The table, what is under way on each replica, and what each of them may hold in its prefix cache."""

    def __init__(self, run: str, memory_s: float):
        super().__init__(run, memory_s)
        self.usage = UsageTable()
        self._affinity, self._pace = Affinity(), Pace()
        self._uses = 0
        self._group = 1  # samples of the last group that had been named a replica

    def choose(self, model: str, now: float, chain: Chain = (), named: str | None = None) -> Route | None:
        """The replica that answers a request for `model` now, and the exact policy; None if none serves it.

        It is the least loaded one (of equals the least recently used), unless another that serves `model` is not too
        far ahead of it, and is `named`, or else was sent the longest specific part of the prompt (`chain`).
        """
        latest = model == LATEST
        least: Replica | None = None
        for replica in self.replicas.values():
            policy = replica.newest if latest else model
            if policy is None or not replica.serves(policy, now):
                continue
            if least is None or (replica.in_flight, replica.last_used) < (least.in_flight, least.last_used):
                least = replica
        if least is None:
            return None
        wanted, ahead = (
            self._serving(self.replicas.get(named), model, now) if named is not None else None,
            SPILL_SAMPLES,
        )
        if wanted is None and chain:
            wanted, ahead = self._holder(model, chain, now)
        if wanted is None or wanted.in_flight > least.in_flight + max(ahead, SPILL_PART * least.in_flight):
            wanted = least
        return Route(wanted, wanted.newest or model if latest else model)

    def _serving(self, replica: Replica | None, model: str, now: float) -> Replica | None:
        if replica is None:
            return None
        policy = replica.newest if model == LATEST else model
        return replica if policy is not None and replica.serves(policy, now) else None

    def _holder(self, model: str, chain: Chain, now: float) -> tuple[Replica | None, int]:
        """The least loaded of those that serve `model` and were sent the longest specific part of the prompt.

        And how many samples it may be ahead.
        """
        ahead = SPILL_SAMPLES
        latest = model == LATEST
        policies: Iterable[str] = (model,)
        if latest:
            policies = {replica.newest for replica in self.replicas.values() if replica.newest is not None}
        for level in self._affinity.levels(chain, policies):
            found: Replica | None = None
            for policy, number in level:
                replica = self._by_number.get(number)
                if replica is None or (latest and replica.newest != policy) or not replica.serves(policy, now):
                    continue
                if found is None or replica.in_flight < found.in_flight:
                    found = replica
            if found is not None:
                return found, ahead
            ahead = SPILL_SAMPLES_BEGINNING
        return None, ahead

    # ---- groups are told their policy before they ask for it

    def name(self, now: float) -> Route | None:
        """What a group that is about to start should ask for: the newest policy of the replica that load chooses.

        From now on that replica bears the load of the group, for NAMED_S at most, so that groups that are told one
        after the other are not all told the same.
        """
        able = [Route(r, r.newest) for r in self.replicas.values() if r.newest is not None and r.serves(r.newest, now)]
        if not able:
            return None
        route = min(able, key=lambda route: self._promised(route.replica, now))
        route.replica.named.append(now + NAMED_S)
        self._use(route.replica)
        return route

    def claim(self, id: str, samples: int) -> None:
        """The request of a group that was told of replica `id` has come."""
        replica = self.replicas.get(id)
        if replica is not None and replica.named:
            replica.named.popleft()
            self._group = samples

    def _promised(self, replica: Replica, now: float) -> tuple[int, int]:
        while replica.named and replica.named[0] <= now:
            replica.named.popleft()
        return replica.in_flight + self._group * len(replica.named), replica.last_used

    # ---- what is under way

    def begin(self, route: Route, samples: int, now: float, chain: Chain = ()) -> Lease:
        """Counts an attempt on its replica until `end`."""
        replica, policy = route
        if not replica.in_flight:
            replica.progressed_at = now
        replica.in_flight += samples
        self._use(replica)
        replica.health.begin(now)
        if policy in replica.denied:
            replica.denied[policy].begin(now)
        return Lease(replica, policy, samples, now, *self._affinity.note(chain, policy, replica.number))

    def end(self, lease: Lease) -> None:
        lease.replica.in_flight -= lease.samples

    def progressed(self, lease: Lease, now: float) -> None:
        """The replica has sent something that only a server at work sends."""
        lease.replica.progressed_at = now

    def succeeded(self, lease: Lease, now: float) -> None:
        replica = lease.replica
        replica.health.reset()
        replica.denied.pop(lease.policy, None)
        replica.progressed_at = now
        replica.requests_total += 1
        replica.samples_total += lease.samples
        self._pace.answered(now - lease.began, now)
        self.usage.add(lease.policy, lease.samples, lease.seen, lease.seen_there)

    # ---- failures

    def strike(self, lease: Lease, now: float, cause: str, policy_only: bool = False) -> bool:
        """Leaves the replica (or only this policy on it) alone for a while; returns whether the failure is news."""
        return self._strike(lease.replica, lease.policy if policy_only else None, now, lease.began, cause)

    def strike_stalled(self, now: float) -> tuple[list[Replica], list[Replica]]:
        """Call it about once a second: strikes the replicas that take requests and answer none while others answer.

        Each gets single trials at growing intervals, as after any failure. Returns those that were struck, and those
        that have been silent for so long that what they were sent had better be sent elsewhere.
        """
        stalled = self._pace.stalled(self.replicas.values(), now)
        struck = [replica for replica in stalled if not replica.health.blocked(now)]
        for replica in struck:
            self._strike(replica, None, now, now, f"has answered nothing for {now - replica.progressed_at:.0f} s")
        give_up_s = ABANDON_FACTOR * self._pace.patience_s
        return struck, [replica for replica in stalled if now - replica.progressed_at > give_up_s]

    def _strike(self, replica: Replica, policy: str | None, now: float, began: float, cause: str) -> bool:
        replica.last_error = cause
        replica.strikes_total += 1
        if policy is not None:
            return replica.denied.setdefault(policy, Backoff()).strike(now, began)
        if replica.number in self._by_number:
            self._renumber(replica)  # it may have been restarted, and what it held be gone
        return replica.health.strike(now, began)

    def _use(self, replica: Replica) -> None:
        self._uses += 1
        replica.last_used = self._uses
