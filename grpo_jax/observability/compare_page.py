"""`comparison.html`, `.png` and `.csv`: several runs on one page without network assets."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_jax.observability import format as f
from grpo_jax.observability.compare import Comparison, Group, Numbers, Spread, as_csv, numbers_of, short
from grpo_jax.observability.compare_plot import draw_comparison, heat_values
from grpo_jax.observability.html import bullets, document, picture, section, table, text
from grpo_jax.observability.theme import DARK, LIGHT

_COLUMNS: dict[str, tuple[Callable[[Numbers], float | None], Callable[[float | None], str]]] = {
    "Final reward": (lambda n: n.final, f.reward),
    "Held-out reward": (lambda n: n.held_out, f.reward),
    "Steps to target": (lambda n: n.steps_to_target, f.number),
    "Samples to target": (lambda n: n.samples_to_target, f.number),
    "Time to target": (lambda n: n.seconds_to_target, f.duration),
    "Below target afterwards": (lambda n: n.below, f.percent),
    "Largest drop": (lambda n: n.drop, f.reward),
    "Time per step": (lambda n: n.step_s, f.duration),
    "Staleness": (lambda n: n.staleness, f.number),
}

_STYLE = """
td.heat{text-align:center;padding:9px 12px;border:1px solid var(--paper)}
th.heat{text-align:center}
td .spread{color:var(--muted);font-size:12px;white-space:nowrap}
"""


@dataclass(frozen=True)
class Written:
    html_path: Path
    png_path: Path | None  # None: matplotlib is not installed
    csv_path: Path
    headline: str

    def __str__(self) -> str:
        picture = f"  picture: {self.png_path}" if self.png_path else ""
        return f"{self.headline}\ncomparison: {self.html_path}{picture}  numbers: {self.csv_path}"


def write_comparison(comparison: Comparison, folder: Path) -> Written:
    """Writes the three files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    png_path: Path | None = folder / "comparison.png"
    try:
        pictures = [draw_comparison(comparison, theme) for theme in (LIGHT, DARK)]
    except ImportError:
        pictures, png_path = [], None
    if png_path is not None:
        png_path.write_bytes(pictures[0])
    csv_path, html_path = folder / "comparison.csv", folder / "comparison.html"
    csv_path.write_text(as_csv(comparison), encoding="utf-8")
    html_path.write_text(render(comparison, pictures), encoding="utf-8")
    return Written(html_path, png_path, csv_path, headline(comparison))


def headline(comparison: Comparison) -> str:
    """One line for the terminal."""
    members = comparison.members
    finished = sum(member.is_finished for member in members)
    known = [group for group in comparison.groups if group.final.mean is not None]
    if not known:
        return f"{finished} of {len(members)} runs are finished"
    best = max(known, key=lambda group: group.final.mean or 0.0)
    return (
        f"{finished} of {len(members)} runs are finished; the highest final reward is that of "
        f"{comparison.label(best.settings)}: {_plain(best.final, f.reward)}"
    )


def render(comparison: Comparison, pictures: Sequence[bytes]) -> str:
    """The whole page. `pictures` are PNGs: none, or the light and the dark one."""
    unfinished = [f"{m.run}: {m.status}, {m.note}" for m in comparison.members if not m.is_finished]
    parts = [
        f'<header><h1>{text(comparison.title)}</h1><p class="verdict">{text(headline(comparison))}</p></header>',
        section("Not finished", bullets(unfinished)),
        picture(pictures, f"Reward of the runs of {comparison.title} by step"),
        section("Settings", _settings(comparison) + f'<p class="note">{text(_definitions(comparison))}</p>'),
        section("Final reward by two factors", _heat(comparison) if comparison.is_grid else ""),
        section("Runs", _runs(comparison)),
    ]
    return document(comparison.title, parts, _STYLE)


def _settings(comparison: Comparison) -> str:
    head = [*(short(key) for key in comparison.factors), "Finished", *_COLUMNS]
    rows = [
        [
            *(text(group.settings.get(key, f.UNKNOWN)) for key in comparison.factors),
            f"{group.finished} of {len(group.members)}",
            *(_cell(group, of, as_text) for of, as_text in _COLUMNS.values()),
        ]
        for group in comparison.groups
    ]
    top = "".join(f"<th>{text(name)}</th>" for name in head)
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="list"><thead><tr>{top}</tr></thead><tbody>{cells}</tbody></table></div>'


def _cell(group: Group, of: Callable[[Numbers], float | None], as_text: Callable[[float | None], str]) -> str:
    spread = group.spread(of)
    shown = text(as_text(spread.mean))
    details = []
    if spread.std is not None:
        details.append(f"± {as_text(spread.std)}")
    if 0 < spread.count < group.finished:
        details.append(f"{spread.count} of {group.finished}")
    return shown + (f' <span class="spread">{text(", ".join(details))}</span>' if details else "")


def _plain(spread: Spread, as_text: Callable[[float | None], str]) -> str:
    return as_text(spread.mean) + (f" ± {as_text(spread.std)}" if spread.std is not None else "")


def _definitions(comparison: Comparison) -> str:
    target = "no target, as no run is finished" if comparison.target is None else f"target {comparison.target:.3g}"
    return (
        f"Numbers are means over the finished runs of a setting, ± their standard deviation; {target}. Final reward: "
        "mean of the last five steps. To target: up to and with the first step whose mean reward is at least the "
        "target, over the runs that reach it; time is that of the steps, waiting for rollouts included. Below target "
        "afterwards: the share of the later steps. Largest drop: below the highest reward before. Curves: mean of all "
        "runs of a setting, finished or not; band: the lowest and the highest of them."
    )


def _heat(comparison: Comparison) -> str:
    (row, column), values = heat_values(comparison)
    known = [value for value in values.ravel() if value == value]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    lines = []
    for name, line in zip(comparison.factors[row], values, strict=True):
        cells = "".join(_heat_cell(float(value), low, high) for value in line)
        lines.append(f"<tr><th>{text(short(row))} {text(name)}</th>{cells}</tr>")
    top = "".join(f'<th class="heat">{text(short(column))} {text(name)}</th>' for name in comparison.factors[column])
    body = "".join(lines)
    return f'<div class="wide"><table><thead><tr><th></th>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _heat_cell(value: float, low: float, high: float) -> str:
    if value != value:
        return f'<td class="heat">{f.UNKNOWN}</td>'
    share = 10 + 50 * (value - low) / (high - low) if high > low else 35
    shade = f"color-mix(in srgb,var(--learner) {share:.0f}%,transparent)"
    return f'<td class="heat" style="background:{shade}">{f.reward(value)}</td>'


def _runs(comparison: Comparison) -> str:
    def rows() -> Iterable[Sequence[Any]]:
        for member in comparison.members:
            numbers = numbers_of(member, comparison.target)
            yield (
                member.run,
                member.status,
                member.note,
                *(as_text(of(numbers)) for of, as_text in _COLUMNS.values()),
            )

    return table(("Run", "Status", "Steps", *_COLUMNS), rows())
