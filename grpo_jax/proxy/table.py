"""What is known of the replicas of one run's fleet: which are ready, and which policies each has proved."""

from collections.abc import Iterable, Mapping, Sequence

from yarl import URL

from grpo_jax.adapters.names import parse_policy
from grpo_jax.proxy.replica import Replica

LATEST = "latest"


class Table:
    """Callers tell the time (monotonic seconds). For one thread (the event loop's)."""

    def __init__(self, run: str, memory_s: float):
        """memory_s: how long a policy stays known after no replica names it any more; one may just be restarting."""
        self._run, self._memory_s = run, memory_s
        self.replicas: dict[str, Replica] = {}
        self.complete = False  # set once every source of the table has been looked at
        self._by_number: dict[int, Replica] = {}
        self._numbers = 0
        self._window: tuple[str, ...] = ()
        self._seen: dict[str, float] = {}

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
            self.forget(id)
            replica = self.replicas[id] = Replica(id, url)
            self._renumber(replica)
        replica.ready = ready
        replica.quarantined = dict(quarantined or {})
        versions = self._versions(proved)
        replica.proved = {name: v for name, v in versions.items() if name not in replica.quarantined}
        replica.choose_newest(self._window)
        replica.denied = {name: backoff for name, backoff in replica.denied.items() if name in replica.proved}
        for name in (*versions, *self._versions(loaded), *self._versions(replica.quarantined)):
            self._seen[name] = now
        for name in [name for name, seen in self._seen.items() if now - seen > self._memory_s]:
            del self._seen[name]

    def forget(self, id: str) -> None:
        replica = self.replicas.pop(id, None)
        if replica is not None:
            del self._by_number[replica.number]

    def set_window(self, names: Sequence[str]) -> None:
        """The policies that the run wants served, newest first: `latest` is the first that a replica has proved.

        Read the names after the heartbeats, and tell them with these: then they hold all that a heartbeat can name.
        """
        if tuple(names) != self._window:
            self._window = tuple(names)
            for replica in self.replicas.values():
                replica.choose_newest(self._window)

    def named_lately(self, policy: str) -> bool:
        """Whether a replica named this policy of the run lately, proved or not. A no counts once `complete`.

        Not what is older than the window and proved nowhere: it was retired, and nobody will load it again.
        """
        return policy in self._seen and not self._is_retired(policy)

    def _is_retired(self, policy: str) -> bool:
        versions = self._versions(self._window)
        if not versions or any(policy in replica.proved for replica in self.replicas.values()):
            return False
        return self._versions([policy]).get(policy, 0) < min(versions.values())

    def policies(self) -> dict[str, int]:
        """Every policy proved on a ready replica and its version, newest first."""
        found = {name: v for replica in self.replicas.values() if replica.ready for name, v in replica.proved.items()}
        return dict(sorted(found.items(), key=lambda item: item[1], reverse=True))

    def ready_count(self) -> int:
        return sum(replica.ready for replica in self.replicas.values())

    def why_none(self, model: str) -> str:
        """Why no replica serves `model` now, in one sentence."""
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

    def _renumber(self, replica: Replica) -> None:
        self._by_number.pop(replica.number, None)
        self._numbers += 1
        replica.number = self._numbers
        self._by_number[replica.number] = replica

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
