"""Patterns of commands by their first words, such as `git push` or `aws ssm get-*`."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

END = "$"
"""Stands in a pattern for the end of the command."""
WILDCARDS = frozenset("*?[")


class CommandPatterns:
    """A set of patterns. Each is compared with as many words of a command as it has itself."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self._literal: dict[str, list[tuple[list[str], str]]] = {}
        self._others: list[tuple[list[str], str]] = []
        for pattern, reason in reasons.items():
            words = pattern.split()
            same = self._others if WILDCARDS & set(words[0]) and words[0] != "[" else None
            (self._literal.setdefault(words[0], []) if same is None else same).append((words, reason))

    @property
    def programs(self) -> Iterable[str]:
        """The first words of the patterns that begin with a word without wildcards."""
        return self._literal

    def find(self, words: Sequence[str]) -> str | None:
        """Find the reason of the first pattern that describes a command; None if there is none."""
        for pattern, reason in (*self._literal.get(words[0], ()), *self._others):
            if matches_words(pattern, words):
                return reason
        return None

    def may_follow(self, words: Sequence[str]) -> bool:
        """True if a command with this known beginning may be a described one."""
        return any(
            matches_words(pattern[: len(words)], words)
            for pattern, _ in (*self._literal.get(words[0], ()), *self._others)
        )


def matches_words(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """True if a command begins with the words of a pattern."""
    if pattern[-1] == END:
        return len(words) == len(pattern) - 1 and matches_words(pattern[:-1], words)
    return len(words) >= len(pattern) and all(map(matches_word, words, pattern))


def matches_word(word: str, pattern: str) -> bool:
    """True if a word is the one that a pattern describes."""
    return word == pattern or (not WILDCARDS.isdisjoint(pattern) and fnmatchcase(word, pattern))
