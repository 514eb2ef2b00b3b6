"""Files that run later or instruct an agent. Each change to them is asked about, with the reason."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

import msgspec

FOLDERS = "(?:[^/]+/)*"
"""Matches any folders at the beginning of a path, as `**/` in a pattern."""


class PatternGroup(msgspec.Struct, forbid_unknown_fields=True):
    """Patterns of files or commands, with the reason that they share."""

    patterns: list[str]
    reason: str


class Unpacking(msgspec.Struct, forbid_unknown_fields=True):
    """When a program writes files whose names its command line does not show."""

    words: list[str] = []


class ProtectedTable(msgspec.Struct, forbid_unknown_fields=True):
    """The content of protected.toml."""

    files: list[PatternGroup]
    unpacking: dict[str, Unpacking]


@dataclass(frozen=True)
class Protection:
    """A pattern of protected files."""

    pattern: str
    reason: str


@cache
def load_table() -> ProtectedTable:
    """Read protected.toml."""
    text = (files("crow_permissions") / "protected.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), ProtectedTable)


@cache
def load_protections() -> tuple[tuple[re.Pattern[str], Protection], ...]:
    """Return the patterns that crow brings."""
    groups = load_table().files
    return tuple(
        (to_regex(pattern), Protection(pattern, group.reason)) for group in groups for pattern in group.patterns
    )


@cache
def load_any() -> re.Pattern[str]:
    """Return an expression that matches what any of the patterns that crow brings does: one is faster than 400."""
    patterns = [regex.pattern.removeprefix(FOLDERS) for regex, _ in load_protections()]
    return re.compile(f"{FOLDERS}(?:{'|'.join(patterns)})", re.IGNORECASE | re.DOTALL)


def unpacks(words: Sequence[str]) -> bool:
    """Test whether a command writes files whose names it does not show, as programs that unpack archives do."""
    table = load_table().unpacking
    found = table.get(" ".join(words[:2])) or table.get(words[0].rpartition("/")[2])
    if found is None or not found.words:
        return found is not None
    return any(fnmatchcase(word, pattern) for word in words[1:] for pattern in found.words)


def find_protection(path: str, more: Sequence[str] = ()) -> Protection | None:
    """Find the pattern that protects a path, relative to the root of a session. `more` are further patterns."""
    brought = load_protections() if load_any().fullmatch(path) else ()
    for regex, protection in (*brought, *to_protections(more)):
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
    parts = {"**/": FOLDERS, "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(parts.get(piece, re.escape(piece)) for piece in pieces), re.IGNORECASE | re.DOTALL)
