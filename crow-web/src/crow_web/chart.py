"""Charts as SVG, without a library: bars, each of several parts."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT, LEFT, BOTTOM = 800, 180, 60, 22
"""Units of the picture's own, which is scaled to the page."""
WIDEST = 40.0
"""Width of a bar with its margins, at most."""


@dataclass(frozen=True)
class Bar:
    """A bar of a chart."""

    label: str
    parts: Sequence[float]
    """Heights from the bottom up; the n-th part of each bar has the n-th colour."""
    hint: str
    """What a reader sees who points at the bar."""
    link: str = ""


def draw_bars(title: str, bars: Sequence[Bar]) -> Markup:
    """Draw bars beside each other; "" if there is nothing to draw."""
    top = max((sum(bar.parts) for bar in bars), default=0.0)
    if top <= 0:
        return Markup("")
    step = min((WIDTH - LEFT) / len(bars), WIDEST)
    every = max(1, len(bars) // 12)
    drawn = [draw_bar(bar, LEFT + at * step, step, top, shows_label=at % every == 0) for at, bar in enumerate(bars)]
    scale = Markup('<text x="{}" y="12" class="end">{}</text><text x="{}" y="{}" class="end">0</text>').format(
        LEFT - 6, f"{top:,.4g}", LEFT - 6, HEIGHT - BOTTOM
    )
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}</svg>').format(
        WIDTH, HEIGHT, title, scale, Markup("").join(drawn)
    )


def draw_bar(bar: Bar, x: float, step: float, top: float, *, shows_label: bool) -> Markup:
    """Draw one bar with its label."""
    room, above = HEIGHT - BOTTOM - 4, float(HEIGHT - BOTTOM)
    parts = Markup("")
    for number, value in enumerate(bar.parts):
        height = value / top * room
        above -= height
        parts += Markup('<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" class="c{}"/>').format(
            x + step * 0.1, above, max(step * 0.8, 0.5), height, number % 6
        )
    label = (
        Markup('<text x="{:.2f}" y="{}" class="middle">{}</text>').format(x + step / 2, HEIGHT - 6, bar.label)
        if shows_label
        else Markup("")
    )
    inside = Markup("<title>{}</title>{}").format(bar.hint, parts)
    around = Markup('<a href="{}">{}</a>').format(bar.link, inside) if bar.link else Markup("<g>{}</g>").format(inside)
    return around + label


def draw_spans(spans: Sequence[tuple[str, float, float, str, str]], length: float) -> Markup:
    """Draw spans of time below each other: each with its label, start, end, the class of its colour and its hint."""
    if not spans or length <= 0:
        return Markup("")
    row, rows = 18, Markup("")
    for number, (label, start, end, kind, hint) in enumerate(spans):
        x, width = 150 + start / length * 640, max((end - start) / length * 640, 1.0)
        rows += Markup(
            '<g><title>{}</title><text x="144" y="{}" class="end">{}</text>'
            '<rect x="{:.2f}" y="{}" width="{:.2f}" height="12" class="{}"/></g>'
        ).format(hint, number * row + 12, label[:22], x, number * row + 3, width, kind)
    return Markup('<svg class="chart" viewBox="0 0 800 {}" role="img" aria-label="Times of the turn">{}</svg>').format(
        len(spans) * row + 4, rows
    )
