"""Commands and files that a command line may run or read although its text does not show them, for rules that deny or
ask.

`simple_commands` lists the commands of a line. Further risks remain. An unknown program may run its arguments or its
input, a shell may read commands from a pipe, and a line may run a file that it has just written. If a rule that denies
or asks may be about that, crow asks, in every mode.
"""

import os
import re
from collections.abc import Iterator, Sequence
from functools import cache

from crow_permissions.command_tables import get_tables
from crow_permissions.programs import read_usage
from crow_permissions.shell_words import UNKNOWN
from crow_permissions.simple_commands import SHELLS, CommandLine

OTHER_SHELLS = {"posh", "yash", "elvish", "nu", "pwsh", "powershell", "tcsh", "csh", "rc", "es", "xonsh", "osh", "ion"}
INTERPRETERS = re.compile(
    r"(python|pypy|ipython|perl|ruby|node|nodejs|deno|bun|php|lua|luajit|tclsh|wish|expect|guile|R|osascript)[\d.]*"
)
"""Programs that read a program from their input if their arguments name none."""
RUNNING_BUILTINS = """
    . alias bind builtin command compgen complete coproc enable eval exec fc hash let mapfile readarray source time trap
"""
"""Commands of the shell that may run others; no other one does."""
HARMLESS_FLAGS = re.compile(r"[-+][aefhklmnprtuvxBCEHPT]+|--(norc|noprofile|posix|login|verbose|restricted)")
"""Options of a shell that do not change where it reads its commands."""
ABOUT_THEMSELVES = {"--version", "--help", "-V", "-h"}
ESCAPED = re.compile(r"\$'[^']*\\")
"""The beginning of a word that is written in escapes, such as `$'\\x72m'`."""
QUOTES = re.compile(r"\\\n|[\"'\\]")
NAMES_NO_FILE = """
    echo printf true false : kill sleep ls stat file du basename dirname readlink realpath test [ cd
"""
"""Commands whose arguments are not files, or do not show the content; so are those of `git commit`."""
FILE_READERS = """
    cat head tail tac nl wc sort uniq cut rev fold fmt column paste join comm diff cmp md5sum sha1sum sha256sum
    sha512sum cksum base64 xxd od hexdump strings less more bat source . cp scp rsync install ln
"""
"""Programs whose arguments, apart from options, are files."""


def may_run(text: str, line: CommandLine, pattern: str) -> bool:
    """Test whether a command line may run what a rule's pattern describes, beyond the commands that are listed."""
    if line.may_match(pattern) or any(reads_commands(command.split(" ")) for command in line.commands):
        return True
    unknown = [command for command in line.commands if not is_known(command)]
    if not unknown:
        return False
    written = {os.path.normpath(path) for path in line.writes}
    if any(os.path.normpath(word) in written for command in unknown for word in command.split(" ")):
        return True
    if ESCAPED.search(text):
        return True
    others = [command for command in unknown if not is_listed(command, pattern)]
    return bool(others) and names_in_order("\n".join([text, QUOTES.sub("", text), *others]), find_names(pattern))


def is_known(command: str) -> bool:
    """Test whether a command runs neither its arguments nor its input as commands."""
    words = command.split(" ")
    if words[0].rpartition("/")[2] in list_known_programs() or read_usage(words).only_reads:
        return True
    return any(words[: len(known)] == known for known in list_known_subcommands())


def is_listed(command: str, pattern: str) -> bool:
    """Test whether a command is of the program that a rule's pattern is about, and its subcommands are known."""
    program = command.partition(" ")[0].rpartition("/")[2]
    return program == pattern.partition(" ")[0] and program in get_tables().subcommands


@cache
def list_known_programs() -> frozenset[str]:
    """List the programs that run neither their arguments nor their input."""
    tables = get_tables()
    known = {each for each in (*tables.data_commands, *tables.quotable_commands) if " " not in each}
    files = {each for each in tables.writers if each not in tables.code and each not in tables.wrappers}
    return frozenset((known | files | {*tables.shell_builtins}) - {*RUNNING_BUILTINS.split()} - {*tables.code, "ed"})


@cache
def list_known_subcommands() -> list[list[str]]:
    """List the programs with a subcommand that run neither their arguments nor their input."""
    tables = get_tables()
    return [each.split() for each in (*tables.data_commands, *tables.quotable_commands) if " " in each]


@cache
def find_names(pattern: str) -> tuple[re.Pattern[str], ...]:
    """Make expressions that find the program and the next word of a rule's pattern, wherever they stand."""
    words = re.split(r"[*?\[]", pattern)[0].split()
    if not words:
        return ()
    program = re.escape(words[0].rpartition("/")[2] or words[0])
    first = re.compile(rf"(?<![\w.-])(?:-[A-Za-z]{{1,4}})?{program}(?![\w-]|\.\w)")
    return (first, *(re.compile(rf"(?<![\w.-]){re.escape(word)}") for word in words[1:2]))


def names_in_order(text: str, names: Sequence[re.Pattern[str]]) -> bool:
    """Test whether a text has a match of each expression, one after the other."""
    at = 0
    for name in names:
        if (found := name.search(text, at)) is None:
            return False
        at = found.end()
    return bool(names)


def reads_commands(words: list[str]) -> bool:
    """Test whether a command reads others from its input, or from what is not a plain file."""
    name, arguments = words[0].rpartition("/")[2], words[1:]
    if name == "alias":
        return bool(arguments)
    if name in ("source", "."):
        return not is_plain_file(next((word for word in arguments if word != "--"), "-"))
    if name in SHELLS and any(re.fullmatch(r"-\w*c\w*", word) for word in arguments):
        return False  # the script is read
    operands = [word for word in arguments if not word.startswith(("-", "+")) or word == "-"]
    if name in SHELLS | OTHER_SHELLS:
        options = arguments[: arguments.index(operands[0])] if operands else arguments
        if {*options} & ABOUT_THEMSELVES:
            return False
        return not all(map(HARMLESS_FLAGS.fullmatch, options)) or not operands or not is_plain_file(operands[0])
    if INTERPRETERS.fullmatch(name):
        return not {*arguments} & ABOUT_THEMSELVES and not (operands and is_plain_file(operands[0]))
    return False


def is_plain_file(path: str) -> bool:
    """Test whether a path is the name of a file, as far as its text tells."""
    return bool(path) and path != "-" and UNKNOWN not in path and not path.startswith(("/dev/", "/proc/"))


def list_named_files(line: CommandLine) -> Iterator[tuple[str, bool]]:
    """Yield what may be files among the arguments of commands, and whether they surely are; UNKNOWN stands in some."""
    for command in sorted(line.commands):
        name, *words = command.split(" ")
        name = name.rpartition("/")[2]
        shows_none = name in NAMES_NO_FILE.split() and not read_usage([name, *words]).unlisted
        if shows_none or [name, *words[:1]] in (["git", "commit"], ["git", "tag"]):
            continue
        for word in words:
            if not word.startswith("-"):
                yield word, name in FILE_READERS.split()
            elif len(word) > 2 and not word.startswith("--"):
                yield word[2:], False
            for separator in ("=", ":", "@"):
                before, _, after = word.partition(separator)
                if after:
                    yield after, False
                    yield before, False
