"""Shorten texts, and say in one way how much of them is left out, and how many things there are."""

import re

LEFT_OUT = re.compile(r"\[[\d,]+ of [\d,]+ \w+ left out(?:; (?P<hint>[^\]\n]+))?\]")
"""The note that `describe_left_out` makes."""


def shorten_line(line: str, limit: int) -> str:
    """Return a line of at most `limit` characters; a longer one ends with `…`."""
    return line if len(line) <= limit else f"{line[: limit - 1].rstrip()}…"


def shorten_middle(text: str, limit: int, gap: str = " … ") -> str:
    """Return a text of at most `limit` characters; of a longer one, the gap stands for its middle."""
    half = max(limit - len(gap), 0) // 2
    return text if len(text) <= limit else text[:half] + gap + text[len(text) - half :]


def leave_out(text: str, limit: int, hint: str = "", *, tail: int = 0, space: str = "\n\n") -> str:
    """Return `limit` characters of a longer text, the last `tail` of them from its end, with a note between."""
    if len(text) <= limit:
        return text
    end = text[len(text) - tail :]
    note = describe_left_out(len(text) - limit, len(text), hint)
    return f"{text[: limit - tail]}{space}{note}{space if tail else ''}{end}"


def describe_left_out(count: int, whole: int, hint: str = "", unit: str = "characters") -> str:
    """Say how much of a text is left out; the `hint` says how to read it."""
    return f"[{count:,} of {whole:,} {unit} left out{'; ' if hint else ''}{hint}]"


def format_count(count: int, noun: str) -> str:
    """Format a number of things: `1 file`, `1,200 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
