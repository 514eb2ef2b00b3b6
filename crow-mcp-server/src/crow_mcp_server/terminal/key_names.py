"""The names of keys, and the characters that a keyboard sends for them."""

import re

from crow_mcp_server.refusal import ToolRefusal

KEYSTROKES = {
    "Enter": "\r", "Tab": "\t", "Escape": "\x1b", "Space": " ", "Backspace": "\x7f",
    "Up": "\x1b[A", "Down": "\x1b[B", "Right": "\x1b[C", "Left": "\x1b[D", "Home": "\x1b[H", "End": "\x1b[F",
    "PageUp": "\x1b[5~", "PageDown": "\x1b[6~", "Insert": "\x1b[2~", "Delete": "\x1b[3~", "S-Tab": "\x1b[Z",
    "F1": "\x1bOP", "F2": "\x1bOQ", "F3": "\x1bOR", "F4": "\x1bOS", "F5": "\x1b[15~", "F6": "\x1b[17~",
    "F7": "\x1b[18~", "F8": "\x1b[19~", "F9": "\x1b[20~", "F10": "\x1b[21~", "F11": "\x1b[23~", "F12": "\x1b[24~",
}  # fmt: skip
OTHER_NAMES = {
    "return": "Enter", "cr": "Enter", "esc": "Escape", "bspace": "Backspace", "bs": "Backspace", "pgup": "PageUp",
    "pgdn": "PageDown", "pgdown": "PageDown", "ppage": "PageUp", "npage": "PageDown", "ins": "Insert", "ic": "Insert",
    "del": "Delete", "dc": "Delete", "btab": "S-Tab", "shift-tab": "S-Tab", "shift+tab": "S-Tab",
}  # fmt: skip
BY_NAME = {name.lower(): stroke for name, stroke in KEYSTROKES.items()} | {
    other: KEYSTROKES[name] for other, name in OTHER_NAMES.items()
}
CONTROL_KEY = re.compile(r"(?:C-|Ctrl-|Ctrl\+|Control-|Control\+|\^)([a-zA-Z@\[\\\]^_?]|Space)", re.IGNORECASE)
META_KEY = re.compile(r"(?:M-|Alt-|Alt\+|Meta-|Meta\+)(.)", re.IGNORECASE)
KEY_NAME = re.compile(r"[<^\\]?\w[\w+-]+>?|\\.")
"""The form of a key's name. Other words, such as `:wq`, are typed as they are."""


def to_keystrokes(keys: str) -> list[str]:
    """Convert names of keys such as "C-c", "Up" or "Enter" to the characters that a keyboard sends for each.

    Single characters, and words that do not look like a name, stay as they are. Raises ToolRefusal for an unknown name.
    """
    return [to_keystroke(key) for key in keys.split(" ") if key] or list(keys)


def to_keystroke(key: str) -> str:
    """Convert the name of a key. Raises ToolRefusal."""
    if not key.isprintable():  # the characters themselves
        return key.replace("\r\n", "\r").replace("\n", "\r")
    if len(key) == 1:
        return key
    name = key[1:-1] if key[0] == "<" and key[-1] == ">" else key
    if stroke := BY_NAME.get(name.lower()):
        return stroke
    if control := CONTROL_KEY.fullmatch(name):
        return {"?": "\x7f", "SPACE": "\0"}.get(control[1].upper()) or chr(ord(control[1].upper()) & 31)
    if meta := META_KEY.fullmatch(name):
        return f"\x1b{meta[1]}"
    if not KEY_NAME.fullmatch(key):
        return key
    raise ToolRefusal(
        f"Nothing was typed: there is no key {key[:40]!r}. Known are {', '.join(KEYSTROKES)}, C-a to C-z, M-a to M-z, "
        'single characters, and "kill" alone. Give text as input, not as keys.'
    )
