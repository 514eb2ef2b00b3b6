"""What the edit commands do to a document, and what a model needs to hear when they cannot. No disk, no protocol."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from crow_mcp_server.files.document import Document
from crow_mcp_server.files.fuzzy_match import TextMatch, find_fuzzy_matches, find_occurrences
from crow_mcp_server.refusal import ToolRefusal

CONTEXT_LINES = 4  # unchanged lines shown around a change
MAX_SNIPPET_LINES = 40
MAX_LINE_CHARACTERS = 2_000  # characters of one line shown
MIN_SIMILARITY = 60.0  # from here on, of 100, a line is shown as what may have been meant
MAX_COMPARED_LINES = 200_000
MAX_DIFFED_LINES = 4_000
MAX_DIFF_CHARACTERS = 30_000  # characters
HUNK_START = re.compile(r"([-+])(\d+)")
NUMBERED_LINE = re.compile(r"\s*\d+\t")


@dataclass(frozen=True)
class DocumentEdit:
    """A document after a change, and the lines (from 1, inclusive) the change now covers."""

    document: Document
    first: int
    last: int
    note: str = ""
    """What was taken for what was asked, where that was not to be found exactly."""

    def format_snippet(self) -> str:
        """The changed lines with those around them, numbered."""
        lines = self.document.lines
        first, last = max(self.first - CONTEXT_LINES, 1), min(self.last + CONTEXT_LINES, len(lines))
        if last - first < MAX_SNIPPET_LINES:
            return number_lines(lines[first - 1 : last], first)
        half = MAX_SNIPPET_LINES // 2
        return "\n".join(
            (
                number_lines(lines[first - 1 : first - 1 + half], first),
                "…",
                number_lines(lines[last - half : last], last - half + 1),
            )
        )


def number_lines(lines: list[str], first: int) -> str:
    """Lines with their numbers, from `first`."""
    return "\n".join(f"{place:>6}\t{shorten_line(line)}" for place, line in enumerate(lines, first))


def shorten_line(line: str) -> str:
    if len(line) <= MAX_LINE_CHARACTERS:
        return line
    return f"{line[:MAX_LINE_CHARACTERS]} [… {len(line) - MAX_LINE_CHARACTERS:,} more characters in this line]"


def replace_once(path: str, document: Document, old: str, new: str) -> DocumentEdit:
    """Replace the one place where `old` stands. Raises Refusal when there is none or more than one.

    Line feeds in `old` and `new` stand for the line endings of the file; every byte outside of the match stays. Where
    `old` does not stand exactly, the one place is taken that differs in nothing but how it is written down.
    """
    old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    if not old.strip():
        raise ToolRefusal("old_str is empty or blank. Give the text to replace; to add text, use the command insert.")
    if old == new:
        raise ToolRefusal("old_str and new_str are the same: there is nothing to change.")
    flat, note = document.lf_text, ""
    places = [TextMatch(start, start + len(old), new) for start in find_occurrences(flat, old)]
    if not places:
        places, note = find_fuzzy_matches(flat, old, new)
    if not places:
        raise ToolRefusal(_explain_miss(path, document, old, new))
    lines = [flat.count("\n", 0, place.start) + 1 for place in places[:20]]
    if len(places) > 1:
        more = f" and {len(places) - len(lines)} more" if len(places) > len(lines) else ""
        how = f", {note}," if note else ""
        raise ToolRefusal(
            f"old_str occurs {len(places)} times{how} in {path}, at lines {', '.join(map(str, lines))}{more}. "
            "Nothing was changed. Add neighbouring lines to old_str until it is unique."
        )
    [place] = places
    start, end = _to_text_offset(document.text, place.start), _to_text_offset(document.text, place.end)
    replaced = document.text[start:end]
    newline = document.newline if "\n" not in replaced else Document(replaced).newline
    text = document.text[:start] + place.replacement.replace("\n", newline) + document.text[end:]
    if note:
        note = f"old_str was found {note} at line {lines[0]}, and nowhere else: that was replaced."
    return DocumentEdit(document.with_text(text), lines[0], lines[0] + place.replacement.rstrip("\n").count("\n"), note)


def replace_all(path: str, document: Document, pairs: Sequence[tuple[str, str]]) -> DocumentEdit:
    """Make replacements one after the other, all or none. Raises Refusal, naming the one that cannot be made."""
    if not pairs:
        raise ToolRefusal("edits is empty: there is nothing to change.")
    after, notes = document, list[str]()
    for place, (old, new) in enumerate(pairs, 1):
        try:
            edit = replace_once(path, after, old, new)
        except ToolRefusal as refusal:
            raise ToolRefusal(f"Edit {place} of {len(pairs)}, and with it all of them: {refusal}") from None
        after = edit.document
        notes += [f"Edit {place}: {edit.note}"] if edit.note else []
    return DocumentEdit(after, *find_changed_lines(document, after), "\n".join(notes))


def insert_after(path: str, document: Document, line: int, new: str) -> DocumentEdit:
    """Put lines after line `line`, 0 being the top. Whether the file ends in a line ending stays as it is.

    Raises Refusal when there is no such line.
    """
    count = len(document.lines)
    if not 0 <= line <= count:
        raise ToolRefusal(f"insert_line {line} is not in {path}: give a number from 0 (the top) to {count} (the end).")
    newline = document.newline
    added = new.replace("\r\n", "\n").removesuffix("\n").replace("\n", newline)
    at = _find_line_start(document.text, line)
    before, after = document.text[:at], document.text[at:]
    ended = before == "" or before.endswith("\n")
    text = f"{before}{added}{newline}{after}" if ended else f"{before}{newline}{added}"
    return DocumentEdit(document.with_text(text), line + 1, line + 1 + added.count("\n"))


def find_changed_lines(before: Document, after: Document) -> tuple[int, int]:
    """The first and last line of `after` that differ from `before`."""
    old, new = before.lines, after.lines
    shorter = min(len(old), len(new))
    same = next((place for place in range(shorter) if old[place] != new[place]), shorter)
    below = next((place for place in range(shorter - same) if old[-1 - place] != new[-1 - place]), shorter - same)
    return same + 1, max(len(new) - below, same + 1)


def make_diff(before: Document | None, after: Document | None) -> str:
    """The change in the unified format, without the names of files; cut where it is very long."""
    old, new = _to_diff_lines(before), _to_diff_lines(after)
    shorter = min(len(old), len(new))
    same = next((place for place in range(shorter) if old[place] != new[place]), shorter)
    below = next((place for place in range(shorter - same) if old[-1 - place] != new[-1 - place]), shorter - same)
    skipped, cut = max(same - 3, 0), max(below - 3, 0)  # difflib takes long over many equal lines
    old, new = old[skipped : len(old) - cut], new[skipped : len(new) - cut]
    if len(old) + len(new) > MAX_DIFFED_LINES:
        return f"@@ {len(old):,} lines gave way to {len(new):,} from line {same + 1} on @@\n"
    lines = list(difflib.unified_diff(old, new))[2:]
    diff = "".join(
        HUNK_START.sub(partial(_shift_hunk, skipped), line) if line.startswith("@@") else line for line in lines
    )
    return (
        diff
        if len(diff) <= MAX_DIFF_CHARACTERS
        else f"{diff[:MAX_DIFF_CHARACTERS]}\n[… {len(diff) - MAX_DIFF_CHARACTERS:,} more characters]"
    )


def _to_diff_lines(document: Document | None) -> list[str]:
    lines = [f"{line}\n" for line in document.lines] if document else []
    if lines and document and not document.lf_text.endswith("\n"):
        lines[-1] += "\\ No newline at end of file\n"
    return lines


def _shift_hunk(lines: int, hunk: re.Match[str]) -> str:
    return f"{hunk[1]}{int(hunk[2]) + lines}"


def _to_text_offset(text: str, offset: int) -> int:
    """Where an offset into the flat text lies in the text itself."""
    passed = 0
    for piece in text.split("\r\n"):
        if offset <= len(piece):
            break
        offset -= len(piece) + 1
        passed += len(piece) + 2
    return passed + offset


def _find_line_start(text: str, line: int) -> int:
    """Where the line after `line` lines starts, or the end of the text."""
    at = 0
    for _ in range(line):
        at = text.find("\n", at) + 1
        if at == 0:
            return len(text)
    return at


def _explain_miss(path: str, document: Document, old: str, new: str) -> str:
    """Why `old` was not found, as far as that can be guessed."""
    said = f"old_str was not found in {path}, and nothing was changed."
    wanted = old.strip("\n").split("\n")
    if all(NUMBERED_LINE.match(line) for line in wanted):
        return f"{said} It starts with the line numbers that view shows: leave them out."
    flat = document.lf_text
    if new.strip() and (at := flat.find(new)) >= 0:
        line = flat.count("\n", 0, at) + 1
        said += f" But new_str is there, at line {line}: perhaps this edit was made already."
    lines = document.lines
    if places := _find_similar(lines, wanted):
        there = [lines[place : place + min(len(wanted), 10)] for place in places]
        shown = "\n…\n".join(number_lines(some, place + 1) for some, place in zip(there, places, strict=True))
        diff = "\n".join(list(difflib.unified_diff(wanted[:10], there[0], lineterm="", n=10))[3:])
        return f"{said} The closest lines are:\n{shown}\nFrom old_str (-) to the first of them (+):\n{diff}"
    return f"{said} No line of the file resembles it. View the file and copy the text exactly."


def _find_similar(lines: list[str], wanted: list[str]) -> list[int]:
    """Up to three places, best first, whose lines come closest, found by the longest of the wanted lines."""
    from rapidfuzz import fuzz, process  # not at the top: only needed here

    anchor = max(range(len(wanted)), key=lambda place: len(wanted[place].strip()))
    known: dict[str, list[int]] = {}
    for place, line in enumerate(lines[:MAX_COMPARED_LINES]):
        known.setdefault(line.strip()[:200], []).append(place)
    close = process.extract(
        wanted[anchor].strip()[:200], list(known), scorer=fuzz.ratio, limit=3, score_cutoff=MIN_SIMILARITY
    )
    starts = {max(place - anchor, 0) for line, _, _ in close for place in known[line][:3]}
    text = "\n".join(wanted)[:2_000]

    def likeness(start: int) -> float:
        return fuzz.ratio("\n".join(lines[start : start + len(wanted)])[:2_000], text)

    return sorted(starts, key=likeness, reverse=True)[:3]
