"""Numbers for people: three significant digits, a unit, and an en dash for what is not known."""

import math

UNKNOWN = "–"


def number(value: float | None) -> str:
    """1234567 → 1,234,567; 0.83333 → 0.833; 3.2e-06 → 3.2e-06."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def reward(value: float | None) -> str:
    """Always two decimals, so that a column of rewards lines up."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.2f}"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.0f} %"


def duration(value: float | None) -> str:
    """12 ms, 9.1 s, 2:01 min, 1:02:03 h."""
    if value is None:
        return UNKNOWN
    if value < 0.1:
        return f"{1000 * value:.3g} ms"
    if value < 99.5:
        return f"{value:.3g} s"
    return f"{clock(value)} {'min' if value < 3600 else 'h'}"


def clock(value: float) -> str:
    """2:01, or 1:02:03 from an hour on."""
    minutes, s = divmod(round(value), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def arrow(first: float | None, last: float | None) -> str:
    """0.17 → 0.93, two rewards."""
    return f"{reward(first)} → {reward(last)}"
