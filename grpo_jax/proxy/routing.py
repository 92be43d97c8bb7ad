"""Which replica answers which request. Rules and state only: no I/O, and callers tell the time (monotonic seconds)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from yarl import URL

from grpo_jax.adapters.names import parse_policy
from grpo_jax.proxy.backoff import Backoff

LATEST = "latest"


@dataclass
class Replica:
    id: str
    url: URL
    ready: bool = False
    proved: dict[str, int] = field(default_factory=dict)  # name of a policy of this run → its version
    quarantined: Mapping[str, str] = field(default_factory=dict)  # name → reason
    in_flight: int = 0  # samples that this proxy waits for
    last_used: int = 0
    health: Backoff = field(default_factory=Backoff)
    denied: dict[str, Backoff] = field(default_factory=dict)  # policies that it failed to serve
    last_error: str | None = None

    @property
    def newest(self) -> str | None:
        """The proved policy of the highest version; of two lineages with one version the one proved later."""
        return max(reversed(self.proved), key=self.proved.__getitem__, default=None)

    def serves(self, policy: str, now: float) -> bool:
        denied = self.denied.get(policy)
        return (
            self.ready
            and policy in self.proved
            and not self.health.blocked(now)
            and not (denied is not None and denied.blocked(now))
        )


class Route(NamedTuple):
    replica: Replica
    policy: str


class Lease(NamedTuple):
    """One attempt under way."""

    replica: Replica
    policy: str
    samples: int
    began: float


class Router:
    """The replicas of one run's fleet and what is under way on each. For one thread (the event loop's)."""

    def __init__(self, run: str, memory_s: float):
        """memory_s: how long a policy stays known after no replica names it any more; one may just be restarting."""
        self._run, self._memory_s = run, memory_s
        self.replicas: dict[str, Replica] = {}
        self._seen: dict[str, float] = {}
        self._uses = 0
        self.complete = False  # set once every source of the table has been looked at

    def observe(
        self,
        id: str,
        url: URL,
        ready: bool,
        proved: Iterable[str],
        now: float,
        quarantined: Mapping[str, str] | None = None,
        loaded: Iterable[str] = (),
    ) -> None:
        """What a replica says of itself now. Probes, names of other runs and quarantined names are never routed to."""
        replica = self.replicas.get(id)
        if replica is None or replica.url != url:  # another server: it starts without strikes
            replica = self.replicas[id] = Replica(id, url)
        replica.ready = ready
        replica.quarantined = dict(quarantined or {})
        versions = self._versions(proved)
        replica.proved = {name: v for name, v in versions.items() if name not in replica.quarantined}
        replica.denied = {name: backoff for name, backoff in replica.denied.items() if name in replica.proved}
        for name in (*versions, *self._versions(loaded), *self._versions(replica.quarantined)):
            self._seen[name] = now
        for name in [name for name, seen in self._seen.items() if now - seen > self._memory_s]:
            del self._seen[name]

    def forget(self, id: str) -> None:
        self.replicas.pop(id, None)

    def knows(self, policy: str) -> bool:
        """Whether a replica named this policy lately, proved or not. True as long as not all have been looked at."""
        return not self.complete or policy in self._seen

    def choose(self, model: str, now: float) -> Route | None:
        """The least loaded replica that serves `model` now (of equals the least recently used), and the exact name."""
        best: Route | None = None
        for replica in self.replicas.values():
            policy = replica.newest if model == LATEST else model
            if policy is None or not replica.serves(policy, now):
                continue
            if best is None or _order(replica) < _order(best.replica):
                best = Route(replica, policy)
        return best

    def why_none(self, model: str) -> str:
        """Why `choose` finds nothing, in one sentence."""
        ready = [replica for replica in self.replicas.values() if replica.ready]
        if not ready:
            return f"none of the {len(self.replicas)} replicas in the fleet is live and ready"
        able = [replica for replica in ready if (replica.proved if model == LATEST else model in replica.proved)]
        if not able:
            reasons = [f"{r.id}: {r.quarantined[model]}" for r in ready if model in r.quarantined]
            quarantine = f" (quarantined on {'; '.join(reasons)})" if reasons else ""
            what = "a policy" if model == LATEST else model
            return f"none of the {len(ready)} ready replicas has proved {what}{quarantine}"
        errors = "; ".join(f"replica {r.id} {r.last_error}" for r in able if r.last_error)
        return f"every replica that has proved it is being left alone after a failure: {errors}"

    def begin(self, route: Route, samples: int, now: float) -> Lease:
        """Counts an attempt on its replica until `end`."""
        replica, policy = route
        self._uses += 1
        replica.in_flight += samples
        replica.last_used = self._uses
        replica.health.begin(now)
        if policy in replica.denied:
            replica.denied[policy].begin(now)
        return Lease(replica, policy, samples, now)

    def end(self, lease: Lease) -> None:
        lease.replica.in_flight -= lease.samples

    def succeeded(self, lease: Lease) -> None:
        lease.replica.health.reset()
        lease.replica.denied.pop(lease.policy, None)

    def strike(self, lease: Lease, now: float, cause: str, policy_only: bool = False) -> bool:
        """Leaves the replica (or only this policy on it) alone for a while; returns whether the failure is news."""
        replica = lease.replica
        replica.last_error = cause
        backoff = replica.denied.setdefault(lease.policy, Backoff()) if policy_only else replica.health
        return backoff.strike(now, lease.began)

    def policies(self) -> dict[str, int]:
        """Every policy proved on a ready replica and its version, newest first."""
        found = {name: v for replica in self.replicas.values() if replica.ready for name, v in replica.proved.items()}
        return dict(sorted(found.items(), key=lambda item: item[1], reverse=True))

    def ready_count(self) -> int:
        return sum(replica.ready for replica in self.replicas.values())

    def _versions(self, names: Iterable[str]) -> dict[str, int]:
        versions = {}
        for name in names:
            try:
                policy = parse_policy(name)
            except ValueError:
                continue
            if policy.run == self._run and policy.version is not None:
                versions[name] = policy.version
        return versions


def _order(replica: Replica) -> tuple[int, int]:
    return replica.in_flight, replica.last_used
