"""Known readers: commands that need no question because they only read, like the tools that read files.

programs.toml lists them with their options. A question is asked about what reads private data, crow's own files, what a
rule denies or asks about, and files that are devices or describe processes.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from crow_core.paths import is_below
from crow_core.session.session import Session

from crow_permissions.compositions import Composition, SimpleCommand
from crow_permissions.private_data import NAMES_LIMIT, WORD, find_private_file, is_private_path, list_files
from crow_permissions.programs import read_usage
from crow_permissions.rules import Rules
from crow_permissions.shell_words import UNKNOWN
from crow_permissions.subjects import EDITOR, expand_user, is_inside, spell_path

GREPS = ("grep", "egrep", "fgrep")
SPECIAL = ("/dev", "/proc", "/sys")
"""Folders of special files."""
RECURSIVE = re.compile(r"-\w*[rd]|--recursive|--directories")
"""The beginning of an option with which a program reads all files in a folder."""
FOLLOWS_LINKS = re.compile(r"-\w*R|--dereference-recursive")
"""The beginning of an option of grep with which it also reads what links name; diff does so anyway."""
SIGNATURE = re.compile(r"%G|%\(\*?signature|^(--sort=)?-?\*?signature(:|$)")
"""The parts of a format or an order of git that start a program, which checks signatures."""


def may_read(
    session: Session, rules: Rules, own_folders: Sequence[str], text: str, composition: Composition, start: str
) -> bool:
    """Test whether a command line that consists of commands that only read needs no question."""

    def is_named(path: str) -> bool:
        if is_inside(session, path, own_folders, ignore_case=True):
            return True
        return rules.has_strict and rules.find_for_file(EDITOR, spell_path(session, path), writes=False) is not None

    if find_private_file(text, start, is_named):
        return False
    return not any(is_private(command, start, is_named) for command in composition.commands)


def is_private(command: SimpleCommand, start: str, is_named: Callable[[str], bool]) -> bool:
    """Test whether a command that only reads may show what is private, or start another program."""
    if command.words[0] == "git" and any(SIGNATURE.search(word) for word in command.words):
        return True
    if command.words[0] == "diff" and any(RECURSIVE.match(word) for word in command.words[1:]):
        return True
    if command.words[0] in GREPS and any(FOLLOWS_LINKS.match(word) for word in command.words[1:]):
        return True
    for word in (*command.words[1:], *command.reads):
        for part in WORD.findall(word):
            path = os.path.join(start, expand_user(part))
            if UNKNOWN in path:
                return True
            paths = (os.path.normpath(path), os.path.realpath(path))
            is_special = any(is_below(each, folder) for each in paths for folder in SPECIAL)
            if is_special and part not in ("/dev/null", "/dev/stdin"):
                return True
    return any(is_private_path(name) or is_named(name) for name in islice(list_searched(command, start), NAMES_LIMIT))


def list_searched(command: SimpleCommand, start: str) -> Iterator[str]:
    """Yield the files in folders that a command searches, and below them."""
    program, *words = command.words
    is_recursive = any(RECURSIVE.match(word) for word in words)
    if program not in ("rg", "git") and not (program in GREPS and is_recursive):
        return
    if program == "git" and "grep" not in words:
        return
    folders = [path for word in read_usage(command.words).operands if os.path.isdir(path := os.path.join(start, word))]
    for folder in folders or [start]:
        yield from list_files(folder)
