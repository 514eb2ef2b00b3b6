"""The simple commands that a command line of the shell runs, as far as its text tells (tree-sitter-bash).

They are compared with the rules that deny or ask. A rule that allows is never compared with them: this reading of a
command may differ from the shell's own, so it may only make a decision stricter.
"""

import os
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

UNKNOWN = "\0"
"""Stands in a word for what only the shell can know: the value of a variable, the output of a command, a file name."""
LENGTH_LIMIT = 50_000
"""Bytes of a command line that are read; a longer one is not known."""
NODES_LIMIT = 20_000
"""Nodes of the tree that are read; a command line with more is not known."""
DEPTH_LIMIT = 10
"""Command lines inside command lines that are read, as in `sh -c "sh -c …"`; deeper ones are not known."""

SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "rbash", "fish"}
KEYWORDS = {"!", "{", "}", "if", "then", "elif", "else", "fi", "while", "until", "do", "done", "for", "case", "esac"}
FIND_ACTIONS = {
    "find": ("-exec", "-execdir", "-ok", "-okdir"),
    "fd": ("-x", "-X", "--exec", "--exec-batch"),
    "fdfind": ("-x", "-X", "--exec", "--exec-batch"),
}
"""Options of programs that find files, behind which a command stands."""


class Wrapper(msgspec.Struct, forbid_unknown_fields=True):
    """A program that runs the command behind its options."""

    values: list[str] = []
    operands: int = 0


class Subcommands(msgspec.Struct, forbid_unknown_fields=True):
    """A program whose subcommand may stand behind options."""

    values: list[str] = []
    flags: list[str] = []
    same: dict[str, str] = {}


class CommandTables(msgspec.Struct, forbid_unknown_fields=True):
    """The content of simple_commands.toml, where each field is explained."""

    project_runners: list[str]
    wrappers: dict[str, Wrapper]
    subcommands: dict[str, Subcommands]


@dataclass(frozen=True)
class CommandLine:
    """The simple commands of a command line."""

    commands: set[str] = field(default_factory=set[str])
    """Each in all its spellings, with UNKNOWN for what only the shell can know."""
    unclear: set[str] = field(default_factory=set[str])
    """The beginnings of those of which more is not known; "" if something cannot be read at all."""

    def may_match(self, pattern: str | None) -> bool:
        """Test whether something that is not known may be what a rule's pattern describes."""
        if not self.unclear:
            return False
        if pattern is None:
            return True
        known = pattern[: min((pattern.find(char) for char in "*?[" if char in pattern), default=len(pattern))]
        return any(start.startswith(known) or known.startswith(start) for start in self.unclear)

    def find_project_runner(self) -> str:
        """Find a program among the commands that runs code of the folder in which it starts; "" if there is none."""
        for command in sorted(self.commands):
            program = command.partition(" ")[0]
            if "/" in program or any(fnmatchcase(program, pattern) for pattern in get_tables().project_runners):
                return program
        return ""


@cache
def get_tables() -> CommandTables:
    """Return the tables of programs."""
    text = (files("crow_core.permission") / "simple_commands.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), CommandTables)


@cache
def get_parser() -> "Parser":
    """Return the parser of the shell's language."""
    import tree_sitter  # imported here: it takes 10 ms, and is needed only where a rule denies or asks about commands
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def read_command_line(text: str) -> CommandLine:
    """Find the simple commands in a command line, also those inside others."""
    found = CommandLine()
    read_into(found, text, 0)
    return found


def read_into(found: CommandLine, text: str, depth: int) -> None:
    """Add the simple commands of a text."""
    data = text.encode(errors="replace")
    if depth > DEPTH_LIMIT or len(data) > LENGTH_LIMIT:
        found.unclear.add("")
        return
    root = get_parser().parse(data).root_node
    if root.has_error:
        found.unclear.add("")
    todo, count = [root], 0
    while todo:
        node = todo.pop()
        count += 1
        if count > NODES_LIMIT:
            found.unclear.add("")
            return
        if node.type in ("command", "declaration_command", "unset_command", "ERROR"):
            read_command(found, node, depth)
        todo += node.named_children


def read_command(found: CommandLine, node: "Node", depth: int) -> None:
    """Add the command of a node of the tree."""
    words: list[str] = []
    text, start, end = node.text or b"", node.start_byte, -1
    for child in node.children:
        if child.type in ("variable_assignment", "file_redirect", "herestring_redirect", "heredoc_redirect"):
            end = -1
            continue
        before, after = split_gap(text[end - start : child.start_byte - start]) if end >= 0 else ("", "")
        if before and words:
            words[-1] += before
        if after is None and words:
            words[-1] += to_word(child)
        else:
            words.append((after or "") + to_word(child))
        end = child.end_byte
    add_words(found, words, depth)


def split_gap(gap: bytes) -> tuple[str, str | None]:
    """Split the text between two nodes, where the grammar drops escaped blanks, at its first real blank.

    Returns what belongs to the word before and what to the one behind; None for that if there is no blank.
    """
    text = gap.decode(errors="replace").replace("\\\n", "")
    at = 0
    while at < len(text) and text[at] not in " \t\n":
        at += 2 if text[at] == "\\" else 1
    if at >= len(text):
        return unescape(text), None
    return unescape(text[:at]), unescape(text[at:].lstrip(" \t\n"))


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


def add_words(found: CommandLine, words: Sequence[str], depth: int) -> None:
    """Add a command, and those that it runs."""
    while words and (words[0] in KEYWORDS or is_assignment(words[0])):
        words = words[1:]
    if not words:
        return
    if depth > DEPTH_LIMIT:
        found.unclear.add("")
        return
    name = os.path.basename(words[0])
    for first in {words[0], name}:
        add_spelling(found, [first, *words[1:]])
    tables = get_tables()
    if subcommands := tables.subcommands.get(name):
        add_subcommand(found, name, words[1:], subcommands)
    if name == "env" and (script := find_value(words, ("-S", "--split-string"))) is not None:
        read_into(found, script, depth + 1)
    if name in SHELLS:
        add_script(found, words[1:], depth)
    elif name == "eval":
        read_into(found, " ".join(words[1:]), depth + 1)
    elif name == "trap" and len(words) > 1:
        read_into(found, words[1], depth + 1)
    elif name in ("su", "script") and (script := find_value(words, ("-c", "--command"))) is not None:
        read_into(found, script, depth + 1)
    elif name in FIND_ACTIONS:
        for inner in list_actions(words, FIND_ACTIONS[name]):
            add_words(found, inner, depth + 1)
    if wrapper := tables.wrappers.get(name):
        for inner in unwrap(words[1:], wrapper):
            if inner[0] in ("-c", "--command"):
                read_into(found, " ".join(inner[1:]), depth + 1)
            add_words(found, inner, depth + 1)


def add_spelling(found: CommandLine, words: Sequence[str]) -> None:
    """Add one spelling of a command."""
    spelling = " ".join(words)
    found.commands.add(spelling)
    if UNKNOWN in spelling:
        found.unclear.add(spelling.partition(UNKNOWN)[0])


def add_subcommand(found: CommandLine, name: str, words: Sequence[str], table: Subcommands) -> None:
    """Add a command without the options before its subcommand."""
    while words and words[0].startswith("-"):
        option = words[0].partition("=")[0]
        if option in table.values:
            words = words[1:] if "=" in words[0] else words[2:]
        elif option in table.flags:
            words = words[1:]
        else:
            found.unclear.add(f"{name} ")
            words = words[1:]
    if words:
        for subcommand in {words[0], table.same.get(words[0], words[0])}:
            add_spelling(found, [name, subcommand, *words[1:]])


def add_script(found: CommandLine, words: Sequence[str], depth: int) -> None:
    """Add the commands of `-c SCRIPT`, an argument of a shell."""
    for index, word in enumerate(words):
        if word.startswith("-") and not word.startswith("--") and "c" in word:
            scripts = [other for other in words[index + 1 :] if not other.startswith(("-", "+"))]
            if scripts:
                read_into(found, scripts[0], depth + 1)
            return
    if not any(not word.startswith("-") for word in words):  # it reads its input
        found.unclear.add("")


def find_value(words: Sequence[str], options: Sequence[str]) -> str | None:
    """Find the value of an option, joined with all words behind it."""
    for index, word in enumerate(words):
        for option in options:
            if word == option:
                return " ".join(words[index + 1 :])
            if word.startswith(f"{option}=" if option.startswith("--") else option):
                return " ".join([word[len(option) :].removeprefix("="), *words[index + 1 :]])
    return None


def list_actions(words: Sequence[str], actions: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the commands that are run for files that are found."""
    for index, word in enumerate(words):
        if word in actions:
            rest = words[index + 1 :]
            yield rest[: next((at for at, other in enumerate(rest) if other in (";", "+")), len(rest))]


def unwrap(words: Sequence[str], wrapper: Wrapper) -> Iterator[Sequence[str]]:
    """Yield the command behind a wrapper's options and operands."""
    while words and (words[0].startswith("-") or is_assignment(words[0])):
        if words[0] == "--":
            words = words[1:]
            break
        words = words[2:] if words[0] in wrapper.values else words[1:]
    words = words[wrapper.operands :]
    while words and is_assignment(words[0]):
        words = words[1:]
    if words:
        yield words


def is_assignment(word: str) -> bool:
    """Whether a word sets a variable for the command behind it."""
    name, equals, _ = word.partition("=")
    return bool(equals) and name.removesuffix("+").isidentifier()
