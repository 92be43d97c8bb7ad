"""The timeline as inline SVG, in the colours of the page: the learner, each replica, publishes as ticks."""

from collections.abc import Sequence
from html import escape

import numpy as np

from grpo_jax.observability.format import clock, duration
from grpo_jax.observability.rundata import RunData
from grpo_jax.observability.timeline import Interval, in_flight, learner_intervals, publishes, replica_intervals

_WIDTH, _LEFT, _RIGHT = 1000.0, 96.0, 12.0
_TOP, _LANE, _GAP = 26.0, 34.0, 14.0
_BINS = 450
_TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


def timeline_svg(run: RunData) -> str:
    """The drawing, or "" if neither a step nor a group has times."""
    steps, replicas = learner_intervals(run.metrics), replica_intervals(run.groups)
    everything = [*steps.values(), *(i for spans in replicas.values() for i in spans)]
    if not everything:
        return ""
    start, end = min(i[0] for i in everything), max(i[1] for i in everything)
    scale = _Scale(start, max(end, start + 1e-3))
    height = _TOP + (1 + len(replicas)) * (_LANE + _GAP) + 18
    parts = [_axis(scale, height), _publishes(run, scale), _learner_lane(steps, run, scale)]
    edges = np.linspace(scale.start, scale.end, _BINS + 1)
    flights = {name: in_flight(spans, edges) for name, spans in replicas.items()}
    most = max((float(f.max()) for f in flights.values()), default=0.0)
    for row, (name, flight) in enumerate(flights.items(), start=1):
        parts.append(_replica_lane(name, flight, most, row))
    return (
        f'<svg class="timeline" viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img" '
        f'aria-label="When the learner and the replicas were busy">{"".join(parts)}</svg>'
    )


class _Scale:
    def __init__(self, start: float, end: float):
        self.start, self.end = start, end

    def x(self, time: float) -> float:
        return _LEFT + (time - self.start) / (self.end - self.start) * (_WIDTH - _LEFT - _RIGHT)


def _axis(scale: _Scale, height: float) -> str:
    span = scale.end - scale.start
    every = next((t for t in _TICKS_S if span / t <= 10), _TICKS_S[-1])
    out = []
    for k in range(int(span // every) + 1):
        x = scale.x(scale.start + k * every)
        out.append(f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{height - 18:.1f}"/>')
        out.append(
            f'<text class="tick" x="{x:.1f}" y="{height - 4:.1f}" text-anchor="middle">{clock(k * every)}</text>'
        )
    return "".join(out)


def _publishes(run: RunData, scale: _Scale) -> str:
    out = [f'<text class="tick" x="{_LEFT - 12}" y="{_TOP - 11}" text-anchor="end">publishes</text>']
    found = publishes(run)
    half = min(3.5, max(0.6, 300 / max(len(found), 1)))  # many become a row of thin ticks
    for version, time in found.items():
        x = scale.x(time)
        title = f"v{version} handed to the publisher {clock(time - scale.start)} after the start"
        shape = f"M{x - half:.1f} {_TOP - 19}h{2 * half:.1f}l{-half:.1f} 7z"
        out.append(f'<path class="publish" d="{shape}"><title>{title}</title></path>')
    return "".join(out)


def _learner_lane(steps: dict[int, Interval], run: RunData, scale: _Scale) -> str:
    waits = {r["step"]: r.get("perf/rollout_wait_s") for r in run.metrics}
    out = [_lane_label("learner", 0)]
    for step, (start, end) in steps.items():
        left, right = scale.x(start), scale.x(end)
        title = f"step {step}: {duration(end - start)} busy, {duration(waits[step])} waiting before it"
        # A hairline between two steps, where there is room for it.
        width = right - left - (0.8 if right - left > 4 else 0.0)
        out.append(
            f'<rect class="learner" x="{left:.2f}" y="{_TOP + 4:.1f}" width="{max(width, 0.3):.2f}" '
            f'height="{_LANE - 4:.1f}"><title>{title}</title></rect>'
        )
    return "".join(out)


def _replica_lane(name: str, flight: np.ndarray, most: float, row: int) -> str:
    top = _TOP + row * (_LANE + _GAP)
    base = top + _LANE
    return (
        _lane_label(name, row)
        + f'<path class="generator" d="{_area(flight / (most or 1.0), base)}">'
        + f"<title>{escape(name)}: groups in flight, {most:.0f} at the height of the lane</title></path>"
        + f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base:.1f}" y2="{base:.1f}"/>'
    )


def _area(heights: Sequence[float] | np.ndarray, base: float) -> str:
    """A filled staircase over the bins; `heights` are shares of the lane."""
    step = (_WIDTH - _LEFT - _RIGHT) / len(heights)
    path, last = [f"M{_LEFT} {base:.1f}"], 0.0
    for i, height in enumerate(heights):
        if height != last:
            path.append(f"H{_LEFT + i * step:.1f}V{base - height * (_LANE - 4):.1f}")
            last = height
    path.append(f"H{_WIDTH - _RIGHT}V{base:.1f}Z")
    return "".join(path)


def _lane_label(name: str, row: int) -> str:
    y = _TOP + row * (_LANE + _GAP) + _LANE / 2 + 5
    short = name if len(name) <= 13 else name[:12] + "…"
    return f'<text class="lane" x="{_LEFT - 12}" y="{y:.1f}" text-anchor="end">{escape(short)}</text>'
