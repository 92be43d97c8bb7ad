"""What a run waits for, the one change to make, and what it would bring.

The run is replayed from its own numbers (see `flow` and `replay`), each time with 20 % more of one resource; the one
that helps most names the bottleneck. If none helps by `NOTABLE`, the run is balanced.
"""

from dataclasses import dataclass, field, replace

from grpo_jax.observability.flow import mean_of, measured_flow, steady
from grpo_jax.observability.format import duration, number, percent
from grpo_jax.observability.replay import Flow, cycle_s, gains
from grpo_jax.observability.rundata import RunData

NOTABLE = 0.04
"""The gain, of 20 % more, below which a resource is not called a bottleneck."""

KINDS = {
    "trainer": "trainer-bound",
    "generation": "generation-bound",
    "inflight": "in-flight-capped",
    "publish": "publish-bound",
    "reward": "reward-bound",
}
BALANCED, UNKNOWN = "balanced", "unknown"
_TOLERATED = 0.3  # how far the replay's step time may be from the run's before the numbers are called rough


@dataclass(frozen=True)
class Verdict:
    """`gain`: the share by which the run would be faster with `change`; `gains`: by resource, with 20 % more of it."""

    kind: str
    why: str
    change: str = ""
    gain: float | None = None
    gains: dict[str, float] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        if self.gain is None:
            return self.why
        return f"{self.kind.capitalize()}: {self.why}. {self.change}: about {percent(self.gain)} more steps an hour."


def judge(run: RunData) -> Verdict:
    """The verdict on a run, finished or not. Where the replay takes much longer or shorter than the run, it says so."""
    flow = measured_flow(run)
    if flow is None:
        return Verdict(UNKNOWN, "Too little is recorded to say what this run waited for.")
    found = gains(flow)
    best = max(found, key=lambda name: found[name])
    if found[best] < NOTABLE:
        text = f"Balanced: 20 % more of any one resource would make the run less than {percent(NOTABLE)} faster."
        return Verdict(BALANCED, text, gains=found)
    change, gain = _change(best, flow, found[best])
    why = _why(best, flow)
    measured_s = mean_of(steady(run.metrics), "perf/step_s")
    if measured_s and abs(cycle_s(flow.scaled()) / measured_s - 1) > _TOLERATED:
        why += " (rough: replayed, a step does not take as long as it did)"
    return Verdict(KINDS[best], why, change, gain, found)


def _why(resource: str, flow: Flow) -> str:
    cycle = cycle_s(flow.scaled())
    batch = flow.prompts * flow.samples
    if resource == "trainer":
        return f"the trainer works {percent(min(flow.step_s / cycle, 1.0))} of the time and finds its batches ready"
    if resource in ("generation", "reward"):
        station = getattr(flow, resource)
        busy = min(batch / cycle * station.service_s / station.slots, 1.0)
        whose = "the generators'" if resource == "generation" else "the rewards'"
        return f"{percent(busy)} of {whose} {number(round(station.slots))} slots are at work and the trainer waits"
    if resource == "publish":
        return f"a version can be named only {duration(flow.publish_s)} after its step of {duration(flow.step_s)}"
    limit = min(flow.cap, flow.window * flow.sync_every * batch)
    return f"at most {number(round(limit))} samples may be on their way, too few to keep generators and trainer busy"


def _change(resource: str, flow: Flow, gain: float) -> tuple[str, float]:
    """(what to do, what it brings)."""
    if resource == "trainer":
        return "A step that is 20 % faster (packing, remat off, more devices)", gain
    if resource == "generation":
        return "20 % more replicas, or a faster engine", gain
    if resource == "reward":
        return "20 % more reward workers, or a faster reward", gain
    if resource == "publish":
        return "Publishing 20 % faster (a nearer bucket, a smaller rank) or sync_every raised", gain
    if flow.cap < flow.window * flow.sync_every * flow.prompts * flow.samples:
        return f"A limit of {number(round(1.2 * flow.cap))} instead of {number(flow.cap)} in flight", gain
    small = flow.scaled()
    more = cycle_s(small) / cycle_s(replace(small, window=flow.window + 1)) - 1
    return f"max_staleness {flow.window:.0f} instead of {flow.window - 1:.0f}", more
