"""Exits: the tool calls, and the commands, by which data can leave this machine, as far as they can be seen.

exits.toml lists commands, each with a reason. An unparsable command counts as an exit, and so does code in the command
line of an interpreter. A program of the folder (`make`, `./run.sh`) is none here; `CommandLine.find_project_runner`
finds it.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec
from crow_core.mcp.tool import ToolCall

from crow_permissions.command_patterns import CommandPatterns
from crow_permissions.protected import PatternGroup, to_regex
from crow_permissions.shell_words import UNKNOWN
from crow_permissions.simple_commands import LENGTH_LIMIT, SHELLS, CommandLine, parse, read_command_line
from crow_permissions.subjects import SHELL_QUOTES, is_for_terminal_session, only_polls_terminal

if TYPE_CHECKING:
    from tree_sitter import Node

ADDRESS = re.compile(r"(?!file:)\b[a-z][a-z0-9+.-]*://|\b[\w.+-]+@[\w.-]+:", re.IGNORECASE)
"""The beginning of a URL, or of a place on another machine (`user@host:path`)."""
HIDDEN = re.compile(r"\$\{[^}]*`")
"""A substitution inside an expansion, which the parser does not show."""
REDIRECTION = re.compile(r"[<>]&?\s*[^\s;|&()<>]*[$`*?]")
"""A redirection to or from something that only the shell knows."""
INPUT = {"/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"}
WORDS_LIMIT = 20
"""Words of a command in which another is looked for."""
NAMES_FILE = {"-r", "--requirement", "-c", "--constraint", "-e", "--editable", "--prefix", "-C", "--group", "--extra"}
"""Options of package managers whose value is not a package."""
LOADS_CODE = re.compile(r"--?(engine|provider|keyform|config)")
"""An option of openssl that names a module, or a file that may."""
ASKS_NOTHING = {"--version", "-V", "--help", "-h", "-v"}


ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=")
EXPORTS = re.compile(rb"export\b|\w+\s+(?:-\w+\s+)*-\w*x")
SETS_VARIABLES = {"env", "export", "sudo", "doas"}
READS_SETTINGS = {"--get", "--get-all", "--get-regexp", "--get-urlmatch", "--list", "-l", "get", "list"}
"""Words with which `git config` only reads."""
WRITES_SETTINGS = (
    "--edit",
    "-e",
    "edit",
    "--replace-all",
    "--rename-section",
    "rename-section",
    "-f",
    "--file",
    "--blob",
)
"""The beginnings of words with which `git config` writes, whatever else it is given."""


class CommandTexts(msgspec.Struct, forbid_unknown_fields=True):
    """Programs whose words may hold commands."""

    network: list[str]
    programs: list[str]


class ListedWords(msgspec.Struct, forbid_unknown_fields=True):
    """The words with which a subcommand stays on this machine, at any position."""

    local: list[str]
    skip: list[str] = []
    sends: list[str] = []


class ExitTable(msgspec.Struct, forbid_unknown_fields=True):
    """The content of exits.toml, where each field is explained."""

    quiet: list[str]
    variables: list[str]
    settings: list[str]
    packages: list[str]
    running: list[str]
    addresses: list[str]
    texts: CommandTexts
    local: dict[str, list[str]]
    listed: dict[str, ListedWords]
    interpreters: dict[str, list[str]]
    commands: list[PatternGroup]


@dataclass(frozen=True)
class ExitPatterns:
    """The table in the form in which it is compared."""

    quiet: CommandPatterns
    packages: CommandPatterns
    running: CommandPatterns
    addresses: tuple[str, ...]
    texts: CommandPatterns
    inner: re.Pattern[str]
    """Finds a command in a word of those that `texts` describes."""
    variables: re.Pattern[str]
    settings: re.Pattern[str]
    local: dict[str, frozenset[str]]
    listed: dict[str, ListedWords]
    interpreters: dict[str, list[str]]
    commands: CommandPatterns


@cache
def load_exits() -> ExitPatterns:
    """Read the table."""
    text = (files("crow_permissions") / "exits.toml").read_text("utf-8")
    table = msgspec.convert(tomllib.loads(text), ExitTable)
    return ExitPatterns(
        CommandPatterns(dict.fromkeys(table.quiet, "")),
        CommandPatterns({pattern: pattern for pattern in table.packages}),
        CommandPatterns(dict.fromkeys(table.running, "")),
        tuple(table.addresses),
        CommandPatterns(dict.fromkeys(table.texts.programs, "")),
        re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, table.texts.network))})(?![\w.-])|\|\s*\S|\||[`]|\$\("),
        re.compile("|".join(to_regex(pattern).pattern for pattern in table.variables)),
        re.compile("|".join(to_regex(pattern).pattern for pattern in table.settings), re.IGNORECASE),
        {program: frozenset(known) for program, known in table.local.items()},
        table.listed,
        table.interpreters,
        CommandPatterns({pattern: group.reason for group in table.commands for pattern in group.patterns}),
    )


def find_exit(tool_call: ToolCall) -> str:
    """Find the reason why a tool call may send data away; "" if it cannot. Another program's text is one."""
    kind, arguments, tool = tool_call.kind, tool_call.arguments, tool_call.tool
    given = any(value not in (None, "", [], {}) for value in arguments.values())
    if kind == "execute" and (command := arguments.get("command")):
        return find_exit_command(str(command))
    if kind == "execute" and is_for_terminal_session(tool_call):
        return "" if only_polls_terminal(tool_call) else "a running program reads it"
    if not given or tool is None:
        return ""
    if kind == "fetch":
        return "the address that it asks for leaves this machine" if "url" in arguments else "it asks others"
    if tool.server is None or not tool.server.built_in:
        return "another program gets the arguments"
    if kind == "execute":
        return "it gives the text to another agent"
    return "it gives the arguments to a program" if kind == "other" else ""


def find_exit_command(command: str) -> str:
    """Find the reason why a command line may send data away; "" if it cannot."""
    if len(command) > LENGTH_LIMIT:
        return "it is too long to be read"
    plain, table = SHELL_QUOTES.sub("", command), load_exits()
    if any(address in plain for address in table.addresses):
        return "it opens a connection"
    line = read_command_line(command)
    if any(" " not in start for start in line.unclear):
        return "what it runs cannot be known"
    if REDIRECTION.search(plain) or HIDDEN.search(command):
        return "what it reads or writes cannot be known"
    if name := find_unknown_variable(line.texts | {command}):
        return f"{name} may change what the command does"
    reasons = (find_exit_simple(spelling.split(" "), plain) for spelling in sorted(line.commands))
    return next(filter(None, reasons), "") or find_unknown(line)


def find_exit_simple(words: list[str], text: str) -> str:
    """Find the reason why a simple command of a text may send data away."""
    table = load_exits()
    if UNKNOWN in words[0]:
        return "what it runs cannot be known"
    if (reason := table.commands.find(words)) is not None:
        return reason
    if (listed := table.listed.get(" ".join(words[:2]))) and not stays_local(words[2:], listed):
        return "it may exchange a repository with another machine"
    if words[:2] == ["git", "config"] and not sets_nothing(words[2:]):
        return "it may change what git runs, or where it sends to"
    if (known := table.packages.find(words)) and names_package(words[len(known.split()) :]):
        return "it asks a registry for names"
    if runs_inline_code(words):
        return "the code in it may send anything"
    if (known := table.local.get(words[0])) and len(words) > 1 and words[1].partition("=")[0] not in known:
        return "it may be a name for another command"
    if words[0] == "openssl" and any(LOADS_CODE.match(word) for word in words):
        return "it loads code"
    if INPUT & set(words) and table.quiet.find(words) is None:
        return "it may run what it reads"
    if words[0].rpartition("/")[2] in {*SHELLS, "source", "."} and UNKNOWN in " ".join(words):
        return "what it runs cannot be known"
    if table.running.find(words) is not None:
        inner = (find_exit_simple(words[at:], "") for at in range(1, min(len(words), WORDS_LIMIT)))
        if reason := next(filter(None, inner), ""):
            return reason
    if table.texts.find(words) is not None and any(table.inner.search(word) for word in words[1:]):
        return "a command in its words may send anything"
    if ADDRESS.search(text) and table.quiet.find(words) is None:
        return "it names an address"
    return ""


def stays_local(words: list[str], listed: ListedWords) -> bool:
    """Test whether the words behind a subcommand are listed ones."""
    words = [word for word in words if word not in listed.skip]
    if not words:
        return "" in listed.local
    sends = any(fnmatchcase(word, pattern) for word in words for pattern in listed.sends)
    return words[0] in listed.local and not sends and UNKNOWN not in " ".join(words)


def sets_nothing(words: list[str]) -> bool:
    """Test whether `git config` with these words reads, or sets what decides nothing about programs and addresses."""
    if READS_SETTINGS & set(words):
        return True
    if words and words[0] in ("set", "unset"):
        words = words[1:]
    named = [word for word in words if not word.startswith("-")]
    writes = len(named) > 1 or any(word.startswith(WRITES_SETTINGS) for word in words)
    return not writes or (bool(named) and load_exits().settings.fullmatch(named[0]) is not None)


def find_unknown_variable(texts: set[str]) -> str:
    """Find a variable that a command line sets for a command and that is not listed; "" if there is none.

    `texts` are the command line and those inside it.
    """
    for text in sorted(texts):
        root = parse(text.encode(errors="replace")) if "=" in text else None
        for name in list_variables(root) if root is not None else ():
            if not load_exits().variables.fullmatch(name):
                return name
    return ""


def list_variables(root: "Node") -> Iterator[str]:
    """Yield the variables that a tree's commands start with, or that they set for later ones."""
    todo = [root]
    while todo:
        node = todo.pop()
        todo += node.named_children
        text = (node.text or b"").decode(errors="replace")
        if node.type == "variable_assignment" and node.parent and sets_for_others(node.parent):
            yield text.partition("=")[0].rstrip("+")
        elif node.type == "command":
            texts = [(child.text or b"").decode(errors="replace") for child in node.named_children]
            words = [SHELL_QUOTES.sub("", each) for each in texts]
            at = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in SETS_VARIABLES), len(words))
            yield from (found[1] for word in words[at + 1 :] if (found := ASSIGNMENT.match(word)))


def sets_for_others(node: "Node") -> bool:
    """Test whether the variables that a command sets are for other programs, not for the shell alone."""
    return node.type == "command" or (node.type == "declaration_command" and bool(EXPORTS.match(node.text or b"")))


def find_unknown(line: CommandLine) -> str:
    """Test whether a command with a known beginning may be an exit."""
    for start in line.unclear:
        *words, _ = start.split(" ")  # the last may go on
        if words and load_exits().commands.may_follow(words):
            return "what it does cannot be known"
    return ""


def names_package(words: list[str]) -> bool:
    """True if one of these words names a package, rather than a file or a folder."""
    previous = ""
    for word in words:
        if not word.startswith(("-", "./", "../", "/")) and word != "." and previous not in NAMES_FILE:
            return True
        previous = word
    return False


def runs_inline_code(words: list[str]) -> bool:
    """True if an interpreter runs code that stands in the command line, or that it reads from its input."""
    for program, options in load_exits().interpreters.items():
        if not fnmatchcase(words[0].rpartition("/")[2], program):
            continue
        for word in words[1:]:
            if word == "-" or UNKNOWN in word:
                return True
            if not word.startswith("-"):
                return False
            if word in ASKS_NOTHING or word == "-m":
                return False
            short = not word.startswith("--")
            if any(word.partition("=")[0] == option or (short and option in word) for option in options):
                return True
        return True  # without a file it reads its input
    return False
