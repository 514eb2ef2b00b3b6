"""Private data: which files hold it, and which commands read it, as far as their text tells.

private_data.toml lists files, commands and variables, each with a reason. A name that a command makes (`cat $F`), a
program's own way to a file (`python read.py`) and a search from a folder above are not seen here.
"""

import glob
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import islice

import msgspec
from crow_core.paths import to_relative

from crow_permissions.command_patterns import CommandPatterns
from crow_permissions.exits import find_exit_command
from crow_permissions.protected import PatternGroup, to_regex
from crow_permissions.shell_words import UNKNOWN
from crow_permissions.simple_commands import read_command_line
from crow_permissions.subjects import SHELL_QUOTES, expand_user

TEXT_LIMIT = 50_000
"""Characters of a command that are read."""
WORDS_LIMIT = 5_000
"""Different words of a command that are looked at."""
NAMES_LIMIT = 1_000
"""Files that are looked at for a word with wildcards."""
WORD = re.compile(r"[^\s:=@<>|&;()`$\"'#!\\]+")
"""A part of a command that may be a path."""
WILDCARD = re.compile(r"[*?\[{]")
ESCAPES = re.compile(r"\$'[^']*\\")
"""The beginning of a word that is written in escapes, such as `$'\\x2e'`."""
VARIABLE = re.compile(r"\$\{?[!#]?([A-Za-z_]\w*)")
LISTS_VARIABLES = re.compile(
    r"(?:^|[;&|(\n{]|\b(?:builtin|command)\b)[^\S\n]*(?:set|(?:export|declare|typeset|readonly)(?:\s+-[px]+)?)[^\S\n]*(?:$|[;&|)\n>])"
)
"""A command of the shell's own that prints all variables."""
NAMES_ENVIRONMENT = re.compile(r"ENV|environ|getenv|\benv\b")
ENVIRONMENT = re.compile(
    r"(?:\S*/)?(?:[gmn]?awk|g?jq|yq|python[\d.]*|node|bun|deno|perl|ruby|php|lua|osascript)\s.*?"
    r"(?:ENVIRON|\benviron|getenv|process\.env|Deno\.env|\$ENV\b|%ENV|\bENV\b|\benv\b)"
    r"(?:[.]?(?:get|fetch)?[\[({]+(?P<name>[A-Za-z_]\w*)|\.(?P<attribute>[A-Z]\w*))?",
    re.DOTALL,
)
"""A program that reads its environment, and the variable, if it names one. Quotes are removed from the text."""
QUIET_REDIRECTION = re.compile(r"[012&]?>>?\s*/dev/null|[012]>&[012]")
INSTALLED = {".git", "node_modules", ".venv", "venv", "__pycache__", "site-packages", "target"}
READS_NAMES = {"xargs", "parallel", "read", "while", "mapfile", "readarray", "eval", "source", "."}
"""Words of a command line in which the output of one command may name files for another."""


class PrivateTable(msgspec.Struct, forbid_unknown_fields=True):
    """The content of private_data.toml, where each field is explained."""

    templates: list[str]
    variables: list[str]
    quiet: list[str]
    filters: list[str]
    cutting: list[str]
    fixtures: list[str]
    searching: list[str]
    copying: list[str]
    folders: list[str]
    files: list[PatternGroup]
    commands: list[PatternGroup]


@dataclass(frozen=True)
class PrivateNames:
    """The table in the form in which it is compared."""

    paths: re.Pattern[str]
    templates: re.Pattern[str]
    variables: re.Pattern[str]
    commands: CommandPatterns
    programs: re.Pattern[str]
    """Finds in a text the programs of `commands`."""
    following: dict[str, set[str]]
    """The beginnings of the words that follow each of them; "" for any."""
    quiet: CommandPatterns
    copying: frozenset[str]
    folders: CommandPatterns
    packers: re.Pattern[str]
    """Finds the programs of `folders` in a text."""
    filters: frozenset[str]
    cutting: re.Pattern[str]
    fixtures: frozenset[str]
    searching: CommandPatterns
    searchers: re.Pattern[str]
    """Finds the programs of `searching` in a text."""


@cache
def load_private_names() -> PrivateNames:
    """Read the table."""
    text = (files("crow_permissions") / "private_data.toml").read_text("utf-8")
    table = msgspec.convert(tomllib.loads(text), PrivateTable)
    patterns = [pattern.removeprefix("**/") for group in table.files for pattern in group.patterns]
    patterns += [pattern.removesuffix("/**") for pattern in patterns if pattern.endswith("/**")]
    commands = CommandPatterns({pattern: group.reason for group in table.commands for pattern in group.patterns})
    following: dict[str, set[str]] = {}
    for group in table.commands:
        for program, *words in map(str.split, group.patterns):
            following.setdefault(program, set()).add(re.split(r"[*?\[$]", words[0])[0] if words else "")
    return PrivateNames(
        re.compile(rf"(?:.*/)?(?:{join_patterns(patterns)})", re.DOTALL),
        re.compile(join_patterns(table.templates), re.DOTALL),
        re.compile("|".join(to_regex(pattern).pattern for pattern in table.variables), re.IGNORECASE),
        commands,
        re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, sorted(following)))})(?![\w-])"),
        following,
        CommandPatterns(dict.fromkeys(table.quiet, "")),
        frozenset(table.copying),
        CommandPatterns(dict.fromkeys(table.folders, "")),
        to_finder(table.folders),
        frozenset(table.filters),
        re.compile("|".join(to_regex(pattern).pattern for pattern in table.cutting)),
        frozenset(table.fixtures),
        CommandPatterns(dict.fromkeys(table.searching, "")),
        to_finder(table.searching),
    )


def to_finder(patterns: Sequence[str]) -> re.Pattern[str]:
    """Convert patterns of commands to a regular expression that finds their programs in a text."""
    return re.compile(rf"(?<![\w.-])(?:{'|'.join(sorted({pattern.split()[0] for pattern in patterns}))})(?![\w-])")


def join_patterns(patterns: Sequence[str]) -> str:
    """Join patterns to one regular expression, for texts in lower case."""
    return "|".join(to_regex(pattern.lower()).pattern for pattern in patterns)


def may_read(text: str) -> bool:
    """Test whether a text may name private data: it has a program of the table, and a word that belongs to it later."""
    names = load_private_names()
    first: dict[str, int] = {}
    for found in names.programs.finditer(text):
        first.setdefault(found[0], found.end())
    return any(text.find(word, end) >= 0 for program, end in first.items() for word in names.following[program])


def is_private_path(path: str) -> bool:
    """True if the table lists a path, or the name of a file."""
    names, path = load_private_names(), path.lower().rstrip("/")
    if not names.paths.fullmatch(path):
        return False
    *folders, name = path.split("/")
    return not names.templates.fullmatch(name) and names.fixtures.isdisjoint(folders)


def find_private_file(
    command: str, folder: str, is_named: Callable[[str], bool] | None = None, *, is_posix: bool = True
) -> str:
    """Find what a command line, which starts in `folder`, reads that is private; "" for nothing.

    `is_named` tells of a path, made absolute, whether the user names it as private. Without a POSIX shell no command is
    known to show nothing of a file: PowerShell's `type` prints it. The parser is not used, and nothing but a few files'
    names is looked up, unless a word of the text is listed.
    """
    if len(command) > TEXT_LIMIT:
        return "a command that is too long to be read"
    plain = SHELL_QUOTES.sub("", command)
    for variable in VARIABLE.findall(plain):
        if load_private_names().variables.fullmatch(variable):
            return f"${variable}"
    if LISTS_VARIABLES.search(plain):
        return "" if is_search_of_lines(plain) else "the variables of the shell"
    if found := find_read_variable(command):
        return found
    if ESCAPES.search(command):
        return "a name that is written in escapes"
    named = dict.fromkeys(WORD.findall(plain))
    if len(named) > WORDS_LIMIT:
        return "a command with too many words to be looked at"
    words = {word: path for word in named if (path := find_private_word(word, folder, is_named))}
    if is_private_path(os.path.normpath(folder)) or (is_named is not None and is_named(folder)):
        words.setdefault("", folder)
    if words and not (is_posix and is_quiet(command, words)):
        return next(iter(words.values()))
    if may_read(plain) and not is_search_of_lines(plain):
        for spelling in read_command_line(command).commands:
            if (found := spelling.split(" ")) and reads_private(found):
                return spelling.replace(UNKNOWN, "…")
    names = load_private_names()
    if names.packers.search(plain) and (found := find_below(command, folder, names.folders)):
        return found
    if names.searchers.search(plain) and (not is_shown(plain) or find_exit_command(command)):
        return find_below(command, folder, names.searching)
    return ""


def reads_private(words: list[str]) -> bool:
    """True if the table lists a command, and it does not name only what is not private."""
    if load_private_names().commands.find(words) is None:
        return False
    named = [word for word in words[1:] if not word.startswith("-")]
    return words[0] != "printenv" or not named or any(map(is_private_variable, named))


def is_private_variable(name: str) -> bool:
    """True if a variable of an environment holds a secret by its name."""
    return load_private_names().variables.fullmatch(name) is not None


def find_read_variable(command: str) -> str:
    """Find the variables that a program in a command line takes from its environment, if they are private."""
    if not NAMES_ENVIRONMENT.search(command):
        return ""
    for spelling in read_command_line(command).commands:
        if found := ENVIRONMENT.match(SHELL_QUOTES.sub("", spelling)):
            name = found["name"] or found["attribute"] or ""
            if not name or is_private_variable(name):
                return "the variables of the environment"
    return ""


def is_shown(text: str) -> bool:
    """Test whether the result of a command line shows whole lines of all that it reads."""
    text = QUIET_REDIRECTION.sub("", text)
    if re.search(r"[>`]|\$\(", text):
        return False
    stages = [stage.split() for stage in re.split(r"(?<!\|)\|(?!\|)", text)[1:]]
    stages += [[found[1]] for found in re.finditer(r"\s-(?:exec|execdir|ok|okdir)\s+(\S+)", text)]
    return all(map(is_filter, stages))


def is_filter(words: list[str]) -> bool:
    """True if a command prints whole lines of its input."""
    names = load_private_names()
    return bool(words) and words[0] in names.filters and not any(map(names.cutting.fullmatch, words))


def is_search_of_lines(text: str) -> bool:
    """Test whether a command line only prints the lines of an environment that a search finds."""
    return is_shown(text) and re.search(r"\|\s*(?:[ef]?grep|rg)\b", text) is not None


def to_path(folder: str, word: str) -> str:
    """Convert a word of a command to a path; a part that is not known becomes `?`."""
    return os.path.join(folder, expand_user(word).replace(UNKNOWN, "?"))


def find_below(command: str, folder: str, patterns: CommandPatterns) -> str:
    """Find a private file in the folders among the words of those commands that patterns describe, or where they start.

    Those that copy and pack have such words.
    """
    for spelling in read_command_line(command).commands:
        words = spelling.split(" ")
        if patterns.find(words) is None:
            continue
        searches = patterns is load_private_names().searching
        starts = [word for word in words[1:] if os.path.isdir(to_path(folder, word))]
        for word in (starts or ["."]) if searches else words[1:]:
            path = to_path(folder, word)
            found = (name for name in islice(list_files(path), NAMES_LIMIT) if is_private_path(name))
            if name := next(found, ""):
                return to_relative(os.path.normpath(name), folder)
    return ""


def list_files(folder: str) -> Iterator[str]:
    """Yield the paths of the files in a folder and below it, without those that are installed there."""
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in INSTALLED]
        yield from (os.path.join(path, name) for name in names)


def find_private_word(word: str, folder: str, is_named: Callable[[str], bool] | None) -> str:
    """Find the private file that a word of a command names; "" if it names none."""
    if word.startswith("-") and "/" not in word:
        word = word.lstrip("-")
    if is_private_path(word):
        return word
    path = to_path(folder, word)
    if WILDCARD.search(word):
        found = (
            name for text in expand_braces(path) for name in islice(glob.iglob(text, include_hidden=True), NAMES_LIMIT)
        )
        return next((name for name in islice(found, NAMES_LIMIT) if is_private_path(name)), "")
    if is_named is not None and is_named(path):
        return word
    if os.path.lexists(path) and (real := os.path.realpath(path)) != path and is_private_path(real):
        return word
    return ""


def expand_braces(word: str) -> Iterator[str]:
    """Yield the words that the shell makes of a word with braces; a few, of the innermost braces first."""
    todo = [word]
    for _ in range(100):
        if not todo:
            return
        word = todo.pop()
        braces = re.search(r"\{([^{}]*,[^{}]*)\}", word)
        if braces is None:
            yield word
        else:
            todo += [word[: braces.start()] + part + word[braces.end() :] for part in braces[1].split(",")]


def is_quiet(command: str, words: Sequence[str] | dict[str, str]) -> bool:
    """True if the commands of a command line that name these words show nothing of the files.

    If the output of a command may name files for another, they do not count as quiet.
    """
    names, line = load_private_names(), read_command_line(command)
    if line.unclear or READS_NAMES & set(WORD.findall(command)) or re.search(r"<|[$`]", command):
        return False
    for spelling in line.commands:
        found = spelling.split(" ")
        if names.quiet.find(found) is not None:
            continue
        if found[0].rpartition("/")[2] in names.copying and "-t" not in found:
            found = found[:-1]
        if "" in words or any(word in words for part in found for word in WORD.findall(part)):
            return False
    return all(any(word in spelling for spelling in line.commands) for word in words)
