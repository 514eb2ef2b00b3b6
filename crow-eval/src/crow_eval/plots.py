"""Plots as SVG: small, without scripts, coloured by the classes of the page that they are in."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
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
        label = shorten_number(tick)
        if power == high:  # the last label has the unit, and ends where the plot ends
            parts.append(text(WIDTH, height - 12, f"{label} {unit}", "tick", "end"))
        else:
            parts.append(text(x(tick), height - 12, label, "tick", "middle"))
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


BAR_HEIGHT, BAR_LEFT, BAR_MOST = 150, 46, 40.0
"""The height of a plot of bars, the room for its axis, and the width of a bar with its margin at most."""


@dataclass(frozen=True)
class Bar:
    """A bar of a plot."""

    label: str
    parts: Sequence[float]
    """Heights from the bottom up; the n-th part of each bar has the n-th colour."""
    said: str
    """The text for a reader who points at the bar."""
    link: str = ""
    has_line: bool = False
    """True if a line is drawn before the bar."""


def plot_bars(bars: Sequence[Bar], *, title: str) -> str:
    """Draw bars side by side; "" if there is nothing to draw."""
    top = max((sum(bar.parts) for bar in bars), default=0.0)
    if top <= 0:
        return ""
    floor_at, room = BAR_HEIGHT - 20, BAR_HEIGHT - 30
    step = min((WIDTH - BAR_LEFT) / len(bars), BAR_MOST)
    parts: list[str] = []
    for tick in find_ticks(0, top, 3):
        y = floor_at - tick / top * room
        parts.append(f'<line class="grid" x1="{BAR_LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(BAR_LEFT - 6, y + 4, shorten_number(tick), "tick", "end"))
    every = ceil(len(bars) / max(1, (WIDTH - BAR_LEFT) // 44))
    for number, bar in enumerate(bars):
        x, y = BAR_LEFT + number * step, float(floor_at)
        drawn = f"<title>{escape(bar.said)}</title>"
        for colour, value in enumerate(bar.parts):
            height = value / top * room
            y -= height
            drawn += f'<rect class="c{colour % 6}" x="{x + step * 0.1:.1f}" y="{y:.1f}" width="{step * 0.8:.1f}" '
            drawn += f'height="{height:.1f}"/>'
        drawn += f'<rect class="room" x="{x:.1f}" y="0" width="{step:.1f}" height="{floor_at}"/>'
        parts.append(f'<a href="{escape(bar.link)}">{drawn}</a>' if bar.link else f"<g>{drawn}</g>")
        if bar.has_line:
            parts.append(f'<line class="zero" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{floor_at}"/>')
        if bar.label and number % every == 0:
            parts.append(text(x + step / 2, BAR_HEIGHT - 4, bar.label, "tick", "middle"))
    return draw(BAR_HEIGHT, title, parts, role="group" if any(bar.link for bar in bars) else "img")


def plot_strip(spans: Sequence[tuple[str, float, float]], length: float) -> str:
    """Draw spans of time in a line: the kind, which is the class of the mark, the start and the end of each."""
    drawn = "".join(
        f'<rect class="{kind}" x="{start / length * WIDTH:.1f}" y="0" '
        f'width="{max((end - start) / length * WIDTH, 0.6):.1f}" height="6"/>'
        for kind, start, end in spans
    )
    return f'<svg class="strip" viewBox="0 0 {WIDTH} 6" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'


def shorten_number(value: float) -> str:
    """Return a number in few characters: 12k, 1.5M, 0.00005."""
    for least, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= least:
            return f"{value / least:.3g}{name}"
    return f"{Decimal(f'{value:.3g}'):f}"


def find_ticks(low: float, high: float, count: int) -> list[float]:
    """Return round values of an axis, about `count`."""
    raw = (high - low) / count
    power = 10.0 ** floor(log10(raw))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= raw * 0.999)
    first = ceil(low / step - 1e-9)
    return [number * step for number in range(first, floor(high / step + 1e-9) + 1)]


def draw(height: float, title: str, parts: Sequence[str], *, role: str = "img") -> str:
    """Make the SVG of a plot. One with links has the role `group`, so that screen readers reach them."""
    inner = "".join(parts)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:.0f}" role="{role}" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{inner}</svg>"
    )


def text(x: float, y: float, words: str, style: str, anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
