"""Draws screens of a terminal as SVG."""

import hashlib
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from pyte.screens import Char
from terminal_recorder import Frame, Row

CELL, LINE, BASE, SIZE, MARGIN, BAR = 8.4, 18, 13, 14, 14, 30
"""The width, height and baseline of a cell, the size of the font, the margin and the height of the window's title, in
pixels."""
FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
DARK = {
    "black": "#3b4252", "red": "#f07178", "green": "#a5d46a", "brown": "#ffcb6b",
    "blue": "#82aaff", "magenta": "#c792ea", "cyan": "#7fdbca", "white": "#d0d4de",
    "text": "#d6dae4", "ground": "#1b1e28", "bar": "#262a36", "brightblack": "#7a8194",
}  # fmt: skip
LIGHT = {
    "black": "#24292f", "red": "#c2262e", "green": "#1a7f37", "brown": "#8a5a00",
    "blue": "#0550ae", "magenta": "#8250df", "cyan": "#0b6e75", "white": "#57606a",
    "text": "#24292f", "ground": "#ffffff", "bar": "#eaeef2", "brightblack": "#6e7781",
}  # fmt: skip


def get_style(cell: Char, colours: dict[str, str]) -> tuple[str, str, str]:
    """Return the colour of a character, that of its ground (empty for none), and its other properties in CSS."""

    def find(name: str, default: str) -> str:
        return (
            default
            if name == "default"
            else colours.get(name) or colours.get(name.removeprefix("bright")) or f"#{name}"
        )

    front, back = find(cell.fg, colours["text"]), find(cell.bg, "")
    if cell.reverse:
        front, back = back or colours["ground"], front
    css = "font-weight:bold;" * cell.bold + "font-style:italic;" * cell.italics + "opacity:.6;" * cell.blink
    css += "text-decoration:underline;" * cell.underscore
    return front, back, css


class Drawing:
    """Draws screens; each row that occurs is defined once."""

    def __init__(self, colours: dict[str, str]) -> None:
        self.colours = colours
        self.rows: dict[str, str] = {}
        self.classes: dict[str, str] = {}

    def draw(self, frame: Frame) -> str:
        """Return the uses of the rows of a frame."""
        uses = list[str]()
        for y, row in enumerate(frame.rows):
            if drawn := self._draw_row(row):
                name = f"r{hashlib.sha1(drawn.encode()).hexdigest()[:6]}"
                self.rows[name] = drawn
                uses.append(f'<use href="#{name}" y="{y * LINE}"/>')
        if frame.cursor:
            x, y = frame.cursor
            uses.append(f'<rect class="c" x="{x * CELL:g}" y="{y * LINE}" width="{CELL}" height="{LINE}"/>')
        return "".join(uses)

    def _draw_row(self, row: Row) -> str:
        drawn = list[str]()
        at = 0
        for (front, back, css), cells in groupby(row, lambda cell: get_style(cell, self.colours)):
            text = [cell.data for cell in cells]
            if back:
                drawn.append(f'<rect x="{at * CELL:g}" width="{len(text) * CELL:g}" height="{LINE}" fill="{back}"/>')
            name = self.classes.setdefault(f"fill:{front};{css}", f"s{len(self.classes)}")
            for start, length, piece in split_cells(text):
                where = f'x="{(at + start) * CELL:g}" y="{BASE}" textLength="{length * CELL:g}"'
                drawn.append(f'<text class="{name}" {where}>{escape(piece, quote=False)}</text>')
            at += len(text)
        return "".join(drawn)

    def frame_window(self, title: str, content: str, size: tuple[int, int], css: str = "") -> str:
        """Return the image: a window with this content, of so many columns and rows."""
        columns, rows = size
        width, height = columns * CELL + 2 * MARGIN, rows * LINE + BAR + 2 * MARGIN
        colours = self.colours
        styles = [
            f"text{{font:{SIZE}px {FONTS};white-space:pre}}",
            f".c{{fill:{colours['text']};opacity:.7}}",
            *(f".{name}{{{style}}}" for style, name in self.classes.items()),
        ]
        lights = "".join(
            f'<circle cx="{20 + 20 * n}" cy="{BAR / 2:g}" r="6" fill="{colour}"/>'
            for n, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
        )
        # A fixed baseline and length of each piece of text make the cells alike in every font.
        definitions = "\n".join(f'<g id="{name}">{row}</g>' for name, row in sorted(self.rows.items()))
        return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">
<title>{escape(title)}</title>
<style>{"".join(styles)}{css}</style>
<defs>
{definitions}
</defs>
<rect width="100%" height="100%" rx="9" fill="{colours["ground"]}"/>
<path d="M0 {BAR}V9a9 9 0 0 1 9-9H{width - 9:g}a9 9 0 0 1 9 9V{BAR}z" fill="{colours["bar"]}"/>
{lights}
<svg x="{MARGIN}" y="{BAR + MARGIN}" width="{columns * CELL:g}" height="{rows * LINE}">
{content}
</svg>
</svg>
"""


def split_cells(cells: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Split cells into pieces of text, each with its first column and its columns, without the blanks between them.

    A character beyond ASCII is a piece of its own, as it may come from another font, with another width; so are lines.
    """
    start = 0
    for kind, group in groupby(cells, key=lambda each: "ascii" if each.isascii() and each != "" else each or "wide"):
        piece = [*group]
        if kind == "ascii":
            text = "".join(piece)
            at = 0
            for part in text.split("  "):
                if part.strip():
                    lead = len(part) - len(part.lstrip())
                    yield start + at + lead, len(part.strip()), part.strip()
                at += len(part) + 2
        elif kind in "─━│":
            yield start, len(piece), "".join(piece)
        elif kind != "wide":
            for n, letter in enumerate(piece):
                after = start + n + 1
                yield start + n, 2 if after < len(cells) and cells[after] == "" else 1, letter
        start += len(piece)


def draw_still(frame: Frame, title: str, colours: dict[str, str]) -> str:
    drawing = Drawing(colours)
    return drawing.frame_window(title, drawing.draw(frame), (len(frame.rows[0]), len(frame.rows)))
