"""Make text of agents, tools and files safe to print, and measure it in columns."""

import re

from crow_core.text import CONTROL_CHARACTERS
from wcwidth import wcwidth

ESCAPES: dict[int, str | None] = {
    **{code: f"\\u{code:04x}" for code in CONTROL_CHARACTERS if chr(code) not in "\n\t"},
    **{code: f"\\u{code:04x}" for code in (0x061C, 0x200E, 0x200F, 0xFEFF)},
    **dict.fromkeys(range(55296, 57344), "�"),
}
"""Maps characters that a terminal obeys, or that hide or reorder text, to something visible."""
JOINERS = dict.fromkeys((0x200B, 0x200C, 0x200D, 0x2060, *range(0xFE00, 0xFE10)))
"""Characters that join others to one glyph, whose width terminals do not agree on."""
STYLES = re.compile(r"\x1b\[[0-9;:]*m")
"""The colours of a program's output."""
OVERWRITTEN = re.compile(r"[^\n]*\r(?!\n|\Z)")
"""The part of a line that a progress bar has overwritten."""
TAB = 4
"""Columns between two tab stops."""


def escape(text: str) -> str:
    """Return a text with line breaks that a terminal prints as it is: other control characters become visible."""
    if text.isascii() and text.isprintable():
        return text
    return text.replace("\r\n", "\n").replace("\r", "\n").expandtabs(TAB).translate(ESCAPES)


def escape_line(text: str) -> str:
    """Return a text on one line, with visible control characters."""
    return " ".join(escape(text).split())


def escape_output(text: str) -> str:
    """Return the output of a program without colours and overwritten parts, with visible control characters."""
    return escape(OVERWRITTEN.sub("", STYLES.sub("", text)))


def measure(text: str) -> int:
    """Return how many columns a line takes."""
    return len(text) if text.isascii() else sum(max(wcwidth(letter), 0) for letter in text)


def clip(text: str, columns: int) -> str:
    """Cut a line to at most `columns` columns, ending it with `…`. Also removes JOINERS, for rows that are redrawn."""
    text = text.translate(JOINERS)
    if measure(text) <= columns:
        return text
    used, kept = 0, list[str]()
    for letter in text:
        used += max(wcwidth(letter), 0)
        if used > columns - 1:
            break
        kept.append(letter)
    return ("".join(kept).rstrip() + "…") if columns > 0 else ""


def clip_start(text: str, columns: int) -> str:
    """Cut a line to at most `columns` columns, but keep its end, after `…`."""
    return text if measure(text) <= columns else "…" + clip(text[::-1], max(columns, 1))[-2::-1]


def fold(line: str, width: int) -> list[str]:
    """Break a line anywhere, so that all of it is shown."""
    width = max(width, 4)
    if line.isascii():
        return [line[start : start + width] for start in range(0, len(line), width)] or [""]
    pieces, start, used = list[str](), 0, 0
    for at, letter in enumerate(line):
        columns = max(wcwidth(letter), 0)
        if used + columns > width:
            pieces.append(line[start:at])
            start, used = at, 0
        used += columns
    return [*pieces, line[start:]]


def find_breaks(line: str, width: int, later: int) -> list[int]:
    """Return where to break a line: between words where that leaves a third of a row, else anywhere.

    `width` and `later` are the columns of the first row and of the others. Blanks at a break stay before it.
    """
    if len(line) * 2 <= width or measure(line) <= width:
        return []
    breaks, start, used, blank, room = list[int](), 0, 0, 0, max(width, 4)
    for at, letter in enumerate(line):
        columns = max(wcwidth(letter), 0)
        if used + columns > room and letter != " ":
            text = line[start:blank]
            start = blank if text.strip() and measure(text) * 3 > room else at
            breaks.append(start)
            used, room = measure(line[start:at]), max(later, 4)
        used += columns
        if letter == " ":
            blank = at + 1
    return breaks


def split_at(line: str, breaks: list[int]) -> list[str]:
    """Split a line at these places."""
    return [line[start:end] for start, end in zip([0, *breaks], [*breaks, len(line)], strict=True)]


def hang(line: str, width: int) -> list[str]:
    """Break a line between words; the later rows are indented as it is."""
    indent = min(len(line) - len(line.lstrip(" ")), width // 2)
    first, *others = split_at(line, find_breaks(line, width, width - indent))
    return [first.rstrip(" ") if others else first, *(" " * indent + piece.rstrip(" ") for piece in others)]


def hang_label(line: str, indent: int, width: int) -> list[str]:
    """Break a line that begins with a label of some columns; the later rows are indented below what follows it."""
    label, text = line[:indent], line[indent:]
    return [f"{' ' * len(label) if n else label}{row}" for n, row in enumerate(hang(text, width - len(label)))]


def clip_ansi(line: str, width: int) -> str:
    """Cut a line with styles to a width, for a row that is drawn again."""
    if "\x1b" not in line:
        return clip(line, width)
    kept, used = list[str](), 0
    for part in re.split(r"(\x1b\[[0-9;]*m)", line):
        if part.startswith("\x1b"):
            kept.append(part)
        elif used < width:
            piece = clip(part, width - used)
            used += measure(piece)
            kept.append(piece)
    return "".join(kept)
