"""Plots as SVG: small, without scripts, coloured by the classes of the page that they are in."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from crow_system.shortening import shorten_line

WIDTH, ROW, MARGIN = 360, 48, 24
"""A plot is as wide as the screen of a phone, so that its texts can be read there: each row has its label above it."""
LABEL_LENGTH, LABEL_WITH_NOTE = 52, 42
"""The most characters of a label, alone and with a note at the end of its line."""


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, one row of a plot."""

    label: str
    value: float
    low: float
    high: float
    note: str = ""
    """A text at the end of the row."""
    style: str = ""
    """The class of its marks: good, bad, or none."""


def plot_intervals(rows: Sequence[Estimate], low: float, high: float, *, title: str, signed: bool = False) -> str:
    """Draw a point and its interval for each row, on a common axis of shares from `low` to `high`."""
    height = ROW * len(rows) + 44
    span = WIDTH - MARGIN * 2

    def x(value: float) -> float:
        return MARGIN + span * (min(max(value, low), high) - low) / (high - low)

    parts: list[str] = []
    for tick in find_ticks(low, high, 5):
        label = f"{tick * 100:+.0f} %" if signed and tick else f"{tick * 100:.0f} %"
        kind = "zero" if signed and abs(tick) < 1e-9 else "grid"
        parts.append(f'<line class="{kind}" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="6" y2="{height - 30}"/>')
        parts.append(text(x(tick), height - 12, label, "tick", "middle"))
    for number, row in enumerate(rows):
        y = ROW * number + 36
        limit = LABEL_WITH_NOTE if row.note else LABEL_LENGTH
        parts.append(text(0, y - 18, shorten_line(row.label, limit), "label"))
        parts.append(
            f'<line class="range {row.style}" x1="{x(row.low):.1f}" x2="{x(row.high):.1f}" y1="{y}" y2="{y}"/>'
            f'<circle class="point {row.style}" cx="{x(row.value):.1f}" cy="{y}" r="6"/>'
        )
        parts.append(text(WIDTH, y - 18, row.note, "note", "end"))
    return draw(height, title, parts)


@dataclass(frozen=True)
class Dots:
    """The values of one row of a plot of dots, each with a style and a description."""

    label: str
    values: Sequence[tuple[float, str, str]]


def plot_dots(rows: Sequence[Dots], *, title: str, unit: str) -> str:
    """Draw each value as a dot, on a common logarithmic axis, and a line at each row's median."""
    values = [max(value, 1e-3) for row in rows for value, _, _ in row.values]
    if not values:
        return ""
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    high = max(high, low + 1)
    height = ROW * len(rows) + 44
    span = WIDTH - MARGIN * 2

    def x(value: float) -> float:
        return MARGIN + span * (log10(max(value, 1e-3)) - low) / (high - low)

    parts: list[str] = []
    for power in range(low, high + 1):
        tick = 10.0**power
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="6" y2="{height - 30}"/>')
        parts.append(text(x(tick), height - 12, f"{tick:,g} {unit}", "tick", "middle"))
    for number, row in enumerate(rows):
        y = ROW * number + 36
        parts.append(text(0, y - 18, shorten_line(row.label, LABEL_LENGTH), "label"))
        for at, (value, style, said) in enumerate(row.values):
            offset = (at * 7 % 5 - 2) * 2.5  # dots on one another would hide how many there are
            parts.append(
                f'<circle class="dot {style}" cx="{x(value):.1f}" cy="{y + offset:.1f}" r="4">'
                f"<title>{escape(said)}</title></circle>"
            )
        if row.values:
            middle = sorted(value for value, _, _ in row.values)[len(row.values) // 2]
            at = f"{x(middle):.1f}"
            parts.append(f'<line class="median" x1="{at}" x2="{at}" y1="{y - 11}" y2="{y + 11}"/>')
    return draw(height, title, parts)


def find_ticks(low: float, high: float, count: int) -> list[float]:
    """Return round values of an axis, about `count`."""
    raw = (high - low) / count
    power = 10.0 ** floor(log10(raw))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= raw * 0.999)
    first = ceil(low / step - 1e-9)
    return [number * step for number in range(first, floor(high / step + 1e-9) + 1)]


def draw(height: float, title: str, parts: Sequence[str]) -> str:
    """Make the SVG of a plot."""
    inner = "".join(parts)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{inner}</svg>"
    )


def text(x: float, y: float, words: str, style: str, anchor: str = "start") -> str:
    """Make a text of a plot."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
