"""What does a publish cost? `python -m experiments.benchmarks.exchange [--json] [--replicas 2] [--publishes N]`

vLLM replicas with their agents, a proxy and a bucket on this machine, under a steady load of streamed completions of
`latest`. Adapters are published one after the other by the real publisher, with canaries of the learner's model; after
every second one another adapter is brought to the same servers the blocking way: pause all of them, write it, load it
on one after the other, resume. Then the publisher alone, into a bucket that takes 30 s for each object.

- *stall*: how long `submit` holds the training loop.
- *served*: from `submit` to the first answer through the proxy under the new name: under the load, and at the end to
  replicas that have nothing else to do.
- *gap*: from one token of a completion to its next, as the client sees it; `load` are those in the time from `submit`
  until every replica has proved the version, and those of pauses count in neither.
- *silence*: the longest time without a token of any completion, around one publish of either kind.
- *held*: what the generators hold after each tenth of the publishes: memory, file descriptors, adapters on disk.

With --json the last line is one JSON object.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from experiments.benchmarks.exchange_fleet import Fleet, Held, LoadProcess, pause_load_resume, unload
from experiments.benchmarks.exchange_gaps import Span, gaps_of, histogram, silence_ms
from experiments.benchmarks.exchange_learner import PublishingLearner
from experiments.benchmarks.exchange_load import PROMPT_TOKENS
from experiments.benchmarks.peers.result import machine
from grpo_jax.config.load import load_config
from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_USAGE, UsageError
from grpo_jax.jobs.local import default_environment
from grpo_jax.storage.bucket import Bucket
from grpo_jax.versions import versions

ROOT = Path(__file__).parents[2]
_RUN_S = 60.0
# Before the first publish, and after each of either kind.
_QUIET_S, _SETTLE_S = 5.0, 1.5
_IDLE_PUBLISHES = 10
_SLOW_OBJECT_S, _SLOW_SUBMITS, _SLOW_PERIOD_S = 30, 20, 1.0


@dataclass
class Measured:
    """Seconds, and spans on the monotonic clock; one of each a publish or a pause."""

    stalls: list[float] = field(default_factory=list)
    slow_stalls: list[float] = field(default_factory=list)
    served: list[float] = field(default_factory=list)
    served_idle: list[float] = field(default_factory=list)
    publishes: list[Span] = field(default_factory=list)
    pauses: list[Span] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    t: np.ndarray = field(default_factory=lambda: np.zeros(0))
    completion: np.ndarray = field(default_factory=lambda: np.zeros(0, int))


def measure(config: Config, arguments: argparse.Namespace, folder: Path) -> Measured:
    found = Measured()
    started = time.monotonic()
    fleet = Fleet(config, arguments.replicas, folder)
    load: LoadProcess | None = None
    learner: PublishingLearner | None = None
    try:
        learner = PublishingLearner(config, arguments.publishes + _IDLE_PUBLISHES)
        learner.begin()
        fleet.wait_until_started()
        print(f"{arguments.replicas} replicas serve v0 after {time.monotonic() - started:.0f} s", flush=True)
        out = folder / "load.npz"
        load = streams = LoadProcess(fleet.url, out, arguments.concurrency, arguments.new_tokens)
        fleet.wait(lambda: _heard(streams).running, _RUN_S, "a token of every completion")
        time.sleep(_QUIET_S)
        for version in range(1, arguments.publishes + 1):
            served, span = _publish(version, learner, fleet, load, found)
            found.served.append(served)
            found.publishes.append(span)
            time.sleep(_SETTLE_S)
            found.held.append(fleet.held())
            if version % 2 == 0:
                _pause(version, learner, fleet, load, found, folder, arguments.concurrency)
                time.sleep(_SETTLE_S)
        counts = load.finish()
        print(f"load: {counts['tokens']} tokens, {counts['failures']} failed requests", flush=True)
        load = LoadProcess(fleet.url, folder / "idle.npz", 0, 1)
        for version in range(arguments.publishes + 1, arguments.publishes + 1 + _IDLE_PUBLISHES):
            found.served_idle.append(_publish(version, learner, fleet, load, found)[0])
            time.sleep(_SETTLE_S)
        load.finish()
        with np.load(out) as file:
            found.t, found.completion = file["t"], file["completion"]
        slow = learner.publisher_into(Bucket(f"faulty:slow={_SLOW_OBJECT_S}:{folder / 'slow'}"))
        for version in range(_SLOW_SUBMITS):
            found.slow_stalls.append(learner.submit(slow, version % (arguments.publishes + 1)))
            time.sleep(_SLOW_PERIOD_S)
    finally:
        if learner is not None:
            learner.finish()
        if load is not None:
            load.kill()
        fleet.stop()
    return found


def _publish(
    version: int, learner: PublishingLearner, fleet: Fleet, load: LoadProcess, found: Measured
) -> tuple[float, Span]:
    """Seconds until the version was first seen to answer, and the time until all replicas had proved it."""
    assert learner.publisher is not None
    submitted = time.monotonic()
    found.stalls.append(learner.submit(learner.publisher, version))
    fleet.wait(lambda: version in _heard(load).first_seen, _RUN_S, f"an answer under version {version}")
    proved = fleet.wait_until_proved(version)
    return load.first_seen[version] - submitted, Span(submitted, proved)


def _pause(
    version: int,
    learner: PublishingLearner,
    fleet: Fleet,
    load: LoadProcess,
    found: Measured,
    folder: Path,
    concurrency: int,
) -> None:
    # Under a name that no server and no agent knows, so that the servers load it whatever they hold.
    name, urls = f"paused-{version}", fleet.replica_urls()
    pause = pause_load_resume(urls, name, folder / name, lambda: learner.files(version))
    # Until all completions go on: the prompts of those that were paused are computed again.
    before = _heard(load).count
    fleet.wait(lambda: _heard(load).count >= before + 2 * concurrency, _RUN_S, "a token after a pause")
    found.pauses.append(Span(pause.started, time.monotonic()))
    unload(urls, name)


def _heard(load: LoadProcess) -> LoadProcess:
    load.hear()
    return load


def report(found: Measured) -> dict[str, float | None]:
    """Prints the tables; the JSON object."""
    gaps = gaps_of(found.t, found.completion)
    paused = gaps.within(found.pauses)
    loading = gaps.within(found.publishes) & ~paused
    plain, load = gaps.ms[~paused & ~loading], gaps.ms[loading]
    rows = {
        "publish stall": 1e3 * np.array(found.stalls),
        f"publish stall, {_SLOW_OBJECT_S} s an object": 1e3 * np.array(found.slow_stalls),
        "publish to served": 1e3 * np.array(found.served),
        "publish to served, idle replicas": 1e3 * np.array(found.served_idle),
        "publish to proved on all replicas": 1e3 * np.array([span.ended - span.started for span in found.publishes]),
        "silence around a publish": np.array([silence_ms(found.t, span) for span in found.publishes]),
        "silence around pause-load-resume": np.array([silence_ms(found.t, span) for span in found.pauses]),
        "gap between tokens": plain,
        "gap between tokens, load": load,
    }
    print(f"{'ms':36}{'p50':>9}{'p99':>9}{'max':>9}{'n':>8}")
    for name, values in rows.items():
        numbers = "".join("        -" if x is None else f"{x:9.1f}" for x in (*_percentiles(values), _max(values)))
        print(f"{name:36}{numbers}{len(values):8d}")
    print(histogram({"plain": plain, "load": load, "pause": gaps.ms[paused]}))
    for i in sorted({round(x) for x in np.linspace(0, len(found.held) - 1, 11)}):
        held = found.held[i]
        print(
            f"held after {i + 1} publishes: {held.rss_mb:,.0f} MB, {held.descriptors} file descriptors, "
            f"{held.adapters} adapters on disk"
        )
    values = list(rows.values())
    (stall, stall_99), (slow, slow_99) = _percentiles(values[0]), _percentiles(values[1])
    return {
        "publish_stall_ms_p50": stall,
        "publish_stall_ms_p99": stall_99,
        "publish_stall_slow_bucket_ms_p50": slow,
        "publish_stall_slow_bucket_ms_p99": slow_99,
        # What the system takes. Under a load that saturates the cores the engines' decode steps are most of it.
        "publish_to_served_ms_p50": _percentiles(values[3])[0],
        "publish_to_served_loaded_ms_p50": _percentiles(values[2])[0],
        "blocking_ms_p50": _percentiles(values[6])[0],
        "decode_gap_ms_p50": _percentiles(plain)[0],
        "decode_gap_ms_p99": _percentiles(plain)[1],
        "decode_gap_load_ms_p99": _percentiles(load)[1],
        "held_mb_growth": _growth([held.rss_mb for held in found.held]),
    }


def _percentiles(values: np.ndarray) -> tuple[float | None, float | None]:
    """(median, 99th percentile); None without values."""
    return (None, None) if not len(values) else (float(np.percentile(values, 50)), float(np.percentile(values, 99)))


def _growth(values: list[float]) -> float | None:
    """From the second tenth of the values to the last, as medians: the first has what is allocated once."""
    tenth = len(values) // 10
    return float(np.median(values[-tenth:]) - np.median(values[tenth : 2 * tenth])) if tenth else None


def _max(values: np.ndarray) -> float | None:
    return float(values.max()) if len(values) else None


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a publish costs, against pausing the fleet for it.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the config")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--publishes", type=int, default=30)
    parser.add_argument("--concurrency", type=int, default=16, help="completions that stream at a time")
    parser.add_argument("--new-tokens", type=int, default=96, help="of each completion")
    parser.add_argument("--dir", type=Path, help="a new folder, to keep logs and bucket; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    return parser.parse_args()


def config_of(arguments: argparse.Namespace, folder: Path) -> Config:
    """The config with a bucket of its own, room for the load's completions, and servers that can be paused."""
    config = load_config(arguments.config, arguments.overrides)
    length = max(config.batch.row_tokens, PROMPT_TOKENS + arguments.new_tokens)
    return load_config(
        arguments.config,
        [
            *arguments.overrides,
            f"bucket={folder / 'bucket'}",
            f"batch.row_tokens={length}",
            "generator.env.VLLM_SERVER_DEV_MODE='1'",
        ],
    )


def main() -> None:
    arguments = parsed()
    default_environment()
    # So that a benchmark that is stopped stops what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="grpo_jax-benchmark-", ignore_cleanup_errors=True) as name:
        folder = arguments.dir.absolute() if arguments.dir else Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            found = measure(config_of(arguments, folder), arguments, folder)
        except UsageError as error:
            print(error, file=sys.stderr)
            raise SystemExit(EXIT_USAGE) from None
    values = report(found)
    print(f"machine: {machine()}; {', '.join(f'{package} {number}' for package, number in versions().items())}")
    if arguments.json:
        print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
