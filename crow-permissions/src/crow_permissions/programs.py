"""The options of programs: whether the arguments of a command are all known to be harmless, and which files they write.

programs.toml lists the options that run no other program. Under a rule with a wildcard, and for an answer such as
`git commit …`, anything else asks. Of a program that is known to start others, but is not listed, no option is allowed.
Of a program that is not known (`./build.sh *`), all options are: a rule that names it means them.
"""

import posixpath
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from crow_permissions.scripts import only_reads

NUMBER = re.compile(r"-\d+[ckwbMG]?")
"""A value that may begin with a dash."""
NAME_LENGTH = 3
"""Words of the longest name, such as `git stash list`."""


class ProgramEntry(msgspec.Struct, forbid_unknown_fields=True):
    """The entry of a command in programs.toml, where each field is explained."""

    options: str
    operands: list[str] = []
    words: bool = False
    dashless: bool = False
    literal: bool = False
    stops: bool = False
    runs: bool = False
    names: bool = False
    free: list[str] = []
    script: str = ""
    script_options: list[str] = []
    reading: list[str] = []
    reads: int | None = None
    kept: bool = False


@dataclass(frozen=True)
class Program:
    """An entry in the form in which it is compared."""

    entry: ProgramEntry
    options: dict[str, str]
    """The kind of each option: "", "=", "=2", "?", ">", "@" or "!"."""


NOT_LISTED = Program(ProgramEntry(""), {})


@dataclass
class Usage:
    """The arguments of a command, as far as the table knows them."""

    program: Program | None = None
    unlisted: str = ""
    """The first word that is not listed; "" if all are."""
    writes: list[str] = field(default_factory=list[str])
    """Files that options write."""
    operands: list[str] = field(default_factory=list[str])

    @property
    def only_reads(self) -> bool:
        """True if the command is known to read only."""
        limit = self.program.entry.reads if self.program else None
        return limit is not None and len(self.operands) <= limit and not (self.unlisted or self.writes)


@cache
def read_table(name: str) -> dict[str, Any]:
    """Read a file of this package. The result is shared."""
    return tomllib.loads((files("crow_permissions") / name).read_text("utf-8"))


@cache
def load_programs() -> dict[str, Program]:
    """Read the table."""
    tables = read_table("programs.toml")
    lists: dict[str, str] = tables["lists"]
    named = {name: entry for name, entry in tables.items() if name not in ("lists", "sources", "starters")}
    entries = msgspec.convert(named, dict[str, ProgramEntry])
    return {name: Program(entry, dict(list_options(entry.options, lists))) for name, entry in entries.items()}


def list_options(text: str, lists: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the options of an entry, each with its kind."""
    for word in re.sub(r"<(\w+)>", lambda name: lists[name[1]], text).split():
        option = word.rstrip("=2?>@!") if word[-1] in "=?>@!" or word.endswith("=2") else word
        yield option, word[len(option) :]


@cache
def list_starters() -> set[str]:
    """List the programs that are known to run others, or to write files, and those with subcommands in the table."""
    tables = read_table("simple_commands.toml")
    known = {*tables["wrappers"], *tables["code"], *tables["writers"], *tables["subcommands"], *load_programs()}
    further = [*tables["project_runners"], *" ".join(read_table("programs.toml")["starters"].values()).split()]
    return {name.partition(" ")[0] for name in known} | {name.rstrip("*") for name in further}


@cache
def list_readers() -> set[str]:
    """List the programs in the table that only read, or have a subcommand that does."""
    return {name.partition(" ")[0] for name, program in load_programs().items() if program.entry.reads is not None}


def find_name(words: Sequence[str]) -> str:
    """Find the name of a command in the table: the program, or with its subcommands; "" if it is not there."""
    programs, program = load_programs(), to_program(words[0])
    names = (" ".join([program, *words[1:length]]) for length in range(min(NAME_LENGTH, len(words)), 0, -1))
    return next((name for name in names if name in programs), "")


def to_program(word: str) -> str:
    """Convert the first word of a command to the name of its program in the table, without folder and version.

    A name of a reading program with a version may be another program: `uname26` runs a command.
    """
    name = posixpath.basename(word)
    unversioned = strip_version(name)
    return name if name in list_starters() or unversioned in list_readers() else unversioned


def strip_version(name: str) -> str:
    """Leave out the version at the end of a program's name."""
    return name.rstrip("0123456789.-") or name


def may_start(program: str) -> bool:
    """Test whether a program, in any version, is known to run others, to write files, or to have subcommands."""
    return not list_starters().isdisjoint({program, strip_version(program)})


@cache
def has_subcommands(program: str) -> bool:
    """Test whether the table has subcommands of a program."""
    return any(name.startswith(f"{program} ") for name in load_programs())


def read_usage(words: Sequence[str], literal: int = 0) -> Usage:
    """Read the arguments of a command. The first `literal` words stand in the rule itself, so they are allowed."""
    usage = Usage()
    read_arguments(usage, list(words), 0, literal)
    return usage


def read_arguments(usage: Usage, words: list[str], start: int, literal: int) -> None:
    """Read the arguments of the command that begins at a word."""
    name, program = find_name(words[start:]), to_program(words[start])
    usage.program = load_programs().get(name)
    usage.operands.clear()
    if usage.program is None and not may_start(program):
        return
    at = start + len(name.split()) if name else start + 1
    arguments = Arguments(usage, usage.program or NOT_LISTED, words, literal, at)
    entry = arguments.program.entry
    waits_for_subcommand = has_subcommands(program) and name in ("", program) and not entry.stops
    if entry.dashless:
        arguments.split_old_options()
    operands_only = False
    while (here := arguments.at) < len(arguments.words):
        word = arguments.words[here]
        arguments.at += 1
        if word in entry.free:
            break
        if word == "--" and not operands_only and not entry.literal:
            operands_only = True
        elif not operands_only and word != "-" and word.startswith("-" if usage.program else ("-", "+")):
            arguments.read_options(here)
        elif waits_for_subcommand:
            read_subcommand(usage, [program, *words[here:]], max(literal - here + 1, 0))
            return
        elif entry.runs:
            read_arguments(usage, words, here, literal)
            return
        else:
            arguments.read_operand(here)
            if entry.stops:
                break
    usage.writes += [] if arguments.reads_files else arguments.written
    usage.writes += usage.operands if arguments.rewrites else ()


@dataclass
class Arguments:
    """The arguments of a command while they are read."""

    usage: Usage
    program: Program
    words: list[str]
    literal: int
    """The most words that are allowed as they are."""
    at: int
    """The beginning of the next argument."""
    reads_files: bool = False
    has_script: bool = False
    rewrites: bool = False
    written: list[str] = field(default_factory=list[str])

    def refuse_unless(self, is_listed: bool, here: int) -> None:
        """Note a word that is not listed, unless it is allowed as it is."""
        if here >= self.literal and not is_listed:
            self.usage.unlisted = self.usage.unlisted or self.words[here]

    def split_old_options(self) -> None:
        """Write options without a dash (`tar cf FILE`) as others, each before its value; the values stand in order."""
        if self.at == len(self.words) or self.words[self.at].startswith("-"):
            return
        flags, rest = [f"-{letter}" for letter in self.words[self.at]], self.words[self.at + 1 :]
        while rest and re.fullmatch(r"-\w", rest[0]):
            flags.append(rest.pop(0))
        del self.words[self.at :]
        for flag in flags:
            self.words.append(flag)
            if self.program.options.get(flag, "")[:1] in ("=", ">") and rest:
                self.words.append(rest.pop(0))
        self.words += rest

    def read_operand(self, here: int) -> None:
        """Read an operand; the first may be a script."""
        entry, word = self.program.entry, self.words[here]
        is_script = bool(entry.script) and not self.has_script
        self.has_script |= is_script
        is_listed = fits(word, entry, len(self.usage.operands), is_script)
        self.refuse_unless(is_listed and not (self.program is NOT_LISTED and word.startswith("@")), here)
        if not is_script:
            self.usage.operands.append(word)

    def read_options(self, here: int) -> None:
        """Read the options in a word, with their values."""
        entry, options, word = self.program.entry, self.program.options, self.words[here]
        if options.get(word) in ("", "?"):
            self.reads_files |= word in entry.reading
            return
        for option, kind, value in split_options(word, options, words=entry.words):
            self.reads_files |= option in entry.reading
            if kind is None or (value and kind in ("", "!")):
                self.refuse_unless(entry.literal, here)
                return
            self.rewrites |= kind == "!" and here >= self.literal
            if kind[:1] in ("=", ">", "@"):
                self.read_values(option, kind, value, here)

    def read_values(self, option: str, kind: str, joined: str | None, here: int) -> None:
        """Read the values of an option: the one in its word, or the next words."""
        count = 0 if joined is not None else 2 if kind == "=2" else 1
        values = self.words[self.at : self.at + count] if joined is None else [joined]
        self.at += count
        self.refuse_unless(not any(is_unclear_value(value, kind, joined) for value in values), here)
        if option in self.program.entry.script_options:
            self.has_script = True
            self.refuse_unless(all(only_reads(self.program.entry.script, value) for value in values), here)
        if kind == ">" and here >= self.literal:
            self.written += values


def read_subcommand(usage: Usage, words: list[str], literal: int) -> None:
    """Read a command without the options before its subcommand; one that is not in the table asks."""
    if find_name(words) in ("", words[0]):
        if literal <= 1:
            usage.unlisted = usage.unlisted or words[1]
        words = words[1:]
        dashes = [word for at, word in enumerate(words) if word[:1] in ("-", "+") and word != "-" and at + 1 >= literal]
        usage.unlisted = usage.unlisted or next(iter(dashes), "")
        usage.program = None
        return
    read_arguments(usage, words, 0, literal)


def fits(word: str, entry: ProgramEntry, index: int, is_script: bool) -> bool:
    """Test whether the table allows an operand."""
    if is_script:
        return only_reads(entry.script, word)
    if not entry.operands:
        return True
    return re.fullmatch(entry.operands[min(index, len(entry.operands) - 1)], word, re.DOTALL) is not None


def is_unclear_value(value: str, kind: str, joined: str | None) -> bool:
    """Test whether a value may be another option, or name another machine or a file that is sent."""
    if joined is None and value.startswith("-") and value != "-" and not NUMBER.fullmatch(value):
        return True
    if kind == "@":
        return value.startswith("@")
    return kind == ">" and (":" in value or "#" in value or not value)


def split_options(word: str, options: dict[str, str], *, words: bool) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield the options in a word: the option, its kind (None if it is not listed), and its value in the same word."""
    if word.startswith("--") or words:
        name, equals, value = word.partition("=")
        kind = options.get(name)
        if kind == "" and equals:
            kind = None
        yield name, kind, value if equals else None
        return
    if re.fullmatch(r"-\d+", word) and "-#" in options:
        return
    for index, letter in enumerate(word[1:], 2):
        option, rest = f"{word[0]}{letter}", word[index:]
        kind = options.get(option)
        if kind is None or kind == "":
            yield option, kind, None
            if kind is None:
                return
            continue
        yield option, kind, rest or None
        return
