"""Find a text that a model copied inexactly: with other white space, quotes, dashes or escapes."""

import re
from dataclasses import dataclass

TYPOGRAPHIC_SIGNS = {"'": "‘’‚‛", '"': "“”„", "-": "‐‑‒–—−", " ": "\u00a0"}
KEYBOARD_SIGNS = {ord(sign): plain for plain, signs in TYPOGRAPHIC_SIGNS.items() for sign in signs}
"""Translation table from typographic signs to those on a keyboard."""
ESCAPES = {r"\n": "\n", r"\t": "\t", r"\"": '"', r"\'": "'", r"\\": "\\"}
ESCAPE_SEQUENCE = re.compile(r"""\\[nt"'\\]""")


@dataclass(frozen=True)
class TextMatch:
    """A part of a text, from `start` to `end`, and the text to put there."""

    start: int
    end: int
    replacement: str


def find_occurrences(text: str, needle: str) -> list[int]:
    """Return the offsets of all occurrences of `needle`, overlapping ones included."""
    found: list[int] = []
    at = text.find(needle)
    while at >= 0:
        found.append(at)
        at = text.find(needle, at + 1)
    return found


def find_separate(text: str, needle: str) -> list[int]:
    """Return the offsets of the occurrences of `needle` from left to right that do not overlap the one before."""
    return [match.start() for match in re.finditer(re.escape(needle), text)]


def find_fuzzy_matches(text: str, old: str, new: str) -> tuple[list[TextMatch], str]:
    """Return the matches of `old` under the first tolerance that yields any, and how they differ from `old`."""
    if starts := find_occurrences(text.translate(KEYBOARD_SIGNS), old.translate(KEYBOARD_SIGNS)):
        return [TextMatch(start, start + len(old), new) for start in starts], "with other quotes or dashes"
    plain = _unescape(old)
    if plain != old and plain.strip() and (starts := find_occurrences(text, plain)):
        return [TextMatch(start, start + len(plain), _unescape(new)) for start in starts], "without the escapes"
    return _match_lines(text, old, new), "with other white space"


def _unescape(text: str) -> str:
    return ESCAPE_SEQUENCE.sub(lambda found: ESCAPES[found[0]], text)


def _match_lines(text: str, old: str, new: str) -> list[TextMatch]:
    """Return the runs of whole lines that differ from `old` only in white space, with `new` indented like them."""
    inner = old.removeprefix("\n").removesuffix("\n")
    wanted, lines = inner.split("\n"), text.split("\n")
    normalized, target = [_normalize(line) for line in lines], [_normalize(line) for line in wanted]
    starts, at = [0], 0
    for line in lines:
        starts.append(at := at + len(line) + 1)
    matches: list[TextMatch] = []
    for first, line in enumerate(normalized):
        if line != target[0] or normalized[first : first + len(target)] != target:
            continue
        last = first + len(target)
        replacement = _reindent(new, wanted, lines[first:last])
        if replacement is None:
            continue
        start = starts[first] - 1 if old.startswith("\n") and first > 0 else starts[first]
        end = starts[last] if old.endswith("\n") and last < len(lines) else starts[last] - 1
        matches.append(TextMatch(start, min(end, len(text)), replacement))
    return matches


def _normalize(line: str) -> str:
    """Replace typographic signs, and each run of white space by one space."""
    return " ".join(line.translate(KEYBOARD_SIGNS).split())


def _reindent(new: str, wanted: list[str], actual: list[str]) -> str | None:
    """Change the indentation of `new` as the actual lines differ from those wanted; None when that is ambiguous."""
    pairs = {(_get_indent(one), _get_indent(other)) for one, other in zip(wanted, actual, strict=True) if one.strip()}
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
