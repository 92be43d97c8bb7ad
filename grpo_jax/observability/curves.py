"""Small line charts over the steps of a run, as inline SVG in the colours of the page."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from grpo_jax.observability.evaluations import passed_at, step_of
from grpo_jax.observability.format import number, percent
from grpo_jax.observability.metrics import Metrics
from grpo_jax.observability.rundata import RunData

_WIDTH, _HEIGHT = 340.0, 170.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 40.0, 8.0, 8.0, 20.0
_COLOURS = 6
_MOST_POINTS = 400
_LAG = re.compile(r"mismatch/lag(\d+)/mean")
_MOST_LINES = 6
_RESOURCES = {
    "trainer": "the trainer's speed",
    "generation": "replicas",
    "inflight": "groups on their way",
    "publish": "the speed of publishing",
    "reward": "reward workers",
}


@dataclass(frozen=True)
class Line:
    label: str
    points: Sequence[tuple[float, float]]  # (step, value)
    dots: bool = False  # single measurements rather than a course


@dataclass(frozen=True)
class Chart:
    title: str
    lines: Sequence[Line]
    logarithmic: bool = False

    @property
    def left_out(self) -> int:
        """Lines for which there are no colours."""
        return max(len(self.lines) - _MOST_LINES, 0)

    @property
    def drawn(self) -> list[Line]:
        """Those with the most points, in the order of all: of many lags the ones that a run trains on, not the rare."""
        fullest = sorted(range(len(self.lines)), key=lambda i: -len(self.lines[i].points))[:_MOST_LINES]
        return [self.lines[i] for i in sorted(fullest)]


def charts(run: RunData) -> list[Chart]:
    """What there is to draw of: reward by parts, evaluations, |Δlogp| by lag, entropy, lengths, updates, the fleet."""
    m = run.metrics
    parts = sorted({k for r in m for k in r if k.startswith("rewards/")})
    lags = sorted({int(match[1]) for r in m for k in r if (match := _LAG.fullmatch(k))})
    by_lag = [(f"mismatch/lag{k}/mean", f"lag {k}") for k in lags]
    published = [("policy/publish_s", "the pointer"), ("policy/time_to_serve_s", "an answer")]
    lengths = [("completions/mean_length", "mean"), ("completions/max_length", "longest")]
    clips = [("clip_ratio/low", "clipped low"), ("clip_ratio/high", "clipped high")]
    found = [
        Chart("Reward and its parts", _lines(m, [("reward", "reward"), *((k, k[8:]) for k in parts)])),
        Chart("Evaluation", _evaluations(run)),
        Chart("|log π − log μ|, mean, by lag in steps", _lines(m, by_lag), True),
        Chart("Entropy", _lines(m, [("entropy", "nats a token")])),
        Chart("Completion length in tokens", _lines(m, lengths)),
        Chart("Completions that were cut", _lines(m, [("completions/clipped_frac", "share")])),
        Chart("Groups whose rewards are all equal", _lines(m, [("groups/zero_variance_frac", "share")])),
        Chart("Norm of the gradient", _lines(m, [("grad_norm", "before clipping")])),
        Chart("Tokens that the objective clipped", _lines(m, clips)),
        Chart("KL to the base, to the sampler", _lines(m, [("kl_ref", "base"), ("kl", "sampler")])),
        Chart("Generated tokens a second", _lines(m, [("rollout/generated_tok_s", "all replicas")])),
        Chart("Samples on the replicas", _lines(m, [("fleet/running", "at work"), ("fleet/waiting", "waiting")])),
        Chart("Replicas that serve the newest policy", _lines(m, [("fleet/replicas_proved", "proved")])),
        Chart("Seconds from a publish to …", _lines(m, published)),
    ]  # fmt: skip
    return [chart for chart in found if chart.lines]


def curves_html(run: RunData) -> str:
    """All charts of a run, or "" where there is nothing to draw."""
    drawn = "".join(_figure(chart) for chart in charts(run))
    return drawn and f'<div class="charts">{drawn}</div>'


def gains_html(gains: Mapping[str, float]) -> str:
    """How much faster the run would be with 20 % more of each resource; "" where that is not known."""
    rows = []
    for key, gain in sorted(gains.items(), key=lambda item: -item[1]):
        width, text = min(max(gain, 0.0), 0.4) * 500, percent(max(gain, 0.0))
        bar = f'<rect width="{width:.1f}" height="10"/>'
        svg = f'<svg viewBox="0 0 200 10" preserveAspectRatio="none" role="img" aria-label="{text}">{bar}</svg>'
        rows.append(f'<tr><td>{_RESOURCES[key]}</td><td class="bar">{svg}</td><td>{text}</td></tr>')
    head = "<tr><th>With 20 % more of</th><th></th><th>faster by</th></tr>"
    if not rows:
        return ""
    return (
        f'<div class="wide"><table class="gains"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'
        '<p class="note">The run replayed from its own times, each time with one resource changed.</p>'
    )


def _figure(chart: Chart) -> str:
    """A figure: title, lines with their last values, axes."""
    legend = "".join(
        f'<span class="c{i % _COLOURS}">{escape(line.label)} {number(line.points[-1][1])}</span>'
        for i, line in enumerate(chart.drawn)
    )
    if chart.left_out:
        legend += f"<span>and {chart.left_out} more</span>"
    return (
        f'<figure><figcaption>{escape(chart.title)}</figcaption><p class="key">{legend}</p>'
        f'<svg class="chart" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{escape(chart.title)}">'
        f"{_drawing(chart)}</svg></figure>"
    )


def _drawing(chart: Chart) -> str:
    xs = [x for line in chart.drawn for x, _ in line.points]
    ys = [y for line in chart.drawn for _, y in line.points]
    low, high, ticks = _log_range(ys) if chart.logarithmic else _range(ys)
    first, last = min(xs), max(max(xs), min(xs) + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        y = math.log10(y) if chart.logarithmic else y
        share = (y - low) / (high - low)
        return (
            _LEFT + (x - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM),
        )

    out = []
    for value in ticks:
        _, y = place(first, value)
        out.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{_tick(value)}</text>')
    for x, anchor in ((first, "start"), (last, "end")):
        out.append(f'<text x="{place(x, ticks[0])[0]:.1f}" y="{_HEIGHT - 5}" text-anchor="{anchor}">{x:.0f}</text>')
    for i, line in enumerate(chart.drawn):
        placed = [place(x, y) for x, y in line.points]
        if line.dots or len(placed) == 1:
            out += [f'<circle class="c{i % _COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in placed]
        if len(placed) > 1:
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
            out.append(f'<path class="c{i % _COLOURS}" d="{path}"/>')
    return "".join(out)


def _lines(metrics: Sequence[Metrics], keys: Sequence[tuple[str, str]]) -> list[Line]:
    found = []
    for key, label in keys:
        points = [(float(r["step"]), float(r[key])) for r in metrics if key in r]
        if key.startswith("mismatch/"):
            points = [(x, y) for x, y in points if y > 0]  # a logarithmic axis has no zero
        if points:
            found.append(Line(label, _thinned(points)))
    return found


def _evaluations(run: RunData) -> list[Line]:
    """By split, at the step whose policy was evaluated: the mean reward, and pass@k where that is something else."""
    every, splits = run.config_value("sync_every", 1), dict.fromkeys(e.get("split", "eval") for e in run.evaluations)
    found = []
    for split in splits:
        chosen = [e for e in run.evaluations if e.get("split", "eval") == split]
        of = f" of {split}" if len(splits) > 1 else ""
        points = [(float(step_of(e, every)), float(e["reward"])) for e in chosen if e.get("reward") is not None]
        found.append(Line(f"mean reward{of}", sorted(points), dots=True))
        for k in sorted({k for e in chosen for k in passed_at(e)}):
            passed = [(float(step_of(e, every)), passed_at(e)[k]) for e in chosen if k in passed_at(e)]
            found.append(Line(f"pass@{k}{of}", sorted(passed), dots=True))
    different = {tuple(line.points): line for line in reversed(found) if line.points}
    return list(reversed(different.values()))


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of neighbours where there are more points than there is room for; the last one stays as it is."""
    size = -(-len(points) // _MOST_POINTS)
    if size == 1:
        return points
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return [*((sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks), points[-1]]


def _range(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """(lowest, highest, ticks) of a linear axis with round ticks; from 0 where that is near."""
    low, high = min(values), max(values)
    if 0 < low < 0.6 * high:
        low = 0.0
    if high - low < 1e-12 * max(abs(high), 1e-300) or high == low:
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    rough = (high - low) / 3
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    count = math.ceil(high / step - 1e-9) - first
    ticks = [(first + i) * step for i in range(count + 1)]
    return ticks[0], ticks[-1], ticks


def _log_range(values: Sequence[float]) -> tuple[float, float, list[float]]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    every = -(-(high - low) // 4)
    return float(low), float(high), [10.0**e for e in range(low, high + 1, every)]


def _tick(value: float) -> str:
    return "0" if abs(value) < 1e-12 else f"{value:.0e}" if not 1e-3 <= abs(value) < 1e5 else f"{value:.4g}"
