"""A run as a queueing network, event by event, with the metrics that its learner would have written.

Replicas with slots of their own, chosen by load; samples of random length; reward workers; a trainer whose steps vary;
a publisher that takes the newest; the pacing of the rollout worker. Nothing here knows how the verdict is found.
"""

import heapq
from collections import deque
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

Metrics = dict[str, Any]


@dataclass(frozen=True)
class Regime:
    """Times in seconds, of one sample where nothing else is said. `cap`: samples in flight, beside the pacing."""

    prompts: int
    samples: int
    staleness: int
    replicas: int
    slots: float  # of all replicas together
    generation_s: float
    spread: float
    reward_workers: float
    reward_s: float
    step_s: float
    publish_s: float
    cap: float = float("inf")
    more_window: float = 1.0

    def with_more(self, resource: str, factor: float) -> "Regime":
        if resource == "trainer":
            return replace(self, step_s=self.step_s / factor)
        if resource == "generation":
            return replace(self, slots=self.slots * factor)
        if resource == "inflight":
            return replace(self, cap=self.cap * factor, more_window=self.more_window * factor)
        if resource == "publish":
            return replace(self, publish_s=self.publish_s / factor)
        return replace(self, reward_workers=self.reward_workers * factor)

    @property
    def config(self) -> dict[str, Any]:
        """The keys of a run's config that say the same."""
        return {
            "max_staleness": self.staleness,
            "sync_every": 1,
            "batch": {"prompts_per_step": self.prompts, "group_size": self.samples},
        }


class _Draws:
    """Log-normal times of some mean, drawn in blocks."""

    def __init__(self, seed: tuple[int, int], spread: float, mean: float):
        self._rng, self._spread, self._mean = np.random.default_rng(seed), spread, mean
        self._block: list[float] = []

    def take(self, n: int) -> list[float]:
        if len(self._block) < n:
            drawn = self._rng.lognormal(-(self._spread**2) / 2, self._spread, 4096) * self._mean
            self._block += drawn.tolist()
        taken, self._block[-n:] = self._block[-n:], []
        return taken


class _Pool:
    """Workers that take what came first; knows how long samples have waited and been served, in all."""

    def __init__(self, workers: int):
        self._free = [0.0] * workers
        self.waited = self.served = 0.0

    @property
    def free_at(self) -> float:
        return self._free[0]

    def take(self, now: float, service: float) -> float:
        start = max(now, self._free[0])
        heapq.heapreplace(self._free, start + service)
        self.waited += start - now
        self.served += service
        return start + service


def simulate(regime: Regime, steps: int, seed: int = 0) -> list[Metrics]:
    """The metrics of the steps 0 … steps − 1."""
    return _Simulation(regime, seed).run(steps)


def cycle_s(metrics: list[Metrics], skip: int) -> float:
    """Seconds a step, without the first `skip`."""
    return float(np.mean([r["perf/step_s"] for r in metrics[skip:]]))


class _Simulation:
    def __init__(self, regime: Regime, seed: int):
        self.r = regime
        share, rest = divmod(round(regime.slots), regime.replicas)
        self._replicas = [_Pool(share + (i < rest)) for i in range(regime.replicas)]
        self._scorers = _Pool(max(round(regime.reward_workers), 1))
        # One stream each, so that a regime with more of something draws the same numbers for all else.
        self._lengths = _Draws((seed, 0), regime.spread, regime.generation_s)
        self._rewards = _Draws((seed, 1), 0.2, regime.reward_s)
        self._jitter = _Draws((seed, 2), 0.05, regime.step_s)
        self._events: list[tuple[float, int, str, int]] = []
        self._order = count()
        self._version = self._started = self._inflight = 0
        self._ready: list[int] = []
        self._born: dict[int, int] = {}
        self._longest: deque[float] = deque(maxlen=regime.prompts)
        self._idle_since, self._busy = 0.0, False
        self._handed: int | None = None
        self._publishing = False
        self._held_since: float | None = None
        self._held = 0.0
        self._records: list[Metrics] = []
        self._last = (0.0,) * 7
        self._sampled = 0
        self._wait = self._last_end = self._last_publish = 0.0

    def run(self, steps: int) -> list[Metrics]:
        self._admit(0.0)
        while len(self._records) < steps:
            now, _, what, number = heapq.heappop(self._events)
            getattr(self, f"_{what}")(now, number)
            self._train(now)
            self._admit(now)
        return self._records

    def _admit(self, now: float) -> None:
        r = self.r
        limit = ((r.staleness + 1) * r.more_window + self._version) * r.prompts
        while self._started < limit and (self._inflight + r.samples <= r.cap or not self._inflight):
            lengths = self._lengths.take(r.samples)
            replica = min(self._replicas, key=lambda pool: pool.free_at)
            end = max([replica.take(now, length) for length in lengths])
            self._longest.append(max(lengths))
            self._born[self._started] = self._version
            self._at(end, "generated", self._started)
            self._started += 1
            self._inflight += r.samples
        held = self._started >= limit
        if held and self._held_since is None:
            self._held_since = now
        elif not held and self._held_since is not None:
            self._held += now - self._held_since
            self._held_since = None

    def _generated(self, now: float, number: int) -> None:
        self._sampled += self.r.samples
        times = self._rewards.take(self.r.samples)
        self._at(max([self._scorers.take(now, t) for t in times]), "scored", number)

    def _scored(self, now: float, number: int) -> None:
        self._inflight -= self.r.samples
        heapq.heappush(self._ready, number)

    def _train(self, now: float) -> None:
        if self._busy or len(self._ready) < self.r.prompts:
            return
        batch = [heapq.heappop(self._ready) for _ in range(self.r.prompts)]
        self._batch_lags = [len(self._records) - self._born.pop(g) for g in batch]
        self._busy, self._wait, self._queue = True, now - self._idle_since, len(self._ready)
        self._at(now + self._jitter.take(1)[0], "trained", 0)

    def _trained(self, now: float, _: int) -> None:
        self._busy, self._idle_since = False, now
        self._records.append(self._record(now))
        self._handed = len(self._records)
        self._publish(now)

    def _publish(self, now: float) -> None:
        if not self._publishing and self._handed is not None:
            self._publishing = True
            self._last_publish = self.r.publish_s
            self._at(now + self.r.publish_s, "published", self._handed)
            self._handed = None

    def _published(self, now: float, version: int) -> None:
        self._publishing, self._version = False, version
        self._publish(now)

    def _record(self, now: float) -> Metrics:
        r, waits, runs = self.r, sum(p.waited for p in self._replicas), sum(p.served for p in self._replicas)
        held = self._held + (now - self._held_since if self._held_since is not None else 0.0)
        counters = (now, runs, waits, self._scorers.served, self._scorers.waited, held, self._sampled)
        dt, run, wait, score, score_wait, held_s, sampled = (a - b for a, b in zip(counters, self._last, strict=True))
        self._last = counters
        step = now - self._last_end
        self._last_end = now
        return {
            "step": len(self._records),
            "perf/step_s": step,
            "perf/rollout_wait_s": self._wait,
            "perf/fwd_bwd_s": step - self._wait,
            "sample/rollout_queue_size": float(self._queue),
            "sample/staleness_max": float(max(self._batch_lags)),
            "rollout/generated_tok_s": 100.0 * sampled / dt,
            "rollout/inflight": float(self._inflight),
            "rollout/backpressure_s": held_s,
            "policy/time_to_name_s": self._last_publish,
            "completions/mean_length": 100.0,
            "completions/max_length": 100.0 * max(self._longest) / r.generation_s,
            "batch/samples": float(r.prompts * r.samples),
            "fleet/slots": float(round(r.slots)),
            "fleet/running": run / dt,
            "fleet/waiting": wait / dt,
            "rollout/scoring_slots": float(max(round(r.reward_workers), 1)),
            "rollout/scoring": score / dt,
            "rollout/scoring_waiting": score_wait / dt,
            **({"rollout/inflight_cap": r.cap} if np.isfinite(r.cap) else {}),
        }

    def _at(self, time: float, what: str, number: int) -> None:
        heapq.heappush(self._events, (time, next(self._order), what, number))


def random_regime(seed: int) -> Regime:
    """Anything from a trainer that never waits to one that waits for a bucket: all times over a decade or more."""
    rng = np.random.default_rng(seed)

    def between(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    prompts, samples = int(rng.choice([4, 8, 16])), int(rng.choice([2, 4]))
    batch = prompts * samples
    slots = 5 * max(round(batch * between(0.3, 2.0) / 5), 1)
    workers = int(rng.choice([5, 10, 20]))
    batch_generation_s, batch_reward_s = between(3, 30), between(0.3, 30)  # with all slots at work
    return Regime(
        prompts=prompts,
        samples=samples,
        staleness=int(rng.integers(0, 9)),
        replicas=int(rng.integers(1, 4)),
        slots=slots,
        generation_s=batch_generation_s * slots / batch,
        spread=float(rng.uniform(0.1, 0.7)),
        reward_workers=workers,
        reward_s=batch_reward_s * workers / batch,
        step_s=between(3, 30),
        publish_s=between(0.3, 60),
        cap=float("inf") if rng.random() < 0.6 else samples * max(round(prompts * between(0.7, 6)), 1),
    )
