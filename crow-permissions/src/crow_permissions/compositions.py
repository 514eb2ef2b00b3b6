"""Command lines that consist of simple commands alone, such as `git status && git diff | head -20`.

They are compared with the rules that allow. `simple_commands` may find a command where there is none; here, none may be
missed. So only a small part of the shell's language is accepted: plain words, quotes around text alone, redirections,
line feeds, and the operators `;`, `&&`, `||`, `|` and `2>&1`. Each byte has to belong to a node of the tree that is
known here, or to a blank between two. For anything else, the result is None, and the user is asked.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from crow_permissions.command_tables import get_tables
from crow_permissions.programs import read_usage
from crow_permissions.shell_words import unescape
from crow_permissions.simple_commands import parse

if TYPE_CHECKING:
    from tree_sitter import Node

LENGTH_LIMIT = 10_000
"""Bytes of a command line that is read."""
NODES_LIMIT = 2_000
"""Nodes of the tree of a command line that is read."""

STRUCTURE = {"program", "list", "pipeline", "command", "command_name", "redirected_statement", "file_redirect"}
"""Nodes that only contain others."""
WORDS = {"word", "number", "string", "raw_string", "concatenation"}
"""Nodes that are a word, whatever they contain."""
JOINERS = {";", "&&", "||", "|", "\n"}
REDIRECTIONS = {">", ">>", "<", ">&"}

PIECE = re.compile(
    r"([\w./:=@,+%-]+(?:(?<=[\w.])~[\w./:=@,+%-]*)?)"
    r"|'([^'\0-\x08\v-\x1f\x7f]*)'"
    r'|"((?:[^"$`\\\0-\x08\v-\x1f\x7f]|\\[^\0-\x1f\x7f])*)"',
    re.ASCII,
)
"""A piece of a word: plain characters, which the shell leaves alone, or a quoted text without expansions."""
PROGRAM = re.compile(r"[\w./+-]+", re.ASCII)
BLANKS = re.compile(r"[ \t\n]*")
HIDDEN_BLANK = "\x1f"
"""Stands for a blank inside a word, where a pattern of a rule means one between words."""


@dataclass
class SimpleCommand:
    """One simple command, in which nothing is left for the shell to find out."""

    joiner: str = ""
    """The operator before it."""
    words: list[str] = field(default_factory=list[str])
    """As the shell makes them."""
    gaps: list[str] = field(default_factory=list[str])
    """The blanks before each word."""
    quoted: list[bool] = field(default_factory=list[bool])
    """For each word, whether it was written in another way, with quotes."""
    has_input: bool = False
    """True if it reads the output of a command, or a file."""
    writes: list[str] = field(default_factory=list[str])
    """Files to which redirections write."""
    reads: list[str] = field(default_factory=list[str])
    """Files from which redirections read."""

    @property
    def text(self) -> str:
        """The words with the blanks between them, as patterns of rules are compared with it."""
        return "".join(gap + word for gap, word in zip(["", *self.gaps[1:]], self.words, strict=True))

    @property
    def masked_text(self) -> str:
        """Like `text`, but blanks inside words do not count as blanks."""
        words = [re.sub(r"\s", HIDDEN_BLANK, word) for word in self.words]
        return "".join(gap + word for gap, word in zip(["", *self.gaps[1:]], words, strict=True))

    def begins_with(self, beginnings: list[str]) -> bool:
        """Test whether it begins with the words of one of these commands, written without quotes."""
        return any(
            self.words[: len(words)] == words and not any(self.quoted[: len(words)])
            for words in map(str.split, beginnings)
        )

    @property
    def only_reads(self) -> bool:
        """True if programs.toml lists it with all its words as a command that only reads."""
        return not self.quoted[0] and "/" not in self.words[0] and read_usage(self.words).only_reads

    @property
    def is_data_command(self) -> bool:
        """True if it takes its arguments and its input as data, and changes neither files that run nor settings."""
        return self.only_reads or self.begins_with(get_tables().data_commands)


@dataclass(frozen=True)
class Composition:
    """A command line that consists of simple commands alone."""

    commands: tuple[SimpleCommand, ...]
    folder: str = ""
    """The folder into which it changes first, by `cd FOLDER &&`; then the folder in which it runs."""

    @property
    def is_data(self) -> bool:
        """True if all its commands take their arguments and their input as data."""
        return all(command.is_data_command for command in self.commands)


@lru_cache(maxsize=32)
def read_composition(text: str) -> Composition | None:
    """Read a command line that consists of simple commands alone; None for any other.

    The commands are safe to compare one by one: none changes the shell for those behind it, none reads its input as
    commands, and no quotes hide code.
    """
    try:
        data = text.strip(" \t\n").encode()
    except UnicodeEncodeError:
        return None
    if not data or len(data) > LENGTH_LIMIT:
        return None
    root = parse(data)
    tokens = None if root is None or root.has_error else list_tokens(root)
    commands = None if tokens is None else to_commands(tokens, data)
    folder = ""
    if commands and len(commands) > 1 and commands[1].joiner == "&&" and is_change_of_folder(commands[0]):
        folder, commands = commands[0].words[1], commands[1:]
    if not commands or not all(is_separable(command) for command in commands):
        return None
    return Composition(tuple(commands), folder)


def list_tokens(root: "Node") -> "list[Node] | None":
    """List the words and the operators of a tree in their order; None if it has a node that is not known here."""
    tokens: list[Node] = []
    todo, count = [root], 0
    while todo:
        node = todo.pop()
        count += 1
        if count > NODES_LIMIT or node.is_missing:
            return None
        if node.type in WORDS or node.type == "file_descriptor" or node.type in JOINERS | REDIRECTIONS:
            tokens.append(node)
        elif node.type in STRUCTURE:
            todo += reversed(node.children)
        else:
            return None
    return tokens


def to_commands(tokens: "list[Node]", data: bytes) -> list[SimpleCommand] | None:
    """Put the tokens together as the shell does; None if something is left over."""
    commands, command = list[SimpleCommand](), SimpleCommand()
    at, is_word_before = 0, False
    following = iter(tokens)
    for token in following:
        gap, kind = data[at : token.start_byte].decode(), token.type
        at = token.end_byte
        if not BLANKS.fullmatch(gap):
            return None
        if "\n" in gap or kind in JOINERS:
            is_word_before = False
            joiner = "\n" if "\n" in gap else kind
            if command.words:
                commands.append(command)
                command = SimpleCommand(joiner)
            elif joiner != "\n" or command.writes or command.reads:
                return None
            if kind in JOINERS - {"\n"} and joiner == "\n":
                return None  # an operator at the beginning of a line
            if kind in JOINERS:
                continue
            gap = ""
        if kind in REDIRECTIONS or kind == "file_descriptor":
            if kind == "file_descriptor" and is_word_before and not gap:
                return None
            end = read_redirection(command, token, following, data)
            if end is None:
                return None
            at = end
        else:
            word = to_word(token)
            if word is None or (is_word_before and not gap):
                return None
            command.words.append(word)
            command.gaps.append(gap)
            command.quoted.append(word.encode() != token.text)
        is_word_before = True
    if not BLANKS.fullmatch(data[at:].decode()):
        return None
    if command.words:
        commands.append(command)
    elif command.joiner in ("&&", "||", "|") or command.writes or command.reads:
        return None
    for each in commands:
        each.has_input |= each.joiner == "|"
    return commands


def read_redirection(command: SimpleCommand, token: "Node", following: "Iterator[Node]", data: bytes) -> int | None:
    """Add a redirection to a command, and return its end; None if it is not known here."""
    if token.type == "file_descriptor":
        operator = next(following, None)
        if operator is None or operator.start_byte != token.end_byte or (token.text or b"") not in (b"1", b"2"):
            return None
    elif command.words and data[token.start_byte - 1 : token.start_byte].isdigit():
        return None  # the shell may take digits before it for a file descriptor
    else:
        operator = token
    target = next(following, None)
    if operator.type not in REDIRECTIONS or target is None:
        return None
    gap = data[operator.end_byte : target.start_byte].decode()
    path = to_word(target)
    if path is None or gap.strip(" "):
        return None
    if operator.type == ">&":
        return target.end_byte if not gap and (target.text or b"") in (b"1", b"2") else None
    if path == "/dev/null":
        return target.end_byte
    if not path or path.startswith(("/dev", "/proc", "-")) or (operator is not token and operator.type == "<"):
        return None
    if operator.type == "<":
        command.reads.append(path)
        command.has_input = True
    else:
        command.writes.append(path)
    return target.end_byte


def to_word(node: "Node") -> str | None:
    """Convert a node to the word that the shell makes of it; None if that is not certain."""
    text = (node.text or b"").decode()
    if node.type not in WORDS:
        return None
    word, at = "", 0
    while at < len(text):
        if (piece := PIECE.match(text, at)) is None:
            return None
        plain, raw, quoted = piece.groups()
        word += plain or raw or (unescape(quoted, '$`"\\') if quoted else "")
        at = piece.end()
    return word


def is_change_of_folder(command: SimpleCommand) -> bool:
    """Test whether a command only changes into a folder; `terminal` empties CDPATH."""
    plain = not (command.writes or command.reads or command.quoted[0]) and len(command.words) == 2
    return plain and command.words[0] == "cd" and not command.words[1].startswith(("-", "+"))


def is_separable(command: SimpleCommand) -> bool:
    """Test whether a simple command may be judged without those around it."""
    name, tables = command.words[0], get_tables()
    if command.quoted[0] or not PROGRAM.fullmatch(name) or name in tables.shell_builtins:
        return False
    if name == "printf" and any(word.startswith("-v") for word in command.words):
        return False  # sets a variable
    if command.has_input and not command.is_data_command:
        return False
    return not any(command.quoted) or command.is_data_command or command.begins_with(tables.quotable_commands)
