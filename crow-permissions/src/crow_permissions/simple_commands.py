"""The simple commands that a command line of the shell runs, as far as its text tells (tree-sitter-bash).

They are compared with the rules that deny or ask. A rule that allows is never compared with them: this reading of a
command may differ from the shell's own, so it may only make a decision stricter.
"""

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from crow_permissions.command_tables import InlineCode, Subcommands, Wrapper, Writer, get_tables
from crow_permissions.programs import read_usage
from crow_permissions.shell_words import UNKNOWN, to_word, unescape

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

LENGTH_LIMIT = 20_000
"""Bytes of a command line that are read; a longer one is not known."""
NODES_LIMIT = 10_000
"""Nodes of the tree that are read; a command line with more is not known."""
OPERATORS_LIMIT = 1_000
"""Characters in a command line that may be operators; one with more is not known. The time that the parser takes for a
text with errors grows with the square of their number."""
DEPTH_LIMIT = 10
"""Command lines inside command lines that are read, as in `sh -c "sh -c …"`; deeper ones are not known."""

WORDS_LIMIT = 200
"""Words of a command inside another that are read; a longer one is not known."""
COMMANDS_LIMIT = 5_000
"""Spellings of commands that are listed; of a command line with more, the rest is not known."""
CODE_LIMIT = 2_000
"""Characters of code in another language that are looked at; longer code may run anything."""
ANYWHERE_LIMIT = 40
"""Words among which a command is looked for that may begin at any; with more, it is not known."""

SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "rbash", "fish"}
PLAIN_COMMAND = re.compile(r"(?!\w+\+?=)[\w ./:=@,+%-]*", re.ASCII)
"""A command of these characters alone that sets no variable: the shell runs it as it is written."""
KEYWORDS = {"!", "{", "}", "if", "then", "elif", "else", "fi", "while", "until", "do", "done", "for", "case", "esac"}
FOLDER_OPTIONS = ("-C", "--chdir", "--directory", "--prefix", "--cwd")
HARMLESS_FILES = {"/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty"}
OTHER_KEYWORDS = {"function", "select", "in"}
SPLITTING_OPTIONS = ("-S", *("--split-string"[:length] for length in range(3, 15)))
"""The option of `env` whose value is a command line; it may be abbreviated."""
COMMAND_VARIABLES = re.compile(
    r"\w*(COMMAND|PAGER|EDITOR|VISUAL|ASKPASS|LESSOPEN|LESSCLOSE|DIFF|GIT_SSH|BROWSER|PS[0-4])"
)
"""Variables whose values programs run."""
FIND_ACTIONS = {
    "find": ("-exec", "-execdir", "-ok", "-okdir"),
    "fd": ("-x", "-X", "--exec", "--exec-batch"),
    "fdfind": ("-x", "-X", "--exec", "--exec-batch"),
}
"""Options of programs that find files, behind which a command stands."""


@dataclass(frozen=True)
class CommandLine:
    """The simple commands of a command line."""

    commands: set[str] = field(default_factory=set[str])
    """Each in all its spellings, with UNKNOWN for what only the shell can know."""
    unclear: set[str] = field(default_factory=set[str])
    """The known beginnings of the others; "" if something cannot be read at all."""
    writes: set[str] = field(default_factory=set[str])
    """Paths of files that it writes, by redirection or by programs that are known to write."""
    changes: set[str] = field(default_factory=set[str])
    """Paths of files that it removes, or changes in other ways."""
    reads: set[str] = field(default_factory=set[str])
    """Paths of files that redirections read."""
    moves: list[str] = field(default_factory=list[str])
    """Folders into which it changes, in order."""
    texts: set[str] = field(default_factory=set[str], compare=False)
    """The command lines that were read, this one and those inside it."""

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
def get_parser() -> "Parser":
    """Return the parser of the shell's language."""
    import tree_sitter  # imported here: it takes 10 ms, and is needed only where a rule denies or asks about commands
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def parse(data: bytes) -> "Node | None":
    """Parse a command line; None if that may take long."""
    if len(data) > LENGTH_LIMIT or len(data) - len(data.translate(None, b"|&;<>(`")) > OPERATORS_LIMIT:
        return None
    return get_parser().parse(data).root_node


@lru_cache(maxsize=32)
def read_command_line(text: str) -> CommandLine:
    """Find the simple commands in a command line, also those inside others. The parser reads only what is not plain."""
    found = CommandLine()
    if len(text) <= LENGTH_LIMIT and PLAIN_COMMAND.fullmatch(text):
        words = text.split()
        if words and words[0] not in KEYWORDS | OTHER_KEYWORDS:
            add_words(found, words, 0)
            return found
    read_into(found, text, 0)
    return found


def read_into(found: CommandLine, text: str, depth: int) -> None:
    """Add the simple commands of a text."""
    if text in found.texts:
        return
    found.texts.add(text)
    is_too_much = depth > DEPTH_LIMIT or sum(map(len, found.texts)) > 2 * LENGTH_LIMIT
    root = None if is_too_much else parse(text.encode(errors="replace"))
    if root is None:
        found.unclear.add("")
        return
    if root.has_error or "@P}" in text:  # the value of a variable is expanded as a prompt
        found.unclear.add("")
    todo, count = [root], 0
    arguments: dict[int, list[Node]] = {}
    while todo:
        node = todo.pop()
        count += 1
        if count > NODES_LIMIT:
            found.unclear.add("")
            return
        if node.type == "redirected_statement" and (more := list_redirected_arguments(node)):
            if command := find_last_command(node):
                arguments.setdefault(command.id, []).extend(more)
            else:
                found.unclear.add("")
        elif node.type == "file_redirect":
            read_redirection(found, node)
        elif node.type == "variable_assignment":
            read_assignment(found, node, depth)
        elif node.type in ("command", "declaration_command", "unset_command", "ERROR"):
            read_command(found, node, arguments.get(node.id, ()), depth)
        todo += reversed(node.named_children)  # the first comes first: a folder changes before the commands behind it


def list_redirected_arguments(node: "Node") -> "list[Node]":
    """List the words that the grammar takes for part of a redirection, but the shell for arguments of the command."""
    found: list[Node] = []
    for child in node.named_children:
        if child.type == "file_redirect":
            target_is_inside = any(part.type in (">&-", "<&-") for part in child.children)
            words = [part for part in child.named_children if part.type != "file_descriptor"]
            found += words if target_is_inside else words[1:]
        elif child.type == "heredoc_redirect":
            outside = ("file_redirect", "heredoc_start", "heredoc_body", "heredoc_end", "file_descriptor", "pipeline")
            found += [part for part in child.named_children if part.type not in outside]
            found += list_redirected_arguments(child)
    return found


def find_last_command(node: "Node") -> "Node | None":
    """Find the command to which the redirections of a statement belong."""
    while node.type in ("redirected_statement", "pipeline", "list", "negated_command"):
        redirects = ("file_redirect", "heredoc_redirect", "herestring_redirect")
        bodies = [child for child in node.named_children if child.type not in redirects]
        if not bodies:
            return None
        node = bodies[-1]
    return node if node.type == "command" else None


def read_redirection(found: CommandLine, node: "Node") -> None:
    """Add the file of a redirection."""
    operators = [child.type for child in node.children if not child.is_named]
    words = [child for child in node.named_children if child.type != "file_descriptor"]
    if not words or not operators:
        return
    path = to_word(words[0])
    if operators[0].endswith("-") or (operators[0] in (">&", "<&") and path.isdecimal()):
        return
    if path not in HARMLESS_FILES:
        (found.reads if operators[0] == "<" else found.writes).add(path)


def read_assignment(found: CommandLine, node: "Node", depth: int) -> None:
    """Add the commands of a variable that programs run, such as GIT_PAGER."""
    name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
    if name and value and COMMAND_VARIABLES.fullmatch((name.text or b"").decode(errors="replace")):
        read_into(found, to_word(value), depth + 1)


def read_command(found: CommandLine, node: "Node", more: "Sequence[Node]", depth: int) -> None:
    """Add the command of a node of the tree, with `more` words."""
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
    add_words(found, [*words, *map(to_word, more)], depth)


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


def add_words(found: CommandLine, words: Sequence[str], depth: int) -> None:
    """Add a command, and those that it runs."""
    before = sum(1 for _ in takewhile(lambda word: word in KEYWORDS or is_assignment(word), words))
    if not (words := words[before:]):
        return
    if depth > DEPTH_LIMIT or len(found.commands) > COMMANDS_LIMIT or (depth and len(words) > WORDS_LIMIT):
        found.unclear.add("")
        return
    if " ".join(words) in found.commands and depth:
        return
    name = posixpath.basename(words[0])
    for first in {words[0], name}:
        add_spelling(found, [first, *words[1:]])
    if name == "env" and (script := find_value(words, SPLITTING_OPTIONS)) is not None:
        read_into(found, script, depth + 1)
    if name in SHELLS:
        add_script(found, words[1:], depth)
    elif name == "eval":
        read_into(found, " ".join(words[1:]), depth + 1)
    elif name == "trap":
        read_into(found, next((word for word in words[1:] if word != "--"), ""), depth + 1)
    elif name == "alias":
        for word in words[1:WORDS_LIMIT]:
            read_into(found, word.partition("=")[2], depth + 1)
    elif name in FIND_ACTIONS:
        actions = [*islice(list_actions(words, FIND_ACTIONS[name]), ANYWHERE_LIMIT + 1)]
        for inner in actions[:ANYWHERE_LIMIT]:
            add_words(found, inner, depth + 1)
        found.unclear.update([""] if len(actions) > ANYWHERE_LIMIT else ())
    if name in ("cd", "pushd"):
        found.moves.append(next((word for word in words[1:] if not word.startswith("-")), UNKNOWN))
    found.moves.extend(words[at + 1] for at, word in enumerate(words[:-1]) if word in FOLDER_OPTIONS)
    for known in {name, to_known_name(name)}:
        add_arguments(found, known, words[1:], depth)
    program, dash, subcommand = name.partition("-")
    if dash and subcommand and (table := get_tables().subcommands.get(program)):  # git-push, docker-compose
        add_subcommand(found, program, [subcommand, *words[1:]], table, depth)


def to_known_name(name: str) -> str:
    """Convert a program's name to the one of the tables: without a version, or the `g` of GNU programs on macOS."""
    tables = get_tables()
    if name.startswith(("ld-linux", "ld-musl", "ld.so", "ld64.so")):
        return "ld.so"
    plain = name.rstrip("0123456789.-")
    is_gnu = plain.startswith("g") and (plain[1:] in tables.wrappers or plain[1:] in tables.writers)
    return plain[1:] if is_gnu and plain not in tables.subcommands else plain


def add_arguments(found: CommandLine, name: str, words: Sequence[str], depth: int) -> None:
    """Add the commands and the files that the arguments of a program, or of its subcommand, name."""
    tables = get_tables()
    if subcommands := tables.subcommands.get(name) or list_programs_with_subcommands().get(name):
        add_subcommand(found, name, words, subcommands, depth)
    if name == "find" and "-delete" in words:
        found.changes.update(takewhile(lambda word: not word.startswith("-"), words))
    if writer := tables.writers.get(name):
        add_writes(found, words, writer)
    if (code := tables.code.get(name)) and may_run_commands(words, code):
        found.unclear.add("")
    if wrapper := tables.wrappers.get(name):
        if wrapper.scripts and (script := find_value(words, wrapper.scripts)) is not None:
            read_into(found, script, depth + 1)
        for inner in unwrap(words, wrapper) if wrapper.command else ():
            if wrapper.joins and not PLAIN_COMMAND.fullmatch(" ".join(inner)):
                read_into(found, " ".join(inner), depth + 1)
            if wrapper.appends:
                inner = [*takewhile(lambda word: not word.startswith(":::"), inner), UNKNOWN]
            add_words(found, inner, depth + 1)


@cache
def list_programs_with_subcommands() -> dict[str, Subcommands]:
    """List the programs with a subcommand that runs a command, with no options."""
    tables = get_tables()
    keys = (*tables.wrappers, *tables.code, *tables.writers)
    return {key.rpartition(" ")[0]: Subcommands() for key in keys if " " in key}


def may_run_commands(words: Sequence[str], code: InlineCode) -> bool:
    """Test whether arguments are code in another language that may run commands."""
    if any(len(word) > CODE_LIMIT for word in words):
        return True
    if code.options:
        options = tuple(code.options)
        return any(word.startswith(options) for word in words)
    return not code.markers or any(re.search(marker, word) for marker in code.markers for word in words)


def add_spelling(found: CommandLine, words: Sequence[str]) -> None:
    """Add one spelling of a command, with the files that its options write."""
    spelling = " ".join(words)
    found.commands.add(spelling)
    found.writes.update(read_usage(words).writes)
    if UNKNOWN in spelling:
        found.unclear.add(spelling.partition(UNKNOWN)[0])


def add_subcommand(found: CommandLine, name: str, words: Sequence[str], table: Subcommands, depth: int) -> None:
    """Add a command without the options before its subcommand."""
    while words and (words[0].startswith("-") or (name == "cargo" and words[0].startswith("+"))):
        option = words[0].partition("=")[0]
        if option in table.values or option in table.unclear:
            found.unclear.update([f"{name} "] if option in table.unclear else ())
            words = words[1:] if "=" in words[0] else words[2:]
        elif option in table.flags or option.startswith("+"):
            words = words[1:]
        else:
            found.unclear.add(f"{name} ")
            words = words[1:]
    operands = [at for at, word in enumerate(words[:WORDS_LIMIT]) if not word.startswith("-")] if table.several else [0]
    for at in operands if words else ():
        names = {words[at], table.same.get(words[at], words[at])}
        if words[at] not in (*table.abbreviated, *table.same):
            plain = re.sub("[A-Z]", lambda letter: f"-{letter[0].lower()}", words[at])
            names.update(full for full in table.abbreviated if full.startswith(plain))
        for program in filter(None, (name, table.parent)):
            for subcommand in sorted(names):
                add_spelling(found, [program, subcommand, *words[at + 1 :]])
                add_arguments(found, f"{program} {subcommand}", words[at + 1 :], depth)


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


def add_writes(found: CommandLine, words: Sequence[str], writer: Writer) -> None:
    """Add the files that the arguments of a program name."""
    operands: list[str] = []
    values: list[str] = []
    is_active = not writer.when
    skip = 0 if any(word.startswith(tuple(writer.unless)) for word in words if writer.unless) else writer.skip
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if f"{name}=" in writer.keys:
            values.append(value)
        elif word in writer.writes:
            values.append(next(rest, ""))
        elif word == "--":
            operands += rest
        elif not word.startswith("-") or word == "-":
            operands.append(word)
        elif word.startswith("--"):
            is_active |= any(option.startswith(name) for option in writer.when)
            if any(option.startswith(name) for option in writer.writes):  # options may be abbreviated
                values.append(value if equals else next(rest, ""))
            elif name in writer.values and not equals:
                next(rest, "")
        else:
            is_active |= any(option in (f"-{letter}", word) for option in writer.when for letter in word[1:])
            for index, letter in enumerate(word[1:], 2):  # several options in one word; the last may have a value
                if f"-{letter}" in writer.writes:
                    values.append(word[index:] or next(rest, ""))
                    break
                if f"-{letter}" in writer.values:
                    if not word[index:]:
                        next(rest, "")
                    break
    (found.writes if writer.content else found.changes).update(values)
    for text in writer.texts:
        found.writes.update(file or UNKNOWN for word in words for file in re.findall(text, word[:CODE_LIMIT]))
    operands = operands[skip:]
    if not is_active:
        return
    folders = values or ["."]
    if writer.operands == "all":
        (found.writes if writer.content else found.changes).update(operands)
    elif writer.operands == "first":
        found.writes.update(operands[:1])
    elif writer.operands == "names":
        names = {posixpath.basename(operand.rstrip("/")) for operand in operands}
        found.writes.update(posixpath.join(folder, name) for folder in folders for name in names)
    elif writer.operands == "last":  # the last one may be a folder, in which the files keep their names
        last = values[-1] if values else operands.pop() if len(operands) > 1 else "."
        found.writes.add(last)
        names = {re.split("[/:]", source.rstrip("/"))[-1] for source in operands}  # scp takes HOST:FILE
        found.writes.update(posixpath.join(last, name) for name in names)
        found.changes.update(operands if writer.sources else ())
        folders = [last]
    if writer.unknown is not None and (not writer.unknown or has_option(words, writer.unknown)):
        within = folders if writer.operands in ("last", "names") else ()
        found.writes.update(posixpath.join(folder, UNKNOWN) for folder in within if folder not in (".", "./"))
        found.writes.update([UNKNOWN] if not within or {".", "./"} & {*within} else ())


def has_option(words: Sequence[str], options: Sequence[str]) -> bool:
    """Test whether one of these options, or words, is among the words, also with other letters in the same word."""
    return any(
        word == option or (len(option) == 2 and option[0] == "-" != word[1:2] and word[:1] == "-" and option[1] in word)
        for word in words
        for option in options
    )


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
    """Yield the commands that are run for files that are found, up to their limit of words."""
    for index, word in enumerate(words):
        if word in actions:
            rest = words[index + 1 : index + WORDS_LIMIT + 2]
            yield [*takewhile(lambda other: other not in (";", "+"), rest)]


def unwrap(words: Sequence[str], wrapper: Wrapper) -> Iterator[Sequence[str]]:
    """Yield the command behind a wrapper's options and operands; all that it may be, if that cannot be known."""
    if wrapper.anywhere:
        for index, word in enumerate(words[:ANYWHERE_LIMIT]):
            if not word.startswith("-") and not is_assignment(word):
                yield words[index:]
        if len(words) > ANYWHERE_LIMIT:
            yield [UNKNOWN]
        return
    at, may_be_value = 0, False
    while at < len(words):
        word, is_value = words[at], may_be_value
        may_be_value = word.startswith("-") and "=" not in word and word != "--"
        if word in wrapper.values:
            at, may_be_value = at + 2, False
        elif (word.startswith("-") and word != "--") or is_assignment(word):
            at += 1
        else:
            start = at + (word == "--") + wrapper.operands
            start += sum(1 for _ in takewhile(is_assignment, words[start:]))
            if start < len(words):
                yield words[start:]
            if not is_value or at > WORDS_LIMIT:  # an option that is not known may take the word as its value
                return
            at += 1


def is_assignment(word: str) -> bool:
    """True if a word sets a variable for the command behind it."""
    name, equals, _ = word.partition("=")
    return bool(equals) and name.removesuffix("+").isidentifier()
