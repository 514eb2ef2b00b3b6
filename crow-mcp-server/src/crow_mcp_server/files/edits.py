"""Edits of documents, their diffs, and the explanations for edits that cannot be made. No disk, no protocol."""

import difflib
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from crow_system.shortening import leave_out

from crow_mcp_server.files.document import Document
from crow_mcp_server.files.fuzzy_match import TextMatch, find_fuzzy_matches, find_occurrences, find_separate
from crow_mcp_server.refusal import ToolRefusal

CONTEXT_LINES = 4  # unchanged lines shown around a change
MAX_SNIPPET_LINES = 40
MAX_LINE_CHARACTERS = 2_000  # of one line of a view
MIN_SIMILARITY = 60.0  # of 100; a line that is at least so similar to a missing one is suggested
MAX_COMPARED_LINES = 200_000  # searched for similar lines
MAX_DIFFED_LINES = 4_000  # of both texts; a longer change is only described
MAX_DIFF_CHARACTERS = 30_000
HUNK_START = re.compile(r"([-+])(\d+)")
NUMBERED_LINE = re.compile(r"\s*\d+\t")


@dataclass(frozen=True)
class DocumentEdit:
    """A document after a change, and the first and last line (from 1) that the change covers."""

    document: Document
    first: int
    last: int
    note: str = ""
    """Describes the text that was replaced, if it differed from the one that was asked for."""

    def format_snippet(self) -> str:
        """Return the changed lines with CONTEXT_LINES around them, numbered, without the middle of a long change."""
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
    """Return the lines with their numbers, counted from `first`."""
    return "\n".join(f"{number:>6}\t{cut_line(line)}" for number, line in enumerate(lines, first))


def cut_line(line: str) -> str:
    """Cut a line of a view after MAX_LINE_CHARACTERS and note how much is left out."""
    return leave_out(line, MAX_LINE_CHARACTERS, space=" ")


@dataclass(frozen=True)
class TextReplacement:
    """A replacement that an edit makes."""

    old: str
    new: str
    every: bool = False
    """True to replace all occurrences of `old`, not the only one."""


def replace_text(path: str, document: Document, replacement: TextReplacement) -> DocumentEdit:
    """Replace the only occurrence of a text, or every one. Raises ToolRefusal when there is none, or more than one.

    Line feeds in the texts match the line endings of the file. Bytes outside of the occurrences do not change. If the
    text does not occur exactly, replace the only fuzzy match (`find_fuzzy_matches`).
    """
    old, new = replacement.old.replace("\r\n", "\n"), replacement.new.replace("\r\n", "\n")
    if not old.strip():
        raise ToolRefusal("old_str is empty or blank. Give the text to replace; to add text, use the command insert.")
    if old == new:
        raise ToolRefusal("old_str and new_str are the same: there is nothing to change.")
    lf_text, note = document.lf_text, ""
    starts = find_separate(lf_text, old) if replacement.every else find_occurrences(lf_text, old)
    matches = [TextMatch(start, start + len(old), new) for start in starts]
    if not matches:
        matches, note = find_fuzzy_matches(lf_text, old, new)
    if not matches:
        raise ToolRefusal(_explain_miss(path, document, old, new))
    lines = [lf_text.count("\n", 0, match.start) + 1 for match in matches[:20]]
    if len(matches) > 1 and (note or not replacement.every):
        more = f" and {len(matches) - len(lines)} more" if len(matches) > len(lines) else ""
        how = f", {note}," if note else ""
        advice = "" if note else ", or give replace_all"
        raise ToolRefusal(
            f"old_str occurs {len(matches)} times{how} in {path}, at lines {', '.join(map(str, lines))}{more}. "
            f"Nothing was changed. Add neighbouring lines to old_str until it is unique{advice}."
        )
    if note:
        note = f"old_str was found {note} at line {lines[0]}, and nowhere else: that was replaced."
    elif len(matches) > 1:
        note = f"{len(matches)} occurrences were replaced."
    after = document.with_text(_replace_matches(document, matches))
    return DocumentEdit(after, *_find_replaced_lines(lf_text, matches), note)


def _replace_matches(document: Document, matches: Sequence[TextMatch]) -> str:
    """Return the text with the matches, which are sorted and do not overlap, replaced."""
    pieces, end = list[str](), 0
    for match, start, stop in zip(matches, *_to_text_offsets(document.text, matches), strict=True):
        replaced = document.text[start:stop]
        newline = document.newline if "\n" not in replaced else Document(replaced).newline
        pieces += [document.text[end:start], match.replacement.replace("\n", newline)]
        end = stop
    return "".join([*pieces, document.text[end:]])


def _find_replaced_lines(lf_text: str, matches: Sequence[TextMatch]) -> tuple[int, int]:
    """Return the numbers of the first and last line that the replacements cover afterwards."""
    first = lf_text.count("\n", 0, matches[0].start) + 1
    grown = sum(match.replacement.count("\n") - lf_text.count("\n", match.start, match.end) for match in matches[:-1])
    last = lf_text.count("\n", 0, matches[-1].start) + 1 + grown
    return first, last + matches[-1].replacement.rstrip("\n").count("\n")


def replace_texts(path: str, document: Document, replacements: Sequence[TextReplacement]) -> DocumentEdit:
    """Make replacements, one after the other. Raises ToolRefusal if one of them cannot be made."""
    if not replacements:
        raise ToolRefusal("edits is empty: there is nothing to change.")
    after, notes = document, list[str]()
    for number, replacement in enumerate(replacements, 1):
        try:
            edit = replace_text(path, after, replacement)
        except ToolRefusal as refusal:
            raise ToolRefusal(f"Edit {number} of {len(replacements)} failed, so none was made: {refusal}") from None
        after = edit.document
        notes += [f"Edit {number}: {edit.note}"] if edit.note else []
    return DocumentEdit(after, *find_changed_lines(document, after), "\n".join(notes))


def insert_after(path: str, document: Document, line: int, new: str) -> DocumentEdit:
    """Insert lines after line `line` (0 is the top). Neither add nor remove a line ending at the end of the file.

    Raises ToolRefusal when there is no such line.
    """
    count = len(document.lines)
    if not 0 <= line <= count:
        raise ToolRefusal(f"insert_line {line} is not in {path}: give a number from 0 (the top) to {count} (the end).")
    newline = document.newline
    added = new.replace("\r\n", "\n").removesuffix("\n").replace("\n", newline)
    at = _find_line_start(document.text, line)
    before, after = document.text[:at], document.text[at:]
    is_complete = before == "" or before.endswith("\n")
    text = f"{before}{added}{newline}{after}" if is_complete else f"{before}{newline}{added}"
    return DocumentEdit(document.with_text(text), line + 1, line + 1 + added.count("\n"))


def find_changed_lines(before: Document, after: Document) -> tuple[int, int]:
    """Return the numbers of the first and last line of `after` that differ from `before`."""
    top, bottom = _count_equal_lines(before.lines, after.lines)
    return top + 1, max(len(after.lines) - bottom, top + 1)


def make_diff(before: Document | None, after: Document | None) -> str:
    """Return the change as a unified diff without file names, cut after MAX_DIFF_CHARACTERS."""
    old, new = _to_diff_lines(before), _to_diff_lines(after)
    top, bottom = _count_equal_lines(old, new)
    skipped, cut = max(top - 3, 0), max(bottom - 3, 0)  # difflib is slow with many equal lines
    old, new = old[skipped : len(old) - cut], new[skipped : len(new) - cut]
    if len(old) + len(new) > MAX_DIFFED_LINES:
        return f"@@ {len(old):,} lines were replaced by {len(new):,} from line {top + 1} on @@\n"
    lines = list(difflib.unified_diff(old, new))[2:]
    diff = "".join(
        HUNK_START.sub(partial(_shift_hunk, skipped), line) if line.startswith("@@") else line for line in lines
    )
    return leave_out(diff, MAX_DIFF_CHARACTERS)


def _count_equal_lines(old: list[str], new: list[str]) -> tuple[int, int]:
    """Return how many lines are equal at the top, and how many of the others at the bottom."""
    shorter = min(len(old), len(new))
    top = next((index for index in range(shorter) if old[index] != new[index]), shorter)
    rest = shorter - top
    return top, next((index for index in range(rest) if old[-1 - index] != new[-1 - index]), rest)


def _to_diff_lines(document: Document | None) -> list[str]:
    lines = [f"{line}\n" for line in document.lines] if document else []
    if lines and document and not document.lf_text.endswith("\n"):
        lines[-1] += "\\ No newline at end of file\n"
    return lines


def _shift_hunk(lines: int, hunk: re.Match[str]) -> str:
    return f"{hunk[1]}{int(hunk[2]) + lines}"


def _to_text_offsets(text: str, matches: Sequence[TextMatch]) -> tuple[list[int], list[int]]:
    """Convert the starts and ends of matches in `Document.lf_text` to offsets in `Document.text`."""
    returns = [match.start() for match in re.finditer("\r\n", text)]
    removed = [at - number for number, at in enumerate(returns)]  # the same places in lf_text

    def convert(offset: int) -> int:
        return offset + bisect_left(removed, offset)

    return [convert(match.start) for match in matches], [convert(match.end) for match in matches]


def _find_line_start(text: str, line: int) -> int:
    """Return the offset behind the first `line` lines, at most the end of the text."""
    at = 0
    for _ in range(line):
        at = text.find("\n", at) + 1
        if at == 0:
            return len(text)
    return at


def _explain_miss(path: str, document: Document, old: str, new: str) -> str:
    """Return a message that says `old` was not found, with the probable reason."""
    message = f"old_str was not found in {path}, and nothing was changed."
    wanted = old.strip("\n").split("\n")
    if all(NUMBERED_LINE.match(line) for line in wanted):
        return f"{message} It starts with the line numbers that view shows: leave them out."
    lf_text = document.lf_text
    if new.strip() and (at := lf_text.find(new)) >= 0:
        line = lf_text.count("\n", 0, at) + 1
        message += f" But new_str is there, at line {line}: perhaps this edit was made already."
    lines = document.lines
    if starts := _find_similar(lines, wanted):
        similar = [lines[start : start + min(len(wanted), 10)] for start in starts]
        shown = "\n…\n".join(number_lines(part, start + 1) for part, start in zip(similar, starts, strict=True))
        diff = "\n".join(list(difflib.unified_diff(wanted[:10], similar[0], lineterm="", n=10))[3:])
        return f"{message} The closest lines are:\n{shown}\nFrom old_str (-) to the first of them (+):\n{diff}"
    return f"{message} No line of the file resembles it. View the file and copy the text exactly."


def _find_similar(lines: list[str], wanted: list[str]) -> list[int]:
    """Return up to three indexes of `lines`, best first, from which on the lines resemble those wanted.

    Candidates contain a line that resembles the longest wanted line.
    """
    from rapidfuzz import fuzz, process  # not at the top: only needed here

    anchor = max(range(len(wanted)), key=lambda index: len(wanted[index].strip()))
    known: dict[str, list[int]] = {}
    for index, line in enumerate(lines[:MAX_COMPARED_LINES]):
        known.setdefault(line.strip()[:200], []).append(index)
    close = process.extract(
        wanted[anchor].strip()[:200], list(known), scorer=fuzz.ratio, limit=3, score_cutoff=MIN_SIMILARITY
    )
    starts = {max(index - anchor, 0) for line, _, _ in close for index in known[line][:3]}
    text = "\n".join(wanted)[:2_000]

    def compare(start: int) -> float:
        return fuzz.ratio("\n".join(lines[start : start + len(wanted)])[:2_000], text)

    return sorted(starts, key=compare, reverse=True)[:3]
