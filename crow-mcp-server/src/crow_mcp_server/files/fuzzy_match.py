"""Where a text stands that a model did not copy exactly: other white space, quotes or escapes, and nothing else."""

import re
from dataclasses import dataclass

TYPOGRAPHIC_SIGNS = {"'": "‘’‚‛", '"': "“”„", "-": "‐‑‒–—−", " ": "\u00a0"}
KEYBOARD_SIGNS = {ord(sign): plain for plain, signs in TYPOGRAPHIC_SIGNS.items() for sign in signs}
"""Typographic signs and those on a keyboard, one for one."""
ESCAPES = {r"\n": "\n", r"\t": "\t", r"\"": '"', r"\'": "'", r"\\": "\\"}
ESCAPE_SEQUENCE = re.compile(r"""\\[nt"'\\]""")


@dataclass(frozen=True)
class TextMatch:
    """A part of a text, and what shall stand there instead."""

    start: int
    end: int
    replacement: str


def find_occurrences(text: str, needle: str) -> list[int]:
    """Where a text stands in another, overlaps included."""
    found: list[int] = []
    at = text.find(needle)
    while at >= 0:
        found.append(at)
        at = text.find(needle, at + 1)
    return found


def find_fuzzy_matches(text: str, old: str, new: str) -> tuple[list[TextMatch], str]:
    """The places that `old` can only have meant, and how they differ from it; none when that is anybody's guess."""
    if starts := find_occurrences(text.translate(KEYBOARD_SIGNS), old.translate(KEYBOARD_SIGNS)):
        return [TextMatch(start, start + len(old), new) for start in starts], "with other quotes or dashes"
    plain = _unescape(old)
    if plain != old and plain.strip() and (starts := find_occurrences(text, plain)):
        return [TextMatch(start, start + len(plain), _unescape(new)) for start in starts], "without the escapes"
    return _match_lines(text, old, new), "with other white space"


def _unescape(text: str) -> str:
    return ESCAPE_SEQUENCE.sub(lambda found: ESCAPES[found[0]], text)


def _match_lines(text: str, old: str, new: str) -> list[TextMatch]:
    """Whole lines that are those of `old` but for white space; `new` is indented as they are."""
    inner = old.removeprefix("\n").removesuffix("\n")
    wanted, lines = inner.split("\n"), text.split("\n")
    squeezed, target = [_normalize(line) for line in lines], [_normalize(line) for line in wanted]
    starts, at = [0], 0
    for line in lines:
        starts.append(at := at + len(line) + 1)
    places: list[TextMatch] = []
    for first, line in enumerate(squeezed):
        if line != target[0] or squeezed[first : first + len(target)] != target:
            continue
        last = first + len(target)
        fitted = _reindent(new, wanted, lines[first:last])
        if fitted is None:
            continue
        start = starts[first] - (old.startswith("\n") and first > 0)
        end = min(starts[last] - 1 + (old.endswith("\n") and last < len(lines)), len(text))
        places.append(TextMatch(start, end, fitted))
    return places


def _normalize(line: str) -> str:
    return " ".join(line.translate(KEYBOARD_SIGNS).split())


def _reindent(new: str, wanted: list[str], there: list[str]) -> str | None:
    """`new` with the indentation that lines have where those wanted had another; None when that is not clear."""
    pairs = {(_get_indent(one), _get_indent(other)) for one, other in zip(wanted, there, strict=True) if one.strip()}
    known = dict(pairs)
    if len(known) < len(pairs):
        return None
    if all(one == other for one, other in pairs):
        return new
    deeper = {other.removesuffix(one) for one, other in pairs if other.endswith(one)}
    shift = deeper.pop() if len(deeper) == 1 and all(other.endswith(one) for one, other in pairs) else None
    lines: list[str] = []
    for line in new.split("\n"):
        indent = _get_indent(line)
        if not line.strip():
            lines.append(line)
        elif indent in known:
            lines.append(known[indent] + line[len(indent) :])
        elif shift is not None:
            lines.append(shift + line)
        else:
            return None
    return "\n".join(lines)


def _get_indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
