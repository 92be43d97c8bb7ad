"""What the proxy counts, as Prometheus text."""

from collections import Counter
from dataclasses import dataclass, field

OUTCOMES = ("ok", "request_error", "not_found", "unavailable", "cancelled", "internal_error")


@dataclass
class Metrics:
    requests: Counter[str] = field(default_factory=Counter)  # by outcome
    in_flight: int = 0
    retries: int = 0
    strikes: int = 0
    seconds: float = 0.0

    def finished(self, outcome: str, seconds: float) -> None:
        self.requests[outcome] += 1
        self.seconds += seconds

    def text(self, replicas_ready: int) -> str:
        lines = []
        for name, kind, help, value in (
            ("in_flight", "gauge", "client requests under way", self.in_flight),
            ("retries_total", "counter", "attempts that were made again elsewhere", self.retries),
            ("strikes_total", "counter", "faults of replicas", self.strikes),
            ("replicas_ready", "gauge", "replicas that are live and ready", replicas_ready),
        ):
            lines += [*_head(name, kind, help), f"grpo_jax_proxy_{name} {value}"]
        lines += _head("requests_total", "counter", "client requests by outcome")
        lines += [f'grpo_jax_proxy_requests_total{{outcome="{o}"}} {self.requests[o]}' for o in OUTCOMES]
        lines += _head("request_seconds", "summary", "from the arrival of a request to the end of its answer")
        lines.append(f"grpo_jax_proxy_request_seconds_sum {self.seconds:.6f}")
        lines.append(f"grpo_jax_proxy_request_seconds_count {self.requests.total()}")
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, help: str) -> list[str]:
    return [f"# HELP grpo_jax_proxy_{name} {help}", f"# TYPE grpo_jax_proxy_{name} {kind}"]
