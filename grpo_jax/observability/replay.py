"""What a run would do if one of its resources were faster: a small replay of groups through generators, rewards and
trainer, under the limit on how many may be on their way.

Time runs in events of whole groups. A station works on `slots` samples at a time, first come, first served; a group
leaves it with its last sample. A batch takes the groups that were started first among those that are ready, and the
k-th group starts only if k < (window + v) · groups per version, v the newest version that can be named.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, cycle, islice
from statistics import NormalDist

import numpy as np

RESOURCES = ("trainer", "generation", "inflight", "publish", "reward")

_LARGEST_BATCH = 128  # samples; a larger batch is replayed at a smaller scale
_STEPS, _WARM_UP = 72, 12
_DRAWS = 1009


@dataclass(frozen=True)
class Station:
    """`slots`: samples at work at one time; `service_s`: of one sample, without waiting for a slot."""

    slots: float
    service_s: float


@dataclass(frozen=True)
class Flow:
    """A run in a dozen numbers.

    `window` is max_staleness + 1; `cap`: samples that may be in flight at one time, beside the window; `step_s` is the
    trainer's time for a batch that is complete; `publish_s` goes by from the end of a step until its version can be
    named; `spread` is the standard deviation of the logarithm of a sample's generation time.
    """

    prompts: int
    samples: int
    window: float
    step_s: float
    publish_s: float
    generation: Station
    reward: Station
    sync_every: int = 1
    cap: float = float("inf")
    spread: float = 0.0

    def with_more(self, resource: str, factor: float) -> "Flow":
        """With `factor` times as much of one resource: replicas, reward workers, groups on their way, or speed."""
        if resource == "trainer":
            return replace(self, step_s=self.step_s / factor)
        if resource == "publish":
            return replace(self, publish_s=self.publish_s / factor)
        if resource == "inflight":
            return replace(self, cap=self.cap * factor, window=self.window * factor)
        station = getattr(self, resource)
        return replace(self, **{resource: replace(station, slots=station.slots * factor)})

    def scaled(self) -> "Flow":
        """The same run with fewer groups a step, where that saves work; a group is never cut."""
        prompts = max(round(_LARGEST_BATCH / self.samples), 1)
        if self.prompts <= prompts:
            return self
        share = prompts / self.prompts
        generation, reward = (replace(s, slots=s.slots * share) for s in (self.generation, self.reward))
        return replace(self, prompts=prompts, cap=self.cap * share, generation=generation, reward=reward)


def gains(flow: Flow, factor: float = 1.2) -> dict[str, float]:
    """By resource: the share by which the run would be faster with `factor` times as much of it alone."""
    flow = flow.scaled()
    now = cycle_s(flow)
    return {name: now / cycle_s(flow.with_more(name, factor)) - 1.0 for name in RESOURCES}


@lru_cache(maxsize=64)
def cycle_s(flow: Flow) -> float:
    """Seconds from step to step, once the run has got going."""
    replayed = _Replay(flow)
    ends = replayed.run(_STEPS)
    return (ends[-1] - ends[_WARM_UP]) / (_STEPS - 1 - _WARM_UP)


class _Servers:
    """A station's slots. A fraction of a slot makes all of them a little faster."""

    def __init__(self, station: Station, services: Iterator[float]):
        slots = max(int(station.slots), 1)
        self._free = [0.0] * slots
        self._scale = station.service_s * slots / max(station.slots, 1e-9) if station.slots < 1e9 else station.service_s
        self._services = services
        self._is_delay = station.slots >= 4096 or station.service_s == 0  # nobody ever waits here

    def serve(self, now: float, samples: int) -> float:
        """When the last of some samples that come now has been served."""
        services = [self._scale * x for x in islice(self._services, samples)]
        if self._is_delay:
            return now + max(services)
        last = now
        for service in services:
            end = max(now, self._free[0]) + service
            heapq.heapreplace(self._free, end)
            last = max(last, end)
        return last


class _Replay:
    def __init__(self, flow: Flow):
        self.flow = flow
        self._generation = _Servers(flow.generation, _draws(flow.spread))
        self._reward = _Servers(flow.reward, _draws(0.0))
        self._events: list[tuple[float, int, str, int]] = []
        self._order = count()
        self._version, self._started, self._running = 0, 0, 0
        self._ready: list[int] = []
        self._training = self._publishing = False
        self._handed: int | None = None
        self._ends: list[float] = []

    def run(self, steps: int) -> list[float]:
        self._start(0.0)
        while len(self._ends) < steps:
            now, _, what, number = heapq.heappop(self._events)
            if what == "generated":
                self._at(self._reward.serve(now, self.flow.samples), "scored", number)
            elif what == "scored":
                self._running -= self.flow.samples
                heapq.heappush(self._ready, number)
            elif what == "trained":
                self._training = False
                self._ends.append(now)
                if len(self._ends) % self.flow.sync_every == 0:
                    self._handed = len(self._ends) // self.flow.sync_every
                    self._publish(now)
            else:
                self._publishing, self._version = False, number
                self._publish(now)
            self._train(now)
            self._start(now)
        return self._ends

    def _start(self, now: float) -> None:
        flow = self.flow
        limit = (flow.window + self._version) * flow.prompts * flow.sync_every
        while self._started < limit and (self._running + flow.samples <= flow.cap or not self._running):
            self._at(self._generation.serve(now, flow.samples), "generated", self._started)
            self._started += 1
            self._running += flow.samples

    def _train(self, now: float) -> None:
        if not self._training and len(self._ready) >= self.flow.prompts:
            for _ in range(self.flow.prompts):
                heapq.heappop(self._ready)
            self._training = True
            self._at(now + self.flow.step_s, "trained", 0)

    def _publish(self, now: float) -> None:
        if not self._publishing and self._handed is not None:
            self._at(now + self.flow.publish_s, "published", self._handed)
            self._publishing, self._handed = True, None

    def _at(self, time: float, what: str, number: int) -> None:
        heapq.heappush(self._events, (time, next(self._order), what, number))


def _draws(spread: float) -> Iterator[float]:
    """Without end: service times of mean 1, log-normal, the same for every replay; evenly over the quantiles."""
    if spread == 0:
        return cycle((1.0,))
    values = np.exp(spread * np.random.default_rng(0).permutation(_normal_quantiles(_DRAWS)))
    return cycle((values / values.mean()).tolist())


def _normal_quantiles(n: int) -> np.ndarray:
    return np.array([NormalDist().inv_cdf((i + 0.5) / n) for i in range(n)])
