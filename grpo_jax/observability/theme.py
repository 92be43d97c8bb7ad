"""The colours of pages and pictures, light and dark, and how the axes of a picture look."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Theme:
    """Three hues (learner, generators, attention) and greys."""

    paper: str
    ink: str
    muted: str
    rule: str
    learner: str
    generator: str
    accent: str


LIGHT = Theme("#ffffff", "#1c2026", "#6b7280", "#e5e7eb", "#2f5d9b", "#3f8f7f", "#c2632f")
DARK = Theme("#171a1f", "#e6e8eb", "#9aa1ab", "#2c3139", "#7aa7e6", "#6fc3b1", "#e5945f")


def style_axes(ax: "Axes", title: str, theme: Theme) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_facecolor(theme.paper)
    ax.set_title(title, loc="left", color=theme.ink, fontsize=11.5, fontweight="bold", pad=9)
    for side, spine in ax.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.rule)
    ax.tick_params(colors=theme.muted, labelsize=9, length=0, pad=5)
    ax.grid(axis="y", color=theme.rule, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
