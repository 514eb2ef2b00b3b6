"""Make text from outside safe to show: on one line, on several, or as a Markdown code block."""

import re

CONTROL_CHARACTERS: dict[int, str | None] = {
    **dict.fromkeys((*range(32), *range(127, 160), 0x2028, 0x2029), " "),
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xE0000, 0xE0080)), None),
}
"""What a terminal or an editor might obey rather than show (C0, C1, line separators), and what hides or turns text
around (directions, Unicode tags)."""


def to_line(text: str) -> str:
    """Text without control characters, for a title or another place that is one line."""
    return text.translate(CONTROL_CHARACTERS)


def fence(text: str) -> str:
    """A Markdown code block that its own content cannot close."""
    fence = "`" * (max(map(len, re.findall("`{3,}", text)), default=2) + 1)
    return f"{fence}\n{text}\n{fence}"


def clean_lines(text: str) -> str:
    """Text of many lines without other control characters."""
    return "\n".join(to_line(line) for line in text.splitlines())
