"""Files that run later or instruct an agent. A change of them is asked about, with the reason."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import msgspec


class PatternGroup(msgspec.Struct, forbid_unknown_fields=True):
    """Patterns of files or commands, with the reason that they share."""

    patterns: list[str]
    reason: str


class ProtectedTable(msgspec.Struct, forbid_unknown_fields=True):
    """The content of protected.toml."""

    files: list[PatternGroup]


@dataclass(frozen=True)
class Protection:
    """A pattern of protected files."""

    pattern: str
    reason: str


@cache
def load_protections() -> tuple[tuple[re.Pattern[str], Protection], ...]:
    """Read the patterns that crow brings."""
    text = (files("crow_permissions") / "protected.toml").read_text("utf-8")
    table = msgspec.convert(tomllib.loads(text), ProtectedTable)
    return tuple(
        (to_regex(pattern), Protection(pattern, group.reason)) for group in table.files for pattern in group.patterns
    )


def find_protection(path: str, more: Sequence[str] = ()) -> Protection | None:
    """Find the pattern that protects a path, relative to the root of a session. `more` are further patterns."""
    for regex, protection in (*load_protections(), *to_protections(more)):
        if regex.fullmatch(path):
            return protection
    return None


def to_protections(patterns: Sequence[str]) -> Iterator[tuple[re.Pattern[str], Protection]]:
    """Yield the user's own patterns."""
    for pattern in patterns:
        yield to_regex(pattern), Protection(pattern, "[permissions] protected names it")


@cache
def to_regex(pattern: str) -> re.Pattern[str]:
    """Convert a pattern to a regular expression. `**/` matches any folders, `**` at the end everything below."""
    parts = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(parts.get(piece, re.escape(piece)) for piece in pieces), re.IGNORECASE | re.DOTALL)
