"""Text from outside: safe to show on one line, on several lines, or as a Markdown code block; and decoded as JSON."""

import re
from collections.abc import Iterable
from typing import Any, cast

import msgspec

CONTROL_CHARACTERS: dict[int, str | None] = {
    **dict.fromkeys((*range(32), *range(127, 160), 0x2028, 0x2029), " "),
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xE0000, 0xE0080)), None),
}
"""Maps characters that a terminal or an editor might obey (C0, C1, line separators) to a space, and those that hide or
reorder text (directions, Unicode tags) to nothing."""

ESCAPED = {code: f"\\u{code:04x}" for code in CONTROL_CHARACTERS if chr(code) not in "\n\t"}
"""A table for `str.translate` that makes control characters visible."""

INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)
"""Finds invisible characters, and those that change the order of others on the screen."""
REPLACEMENT = "\ufffd".encode()
CONTROL_IN_JSON = re.compile(  # each alternative begins with a literal, which makes the search many times faster
    rb"""\\(?:[\\rbf] | u(?:00(?:0[0-8b-fB-F]|1[0-9a-fA-F]|7[fF]|[89][0-9a-fA-F]) | 20(?:2[89a-eA-E]|6[6-9])
                       | [dD][bB]40\\u[dD][cC][0-7][0-9a-fA-F]))
    | \x7f | \xc2[\x80-\x9f] | \xe2(?:\x80[\xa8-\xae] | \x81[\xa6-\xa9]) | \xf3\xa0[\x80\x81][\x80-\xbf]""",
    re.VERBOSE,
)
"""Finds CONTROL_CHARACTERS in the strings of a JSON text, escaped or as UTF-8, but no tab or newline. It also finds an
escaped backslash, so that what follows it is not taken for an escape."""


def clean_json(text: bytes) -> bytes:
    """Replace the control characters in all strings of a JSON text, except tabs and newlines, by U+FFFD.

    A carriage return becomes a newline, or is removed before a newline and at the end of a string.
    """
    if text.isascii() and b"\\" not in text and b"\x7f" not in text:
        return text  # at once, for an image of megabytes
    return CONTROL_IN_JSON.sub(to_clean, text)


def to_clean(found: re.Match[bytes]) -> bytes:
    """Return the replacement of a match of CONTROL_IN_JSON."""
    match found[0]:
        case rb"\\" as backslash:
            return backslash
        case rb"\r" | rb"\u000d" | rb"\u000D":
            at_end = found.string.startswith((rb"\n", b'"'), found.end())
            return b"" if at_end else rb"\n"
        case _:
            return REPLACEMENT


def escape_controls(text: str) -> str:
    """Replace the characters that control a terminal by `\\uXXXX`, so that they are harmless and visible."""
    return text.translate(ESCAPED)


def to_line(text: str) -> str:
    """Replace control characters and line breaks, so that the text fits a title or another single line."""
    return text.translate(CONTROL_CHARACTERS)


def show_invisible(text: str) -> str:
    """Replace characters that are not seen or that reorder text by their escapes, such as `\\u200b`, for questions."""
    return INVISIBLE.sub(lambda found: found[0].encode("unicode_escape").decode().replace("\\x", "\\u00"), text)


def clean_lines(text: str) -> str:
    """Replace control characters, but keep the line breaks."""
    return "\n".join(to_line(line) for line in text.splitlines())


def fence(text: str) -> str:
    """Make a Markdown code block that the text itself cannot close."""
    marks = "`" * (max(map(len, re.findall("`{3,}", text)), default=2) + 1)
    return f"{marks}\n{text}\n{marks}"


MAX_DEPTH = 100
"""The most levels of JSON that are read. Deeper JSON exhausts the stack of one of the encoders that it passes."""
TOO_DEEP = f"it has more than {MAX_DEPTH} levels"

JSON = msgspec.json.Decoder()


def decode_json(text: str | bytes) -> Any:
    """Decode JSON. Raises ValueError, also for JSON of more than MAX_DEPTH levels."""
    try:
        value: Any = JSON.decode(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    brackets = text.count(b"{") + text.count(b"[") if isinstance(text, bytes) else text.count("{") + text.count("[")
    if brackets > MAX_DEPTH and is_deep(value):
        raise ValueError(TOO_DEEP)
    return value


def is_deep(value: Any) -> bool:
    """True if a JSON value has more than MAX_DEPTH levels."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in list_inner(outer)]
    return bool(level)


def list_inner(value: Any) -> Iterable[Any]:
    """Return the values inside a JSON object or array; none for any other value."""
    match value:
        case dict():
            return cast("dict[str, Any]", value).values()
        case list():
            return cast("list[Any]", value)
        case _:
            return ()
