"""`reward.png`: what was learned, how stale the data was, where the time went, and how well the two models agree."""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.observability.evaluations import step_of
from grpo_jax.observability.format import duration
from grpo_jax.observability.metrics import Metrics
from grpo_jax.observability.rundata import RunData
from grpo_jax.observability.theme import LIGHT, Theme, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Label = tuple[float, str, str]  # y in data coordinates, text, colour

_DPI = 150
# A step this many times longer than the median (the first one compiles) would flatten all the others.
_OUTLIER = 3.0


def draw(run: RunData, theme: Theme = LIGHT) -> bytes:
    """The picture as PNG. ImportError if matplotlib is not installed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 7.2), dpi=_DPI, facecolor=theme.paper)
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    figure.subplots_adjust(left=0.035, right=0.895, top=0.94, bottom=0.075, wspace=0.42, hspace=0.34)
    panels: list[tuple[str, Callable[[Axes, RunData, Theme], list[Label]]]] = [
        ("Reward", _reward),
        ("Staleness, in policy versions", _staleness),
        ("Seconds per step, with medians", _time),
        ("|log π − log μ| on the trained tokens", _mismatch),
    ]
    first, last = (run.metrics[0]["step"], run.metrics[-1]["step"]) if run.metrics else (0, 0)
    for ax, (title, panel) in zip(axes.flat, panels, strict=True):
        style_axes(ax, title, theme)
        labels = panel(ax, run, theme)
        if labels:
            ax.set_xlim(first - 0.7, max(last, first + 4) + 0.7)
            _label(ax, labels)
        else:
            ax.text(0.5, 0.5, "nothing recorded", transform=ax.transAxes, ha="center", va="center", color=theme.muted)
            ax.set_xticks([])
            ax.set_yticks([])
    for ax in axes[1]:
        ax.set_xlabel("step", color=theme.muted, fontsize=9, loc="left")
    out = io.BytesIO()
    figure.savefig(out, format="png", facecolor=theme.paper, metadata={"Software": None})
    return out.getvalue()


def _reward(ax: "Axes", run: RunData, theme: Theme) -> list[Label]:
    x, y = _series(run.metrics, "reward")
    base, trained = run.held_out
    marks = [
        (e["reward"], f"held-out, {what} {e['reward']:.2f}", color)
        for e, what, color in ((base, "base", theme.muted), (trained, "trained", theme.accent))
        if e is not None
    ]
    evaluated = [(step_of(e, run.config_value("sync_every", 1)), e["reward"]) for e in run.scored_evaluations]
    if is_course := len(evaluated) > 2:
        ax.plot(*zip(*evaluated, strict=True), color=theme.accent, zorder=4, **_line(0))
    for value, _, color in marks[:1] if is_course else marks:
        ax.axhline(value, color=color, linewidth=1.2, linestyle=(0, (4, 3)), zorder=2)
    if not len(x):
        return marks
    spread = _aligned(run.metrics, x, "reward_std")
    # A standard deviation around a mean of zeros and ones reaches beyond both; no reward did.
    seen = [r for g in run.groups for r in g.rewards if not np.isnan(r)] or [-np.inf, np.inf]
    low, high = (np.clip(y + sign * spread, min(seen), max(seen)) for sign in (-1, 1))
    ax.fill_between(x, low, high, color=theme.learner, alpha=0.14, linewidth=0, zorder=1)
    ax.plot(x, y, color=theme.learner, zorder=3, **_line(len(x)))
    return [(y[-1], f"training {y[-1]:.2f}\n(band: ± 1 std)", theme.learner), *marks]


def _staleness(ax: "Axes", run: RunData, theme: Theme) -> list[Label]:
    from matplotlib.ticker import MaxNLocator

    labels = []
    for key, what, color in (("max", "max", theme.accent), ("mean", "mean", theme.learner)):
        x, y = _series(run.metrics, f"sample/staleness_{key}")
        if len(x):
            ax.plot(x, y, color=color, drawstyle="steps-mid" if key == "max" else "default", **_line(len(x)))
            labels.append((y[-1], f"{what} {y[-1]:.2g}", color))
    limit = run.config_value("max_staleness", None)
    if labels and limit is not None:
        ax.axhline(limit, color=theme.muted, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
        labels.append((limit, f"limit {limit}", theme.muted))
    ax.set_ylim(bottom=0, top=max([1.0, *(y for line in ax.lines for y in np.atleast_1d(line.get_ydata()))]) * 1.15)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    return labels


def _time(ax: "Axes", run: RunData, theme: Theme) -> list[Label]:
    x, total = _series(run.metrics, "perf/step_s")
    if not len(x):
        return []
    wait, compute = (_aligned(run.metrics, x, key) for key in ("perf/rollout_wait_s", "perf/fwd_bwd_s"))
    rest = np.clip(total - wait - compute, 0.0, None)
    parts = [
        (compute, "forward and\nbackward", theme.learner),
        (rest, "rest", theme.muted),
        (wait, "waiting for\nrollouts", theme.generator),
    ]
    bottom = np.zeros(len(x))
    labels = []
    for part, what, color in parts:
        top = bottom + part
        ax.bar(
            x,
            part,
            bottom=bottom,
            width=0.82 if len(x) <= 120 else 1.0,
            color=color,
            linewidth=0,
            alpha=0.45 if what == "rest" else None,
        )
        labels.append((float(np.median(bottom + part / 2)), f"{what} {duration(float(np.median(part)))}", color))
        bottom = top
    usual = total[total <= _OUTLIER * np.median(total)]
    limit = 1.12 * usual.max()
    ax.set_ylim(0, limit)
    for step, value in zip(x, total, strict=True):
        if value > limit:
            ax.annotate(
                f"↑ {duration(value)}", (step + 0.5, limit), (3, -4), textcoords="offset points", va="top",
                color=theme.ink, fontsize=8, bbox={"facecolor": theme.paper, "edgecolor": "none", "pad": 1.5},
            )  # fmt: skip
    return labels


def _mismatch(ax: "Axes", run: RunData, theme: Theme) -> list[Label]:
    labels = []
    for key, color in (("max", theme.accent), ("p99", theme.learner), ("p50", theme.generator)):
        x, y = _series(run.metrics, f"mismatch/{key}")
        x, y = x[y > 0], y[y > 0]  # a logarithmic axis has no zero
        if len(x):
            ax.plot(x, y, color=color, **_line(len(x)))
            labels.append((y[-1], f"{key} {y[-1]:.1e}", color))
    if labels:
        ax.set_yscale("log")
        ax.minorticks_off()
    return labels


def _label(ax: "Axes", labels: list[Label]) -> None:
    """Names the lines at their right ends, in their colours, moved apart where they would overlap."""
    ax.get_ylim()  # settles the limits, which matplotlib leaves open until they are asked for
    to_axes = ax.transAxes.inverted()
    placed: list[tuple[float, float, str, str]] = []
    for value, text, color in labels:
        y = float(to_axes.transform(ax.transData.transform((0.0, value)))[1])
        placed.append((min(max(y, 0.0), 1.0), 0.075 * (1 + text.count("\n")), text, color))
    placed.sort(key=lambda item: item[0])
    heights = np.array([item[1] for item in placed])
    ys = np.array([item[0] for item in placed])
    for _ in range(60):  # pushes overlapping neighbours apart by equal steps
        need = (heights[1:] + heights[:-1]) / 2 - np.diff(ys)
        if not (need > 1e-6).any():
            break
        push = np.clip(need, 0.0, None) / 2
        ys[:-1] -= push
        ys[1:] += push
    for y, (_, _, text, color) in zip(ys, placed, strict=True):
        ax.text(1.015, y, text, transform=ax.transAxes, color=color, fontsize=9, va="center", linespacing=1.25)


def _line(points: int) -> dict[str, Any]:
    """The steps of a short run are shown one by one."""
    few = points <= 40
    return {"linewidth": 1.9 if few else 1.3, "marker": "o" if few else None, "markersize": 3.2}


def _series(metrics: list[Metrics], key: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(r["step"], r[key]) for r in metrics if key in r]
    x, y = np.array(pairs, np.float64).reshape(-1, 2).T
    return x, y


def _aligned(metrics: list[Metrics], steps: np.ndarray, key: str) -> np.ndarray:
    """The values of `key` at `steps`, 0 where it was not recorded."""
    known = {r["step"]: r.get(key, 0.0) for r in metrics}
    return np.array([known[int(step)] for step in steps])
