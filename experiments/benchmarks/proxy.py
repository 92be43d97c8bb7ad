"""Load on the proxy: `python -m experiments.benchmarks.proxy [--json] [--replicas N …] [--rates R …]`

The proxy, a process of its own, has the first core. Simulated replicas that take two seconds for an answer, and the
load generator, share the second: raw protocols, so that they bound nothing (how late they sent is shown). Open loop:
Poisson arrivals at fixed rates, so that twice the rate is in flight. Each load is made straight to the replicas and
then through the proxy; what is added is the difference of the quantiles of latency.

The hit rate comes from a load of groups of eight separate samples of one prompt, as the replicas saw it. The first
sample of a group cannot hit, so 87.5 % is the best possible.
"""

import argparse
import json
from typing import Any

from experiments.benchmarks.peers.result import machine
from experiments.benchmarks.proxy_load import Load, Result
from experiments.benchmarks.proxy_loop import pin
from experiments.benchmarks.proxy_sides import POLICY, Proxy, Side, started_proxy
from grpo_jax.versions import versions

GROUP = 8
ANSWER_S = 2.0
MOST_ADDED_MS = 5.0  # at the median, for a rate to count as sustained


def measure(load: Side, urls: list[str], proxy: Proxy, rate: float, seconds: float) -> dict[str, Any]:
    """One rate, without the proxy and with it."""
    common: dict[str, Any] = {"model": POLICY, "rate": rate, "warm_s": ANSWER_S + 0.5, "measured_s": seconds}
    direct = load.load(Load(urls=urls, **common))
    before = proxy.cpu_s()
    through = load.load(Load(urls=[proxy.url], **common))
    cpu_s = proxy.cpu_s() - before
    asked = rate * (common["warm_s"] + seconds)
    return {
        "replicas": len(urls),
        "rate": rate,
        "answered_per_s": through.answered_per_s,
        "most_in_flight": through.most_in_flight,
        "failures": direct.failures + through.failures,
        "added_ms_p50": through.p50 - direct.p50,
        "added_ms_p99": through.p99 - direct.p99,
        "direct_ms": [direct.p50, direct.p99],
        "lateness_ms_p99": [direct.lateness_p99, through.lateness_p99],
        "cpu_us_per_request": 1e6 * cpu_s / asked,
        "rss_mb": proxy.rss_mb(),
        "sustained": _sustained(through, rate, through.p50 - direct.p50),
    }


def _sustained(through: Result, rate: float, added_ms: float) -> bool:
    return not through.failures and through.answered_per_s > 0.95 * rate and added_ms < MOST_ADDED_MS


def hits(load: Side, replicas: Side, urls: list[str], proxy: Proxy, rate: float, seconds: float) -> dict[str, Any]:
    """The share of samples that came to a replica which had their prompt, and how even the replicas' shares were."""
    replicas.ask("")
    result = load.load(Load([proxy.url], POLICY, rate, warm_s=0.0, measured_s=seconds, group=GROUP))
    seen = replicas.ask("")
    table = proxy.get("/fleet")
    samples, repeated = sum(seen["samples"]), sum(seen["repeated"])
    return {
        "replicas": len(urls),
        "rate": rate,
        "samples": samples,
        "failures": result.failures,
        "affinity_hit": repeated / samples,
        "best_possible": 1 - 1 / GROUP,
        "balance_max_over_mean": max(seen["samples"]) * len(urls) / samples,
        "proxy_says": [table["hit_rate"], table["best_hit_rate"]],
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    levels: list[dict[str, Any]] = []
    affinity: list[dict[str, Any]] = []
    first, second = arguments.cores
    pin(second)
    with Side("proxy_load", f"--core={second}") as load:
        for count in arguments.replicas:
            with Side("proxy_replicas", str(count), f"--answer-s={ANSWER_S}", f"--core={second}") as replicas:
                urls = replicas.read()["urls"]
                if count > 1:  # in a proxy of its own, so that what this one says of hits is of this load
                    with started_proxy(urls, first) as proxy:
                        affinity.append(hits(load, replicas, urls, proxy, arguments.hit_rate, 2 * arguments.seconds))
                        print(_line(affinity[-1]), flush=True)
                with started_proxy(urls, first) as proxy:
                    for rate in arguments.rates:
                        levels.append(measure(load, urls, proxy, rate, arguments.seconds))
                        print(_line(levels[-1]), flush=True)
    return {**summary(levels, affinity), "levels": levels, "affinity": affinity}


def summary(levels: list[dict[str, Any]], affinity: list[dict[str, Any]]) -> dict[str, Any]:
    """The highest rate that every number of replicas sustained (else the lowest rate), and the worst of it."""
    rates = sorted({level["rate"] for level in levels})
    at = {rate: [level for level in levels if level["rate"] == rate] for rate in rates}
    good = [rate for rate in rates if all(level["sustained"] for level in at[rate])]
    chosen = at[max(good) if good else rates[0]]
    return {
        "requests_per_s": min(level["answered_per_s"] for level in chosen),
        "added_ms_p50": max(level["added_ms_p50"] for level in chosen),
        "added_ms_p99": max(level["added_ms_p99"] for level in chosen),
        "affinity_hit": min((found["affinity_hit"] for found in affinity), default=None),
        "balance_max_over_mean": max((found["balance_max_over_mean"] for found in affinity), default=None),
        "sustained": bool(good),
    }


def _line(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_number(value)}" for key, value in values.items())


def _number(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(map(_number, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description="Requests a second, added latency and prefix hits of the proxy.")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4, 64])
    parser.add_argument("--rates", type=float, nargs="+", default=[1000.0, 1500.0, 2048.0], help="requests a second")
    parser.add_argument("--hit-rate", type=float, default=1000.0, help="samples a second of the load in groups")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured, of each load")
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="of the proxy; of load and replicas")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    arguments = parser.parse_args()
    result = run(arguments)
    for key in ("requests_per_s", "added_ms_p50", "added_ms_p99", "affinity_hit", "balance_max_over_mean"):
        value = result[key]
        print(f"{key:22} {'not measured' if value is None else f'{value:.4g}'}")
    print(f"machine: {machine()}; {', '.join(f'{package} {number}' for package, number in versions().items())}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
