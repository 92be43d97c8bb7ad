"""`comparison.png`: reward by step, a line for each setting with its spread over seeds; a heat map of two factors."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.observability import format as f
from grpo_jax.observability.compare import Comparison, Group, short
from grpo_jax.observability.theme import LIGHT, Theme, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI = 130
_COLUMNS = 3
_MOST_LINES = 10
_WIDTH, _ROW = 12.0, 3.3  # inches
# Told apart on a light and on a dark page.
_HUES = ("#4a7fc1", "#d0743c", "#4fa08f", "#a06cc0", "#c09a35", "#7a9a3d", "#c4587f", "#808894", "#2fa7c4", "#9a6b4f")


def draw_comparison(comparison: Comparison, theme: Theme = LIGHT) -> bytes:
    """The picture as PNG. With two factors a panel for each value of the longer one, else one of the best settings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(comparison)
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    heights = [_ROW * rows, *([_heat_height(comparison)] if comparison.is_grid else [])]
    figure = Figure(figsize=(_WIDTH, sum(heights)), dpi=_DPI, facecolor=theme.paper)
    FigureCanvasAgg(figure)
    parts: list[Any] = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).ravel())
    for part in parts:
        part.set_facecolor(theme.paper)
    above = parts[0]
    axes = np.atleast_1d(above.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)).ravel()
    above.subplots_adjust(left=0.05, right=0.985, top=1 - 0.34 / (_ROW * rows), bottom=0.5 / (_ROW * rows), hspace=0.32)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    for i, (ax, (title, groups)) in enumerate(zip(axes, panels, strict=False)):
        style_axes(ax, title, theme)
        _curves(ax, comparison, groups, theme)
        ax.tick_params(labelbottom=i + columns >= len(panels))  # of the lowest panel in each column
    if comparison.target is not None:
        axes[0].annotate(
            f"target {comparison.target:.2f}", (0.01, comparison.target), (0, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", color=theme.muted, fontsize=8,
        )  # fmt: skip
    if comparison.is_grid:
        _heat_map(parts[1], comparison, theme)
    out = io.BytesIO()
    figure.savefig(out, format="png", facecolor=theme.paper, metadata={"Software": None})
    return out.getvalue()


def curve(group: Group) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """steps, mean, lowest and highest reward of the runs that have a reward at that step. [steps] each."""
    by_step: dict[int, list[float]] = {}
    for member in group.members:
        for step, reward in member.rewards:
            by_step.setdefault(step, []).append(reward)
    steps = sorted(by_step)
    mean, low, high = (np.array([of(by_step[step]) for step in steps]) for of in (np.mean, np.min, np.max))
    return np.array(steps), mean, low, high


def heat_values(comparison: Comparison) -> tuple[tuple[str, str], np.ndarray]:
    """The factors of rows and columns, and the mean final rewards, NaN where there is none. [rows, columns]"""
    (row, rows), (column, columns) = comparison.factors.items()
    values = np.full((len(rows), len(columns)), np.nan)
    for group in comparison.groups:
        if row in group.settings and column in group.settings and group.final.mean is not None:
            values[rows.index(group.settings[row]), columns.index(group.settings[column])] = group.final.mean
    return (row, column), values


def _panels(comparison: Comparison) -> list[tuple[str, list[Group]]]:
    if not comparison.is_grid:
        best = sorted(comparison.groups, key=lambda g: -np.inf if g.final.mean is None else g.final.mean, reverse=True)
        shown = [group for group in comparison.groups if group in best[:_MOST_LINES]]
        more = f", the {len(shown)} best of {len(best)} settings" if len(best) > len(shown) else ""
        return [(f"Reward{more}", shown)]
    panel = _panel_factor(comparison)
    return [
        (f"{short(panel)} {value}", [g for g in comparison.groups if g.settings.get(panel) == value])
        for value in comparison.factors[panel]
    ]


def _panel_factor(comparison: Comparison) -> str:
    return max(comparison.factors, key=lambda key: len(comparison.factors[key]))


def _curves(ax: "Axes", comparison: Comparison, groups: Sequence[Group], theme: Theme) -> None:
    line = next(key for key in comparison.factors if key != _panel_factor(comparison)) if comparison.is_grid else None
    for i, group in enumerate(groups):
        steps, mean, low, high = curve(group)
        if not len(steps):
            continue
        hue = comparison.factors[line].index(group.settings[line]) if line else i
        color = _HUES[hue % len(_HUES)]
        label = f"{short(line)} {group.settings[line]}" if line else comparison.label(group.settings)
        if len(group.members) > 1:
            ax.fill_between(steps, low, high, color=color, alpha=0.16, linewidth=0)
            label += f" ({len(group.members)} seeds)" if not line else ""
        ax.plot(steps, mean, color=color, linewidth=1.6, label=label, linestyle="-" if hue < len(_HUES) else "--")
    if comparison.target is not None:
        ax.axhline(comparison.target, color=theme.muted, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    ax.set_xlabel("step", color=theme.muted, fontsize=9, loc="left")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8, frameon=False, labelcolor=theme.ink, loc="lower right")
    else:
        ax.text(0.5, 0.5, "nothing recorded", transform=ax.transAxes, ha="center", va="center", color=theme.muted)


def _heat_height(comparison: Comparison) -> float:
    return 1.1 + 0.42 * len(next(iter(comparison.factors.values())))


def _heat_map(figure: Any, comparison: Comparison, theme: Theme) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    (row, column), values = heat_values(comparison)
    figure.subplots_adjust(left=0.14, right=0.985, top=0.86, bottom=0.2)
    ax = figure.subplots(1, 1)
    style_axes(ax, f"Final reward, {short(row)} by {short(column)}", theme)
    ax.grid(visible=False)
    shades = LinearSegmentedColormap.from_list("reward", [theme.paper, theme.learner]).with_extremes(bad=theme.rule)
    known = values[~np.isnan(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    lowest = low - 0.25 * (high - low or 1.0)  # so that the lowest value is still told from the paper
    ax.imshow(np.ma.masked_invalid(values), aspect="auto", cmap=shades, vmin=lowest, vmax=high)
    for (r, c), value in np.ndenumerate(values):
        ink = theme.paper if value > (low + high) / 2 else theme.ink
        ax.text(c, r, f.reward(float(value)), ha="center", va="center", fontsize=9, color=ink)
    ax.set_xticks(range(values.shape[1]), [str(v) for v in comparison.factors[column]])
    ax.set_yticks(range(values.shape[0]), [str(v) for v in comparison.factors[row]])
    ax.set_xlabel(short(column), color=theme.muted, fontsize=9)
    ax.set_ylabel(short(row), color=theme.muted, fontsize=9)
