"""What the edit commands do to a document, and what a model needs to hear when they cannot. No disk, no protocol."""

import difflib
import re
from dataclasses import dataclass

from crow_mcp_server.document import Document
from crow_mcp_server.refusal import Refusal

CONTEXT = 4  # unchanged lines shown around a change
SNIPPET_LINES = 40
MAX_LINE = 2_000  # characters of one line shown
SIMILAR = 0.6  # from here on, of 1, a line is shown as what may have been meant
COMPARED_LINES = 20_000
NUMBERED = re.compile(r"\s*\d+\t")


@dataclass(frozen=True)
class Edit:
    """A document after a change, and the lines (from 1, inclusive) the change now covers."""

    document: Document
    first: int
    last: int

    def snippet(self) -> str:
        """The changed lines with those around them, numbered."""
        lines = self.document.lines
        first, last = max(self.first - CONTEXT, 1), min(self.last + CONTEXT, len(lines))
        if last - first < SNIPPET_LINES:
            return number(lines[first - 1 : last], first)
        half = SNIPPET_LINES // 2
        return "\n".join(
            (
                number(lines[first - 1 : first - 1 + half], first),
                "…",
                number(lines[last - half : last], last - half + 1),
            )
        )


def number(lines: list[str], first: int) -> str:
    """Lines with their numbers, from `first`."""
    return "\n".join(f"{place:>6}\t{shorten_line(line)}" for place, line in enumerate(lines, first))


def shorten_line(line: str) -> str:
    if len(line) <= MAX_LINE:
        return line
    return f"{line[:MAX_LINE]} [… {len(line) - MAX_LINE:,} more characters in this line]"


def replace_once(path: str, document: Document, old: str, new: str) -> Edit:
    """Replace the one place where `old` stands. Raises Refusal when there is none or more than one.

    Line feeds in `old` and `new` stand for the line endings of the file; every byte outside of the match stays.
    """
    old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    if not old.strip():
        raise Refusal("old_str is empty or blank. Give the text to replace; to add text, use the command insert.")
    if old == new:
        raise Refusal("old_str and new_str are the same: there is nothing to change.")
    flat = document.flat
    starts = _occurrences(flat, old)
    if not starts:
        raise Refusal(_miss(path, document, old, new))
    lines = [flat.count("\n", 0, start) + 1 for start in starts[:20]]
    if len(starts) > 1:
        more = f" and {len(starts) - len(lines)} more" if len(starts) > len(lines) else ""
        raise Refusal(
            f"old_str occurs {len(starts)} times in {path}, at lines {', '.join(map(str, lines))}{more}. "
            "Nothing was changed. Add neighbouring lines to old_str until it is unique."
        )
    start, end = _unflatten(document.text, starts[0]), _unflatten(document.text, starts[0] + len(old))
    replaced = document.text[start:end]
    newline = document.newline if "\n" not in replaced else Document(replaced).newline
    text = document.text[:start] + new.replace("\n", newline) + document.text[end:]
    return Edit(document.with_text(text), lines[0], lines[0] + new.rstrip("\n").count("\n"))


def insert_after(path: str, document: Document, line: int, new: str) -> Edit:
    """Put lines after line `line`, 0 being the top. Whether the file ends in a line ending stays as it is."""
    if not new:
        raise Refusal("new_str is empty: there is nothing to insert.")
    count = len(document.lines)
    if not 0 <= line <= count:
        raise Refusal(f"insert_line {line} is not in {path}: give a number from 0 (the top) to {count} (the end).")
    newline = document.newline
    added = new.replace("\r\n", "\n").removesuffix("\n").replace("\n", newline)
    at = _line_start(document.text, line)
    before, after = document.text[:at], document.text[at:]
    ended = before == "" or before.endswith("\n")
    text = f"{before}{added}{newline}{after}" if ended else f"{before}{newline}{added}"
    return Edit(document.with_text(text), line + 1, line + 1 + added.count("\n"))


def changed_lines(before: Document, after: Document) -> tuple[int, int]:
    """The first and last line of `after` that differ from `before`."""
    old, new = before.lines, after.lines
    shorter = min(len(old), len(new))
    same = next((place for place in range(shorter) if old[place] != new[place]), shorter)
    below = next((place for place in range(shorter - same) if old[-1 - place] != new[-1 - place]), shorter - same)
    return same + 1, max(len(new) - below, same + 1)


def _occurrences(text: str, needle: str) -> list[int]:
    """Where a text stands in another, overlaps included."""
    found: list[int] = []
    at = text.find(needle)
    while at >= 0:
        found.append(at)
        at = text.find(needle, at + 1)
    return found


def _unflatten(text: str, offset: int) -> int:
    """Where an offset into the flat text lies in the text itself."""
    passed = 0
    for piece in text.split("\r\n"):
        if offset <= len(piece):
            break
        offset -= len(piece) + 1
        passed += len(piece) + 2
    return passed + offset


def _line_start(text: str, line: int) -> int:
    """Where the line after `line` lines starts, or the end of the text."""
    at = 0
    for _ in range(line):
        at = text.find("\n", at) + 1
        if at == 0:
            return len(text)
    return at


def _miss(path: str, document: Document, old: str, new: str) -> str:
    """Why `old` was not found, as far as that can be guessed."""
    said = f"old_str was not found in {path}, and nothing was changed."
    wanted = old.strip("\n").split("\n")
    if all(NUMBERED.match(line) for line in wanted):
        return f"{said} It starts with the line numbers that view shows: leave them out."
    flat = document.flat
    if new.strip() and (at := flat.find(new)) >= 0:
        line = flat.count("\n", 0, at) + 1
        return f"{said} But new_str is there, at line {line}: perhaps this edit was made already."
    lines = document.lines
    if places := _blank_apart(lines, wanted):
        shown = "\n…\n".join(number(lines[place : place + len(wanted)], place + 1) for place in places[:3])
        return f"{said} It differs only in white space from these lines; copy them exactly:\n{shown}"
    if places := _similar(lines, wanted):
        shown = "\n…\n".join(number(lines[place : place + min(len(wanted), 10)], place + 1) for place in places)
        return f"{said} The closest lines are:\n{shown}"
    return f"{said} No line of the file resembles it. View the file and copy the text exactly."


def _blank_apart(lines: list[str], wanted: list[str]) -> list[int]:
    """Where lines stand that are equal but for white space."""
    squeezed, target = [" ".join(line.split()) for line in lines], [" ".join(line.split()) for line in wanted]
    first, size = target[0], len(target)
    return [place for place, line in enumerate(squeezed) if line == first and squeezed[place : place + size] == target]


def _similar(lines: list[str], wanted: list[str]) -> list[int]:
    """Up to three places, best first, whose lines come closest, found by the longest of the wanted lines."""
    anchor = max(range(len(wanted)), key=lambda place: len(wanted[place].strip()))
    known: dict[str, list[int]] = {}
    for place, line in enumerate(lines[:COMPARED_LINES]):
        known.setdefault(line.strip()[:200], []).append(place)
    close = difflib.get_close_matches(wanted[anchor].strip()[:200], known, n=3, cutoff=SIMILAR)
    starts = {max(place - anchor, 0) for line in close for place in known[line][:3]}
    text = "\n".join(wanted)[:2_000]

    def likeness(start: int) -> float:
        return difflib.SequenceMatcher(None, "\n".join(lines[start : start + len(wanted)])[:2_000], text).ratio()

    return sorted(starts, key=likeness, reverse=True)[:3]
