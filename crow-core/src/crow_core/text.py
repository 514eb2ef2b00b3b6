"""Make text from outside safe to show: on one line, on several lines, or as a Markdown code block."""

import re

CONTROL_CHARACTERS: dict[int, str | None] = {
    **dict.fromkeys((*range(32), *range(127, 160), 0x2028, 0x2029), " "),
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xE0000, 0xE0080)), None),
}
"""Maps characters that a terminal or an editor might obey (C0, C1, line separators) to a space, and those that hide or
reorder text (directions, Unicode tags) to nothing."""


def to_line(text: str) -> str:
    """Replace control characters and line breaks, so that the text fits a title or another single line."""
    return text.translate(CONTROL_CHARACTERS)


def clean_lines(text: str) -> str:
    """Replace control characters, but keep the line breaks."""
    return "\n".join(to_line(line) for line in text.splitlines())


def fence(text: str) -> str:
    """Make a Markdown code block that the text itself cannot close."""
    marks = "`" * (max(map(len, re.findall("`{3,}", text)), default=2) + 1)
    return f"{marks}\n{text}\n{marks}"
