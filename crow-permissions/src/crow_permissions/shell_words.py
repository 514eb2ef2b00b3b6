"""The words of a parsed command line, as the shell reads them: without quotes and escapes."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node

UNKNOWN = "\0"
"""Stands in a word for what only the shell can know: the value of a variable, the output of a command, a file name."""


def to_word(node: "Node") -> str:
    """Convert a node to the text that the shell makes of it, with UNKNOWN for what only the shell can know."""
    text = (node.text or b"").decode(errors="replace")
    match node.type:
        case "command_name" | "concatenation" | "string" | "translated_string":
            return join_pieces(node)
        case "raw_string":
            return text[1:-1]
        case "ansi_c_string":
            return text[2:-1] if "\\" not in text else UNKNOWN
        case "string_content":
            return unescape(text, '$`"\\')
        case "word" | "number" | "special_variable_name" | "variable_name":
            plain = unescape(text)
            return plain if not set(text) & set("*?[{~") else "".join(UNKNOWN if c in "*?[{" else c for c in plain)
        case '"':
            return text[:-1]  # blanks before the closing quote
        case "$" if node.parent is not None and node.parent.type == "translated_string":
            return ""
        case _:
            return UNKNOWN if node.is_named else unescape(text)


def join_pieces(node: "Node") -> str:
    """Join the pieces of a word, and the text that the grammar leaves out between them."""
    text, start = (node.text or b""), node.start_byte
    pieces: list[str] = []
    at = start
    for child in node.children:
        pieces.append(unescape(text[at - start : child.start_byte - start].decode(errors="replace")))
        pieces.append(to_word(child))
        at = child.end_byte
    if not node.children:
        return unescape(text.decode(errors="replace"))
    return "".join(pieces) + unescape(text[at - start :].decode(errors="replace"))


def unescape(text: str, escapable: str = "") -> str:
    """Remove the backslashes before the characters that can be escaped, or before any."""
    if "\\" not in text:
        return text
    plain: list[str] = []
    characters = iter(text)
    for character in characters:
        if character == "\\":
            following = next(characters, "")
            if following != "\n":  # else the line goes on
                plain.append(following if not escapable or following in escapable else character + following)
        else:
            plain.append(character)
    return "".join(plain)
