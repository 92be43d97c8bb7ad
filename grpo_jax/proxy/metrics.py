"""What the proxy counts, as Prometheus text."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, islice

from grpo_jax.proxy.routing import Router
from grpo_jax.proxy.usage import MAX_POLICIES

OUTCOMES = ("ok", "request_error", "not_found", "unauthorized", "unavailable", "cancelled", "internal_error")
MAX_REPLICAS = 256  # with series of their own
_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_Labelled = Iterable[tuple[Mapping[str, str], int]]


@dataclass
class Metrics:
    requests: Counter[str] = field(default_factory=Counter)  # by outcome
    in_flight: int = 0
    retries: int = 0
    strikes: int = 0
    seconds: float = 0.0
    durations: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS_S) + 1))  # requests by upper bound

    def finished(self, outcome: str, seconds: float) -> None:
        self.requests[outcome] += 1
        self.seconds += seconds
        self.durations[bisect_left(_BOUNDS_S, seconds)] += 1

    def text(self, router: Router) -> str:
        lines = []
        for name, kind, help, values in (*self._of_requests(), *_of_replicas(router), *_of_policies(router)):
            lines += [f"# HELP grpo_jax_proxy_{name} {help}", f"# TYPE grpo_jax_proxy_{name} {kind}"]
            lines += [f"grpo_jax_proxy_{name}{_braces(labels)} {value:d}" for labels, value in values]
        lines += ["# HELP grpo_jax_proxy_request_seconds from the arrival of a request to the end of its answer"]
        lines += ["# TYPE grpo_jax_proxy_request_seconds histogram"]
        for bound, count in zip((*map("{:g}".format, _BOUNDS_S), "+Inf"), accumulate(self.durations), strict=True):
            lines.append(f'grpo_jax_proxy_request_seconds_bucket{{le="{bound}"}} {count}')
        lines.append(f"grpo_jax_proxy_request_seconds_sum {self.seconds:.6f}")
        lines.append(f"grpo_jax_proxy_request_seconds_count {self.requests.total()}")
        return "\n".join(lines) + "\n"

    def _of_requests(self) -> list[tuple[str, str, str, _Labelled]]:
        return [
            ("in_flight", "gauge", "client requests under way", [({}, self.in_flight)]),
            ("retries_total", "counter", "attempts that were made again elsewhere", [({}, self.retries)]),
            ("strikes_total", "counter", "faults of replicas", [({}, self.strikes)]),
            ("requests_total", "counter", "client requests by outcome",
             [({"outcome": outcome}, self.requests[outcome]) for outcome in OUTCOMES]),
        ]  # fmt: skip


def _of_replicas(router: Router) -> list[tuple[str, str, str, _Labelled]]:
    replicas = [replica for _, replica in islice(sorted(router.replicas.items()), MAX_REPLICAS)]
    found: list[tuple[str, str, str, _Labelled]] = [
        ("replicas_ready", "gauge", "replicas that are live and ready", [({}, router.ready_count())])
    ]
    for name, kind, help, value in (
        ("ready", "gauge", "whether it is live and ready", lambda r: r.ready),
        ("in_flight", "gauge", "samples that it has been asked for", lambda r: r.in_flight),
        ("proved", "gauge", "policies that it has proved", lambda r: len(r.proved)),
        ("quarantined", "gauge", "policies that it has failed to prove", lambda r: len(r.quarantined)),
        ("strikes_total", "counter", "its faults", lambda r: r.strikes_total),
        ("requests_total", "counter", "requests that it has answered", lambda r: r.requests_total),
        ("samples_total", "counter", "samples that it has answered", lambda r: r.samples_total),
    ):
        found.append((f"replica_{name}", kind, help, [({"replica": r.id}, value(r)) for r in replicas]))
    return found


def _of_policies(router: Router) -> list[tuple[str, str, str, _Labelled]]:
    ready = [replica for replica in router.replicas.values() if replica.ready]
    proved = [
        ({"policy": name}, sum(name in replica.proved for replica in ready))
        for name in islice(router.policies(), MAX_POLICIES)
    ]
    found: list[tuple[str, str, str, _Labelled]] = [
        ("policy_replicas", "gauge", "ready replicas that have proved it", proved)
    ]
    used, total = router.usage.policies(), router.usage.total
    for name, help, value in (
        ("samples_total", "samples that were answered", lambda u: u.samples),
        ("affinity_possible_total", "samples whose prompt had been sent to a replica before", lambda u: u.possible),
        ("affinity_hits_total", "samples that went where their prompt had been sent before", lambda u: u.hits),
    ):
        found.append((name, "counter", f"{help}, under all policies", [({}, value(total))]))
        of_each = [({"policy": policy}, value(usage)) for policy, usage in used.items()]
        found.append((f"policy_{name}", "counter", f"{help}, under the policies used last", of_each))
    return found


def _braces(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"
