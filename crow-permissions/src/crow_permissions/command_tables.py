"""The tables of programs by which command lines are read: simple_commands.toml."""

from functools import cache
from typing import Literal

import msgspec

from crow_permissions.programs import read_table


class Wrapper(msgspec.Struct, forbid_unknown_fields=True):
    """A program that runs the command behind its options."""

    values: list[str] = []
    operands: int = 0
    scripts: list[str] = []
    joins: bool = False
    anywhere: bool = False
    appends: bool = False
    command: bool = True


class InlineCode(msgspec.Struct, forbid_unknown_fields=True):
    """A program that runs commands which its arguments describe in another language."""

    options: list[str] = []
    markers: list[str] = []


class Subcommands(msgspec.Struct, forbid_unknown_fields=True):
    """A program whose subcommand may stand behind options."""

    values: list[str] = []
    unclear: list[str] = []
    flags: list[str] = []
    same: dict[str, str] = {}
    parent: str = ""
    abbreviated: list[str] = []
    several: bool = False


class Writer(msgspec.Struct, forbid_unknown_fields=True):
    """A program whose arguments name files that it changes."""

    operands: Literal["all", "last", "first", "names", "none"] = "all"
    skip: int = 0
    unless: list[str] = []
    when: list[str] = []
    values: list[str] = []
    writes: list[str] = []
    keys: list[str] = []
    content: bool = True
    sources: bool = False
    unknown: list[str] | None = None
    texts: list[str] = []


class CommandTables(msgspec.Struct, forbid_unknown_fields=True):
    """The content of simple_commands.toml, where each field is explained."""

    project_runners: list[str]
    data_commands: list[str]
    quotable_commands: list[str]
    shell_builtins: list[str]
    writers: dict[str, Writer]
    code: dict[str, InlineCode]
    wrappers: dict[str, Wrapper]
    subcommands: dict[str, Subcommands]


@cache
def get_tables() -> CommandTables:
    return msgspec.convert(read_table("simple_commands.toml"), CommandTables)
