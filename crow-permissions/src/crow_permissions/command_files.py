"""The files that a command line writes, changes or reads, as far as its text tells.

Rules, protection and modes hold for them as for the files of edits.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from crow_core.paths import to_subject
from crow_core.session.session import Session
from crow_core.text import to_line

from crow_permissions.indirect_commands import list_named_files
from crow_permissions.protected import find_protection, unpacks
from crow_permissions.rules import Rule, Rules, Verdict
from crow_permissions.shell_words import UNKNOWN
from crow_permissions.simple_commands import CommandLine
from crow_permissions.subjects import EDITOR, expand_user, is_inside, path_from_root, spell_path

FOLDERS_LIMIT = 16
"""Folders in which a command line may run that are followed; with more, its files are not known."""
PATHS_LIMIT = 200
"""Files that are compared with the rules; with more, they are not known."""


def list_folders(line: CommandLine, start: str) -> list[str]:
    """List the folders in which commands of a line that starts in a folder may run; UNKNOWN stands in some.

    If `..` follows a link, both the shell's reading and the system's are listed.
    """
    folders = {start: None}
    for move in line.moves:
        for folder in [*folders]:
            path = os.path.join(folder, expand_user(move))
            folders |= dict.fromkeys((path, os.path.normpath(path)) if ".." in path else (path,))
        if len(folders) > FOLDERS_LIMIT:
            return [*folders, UNKNOWN]
    return [*folders]


def list_files(line: CommandLine, start: str) -> Iterator[tuple[str, bool]]:
    """Yield the files of a command line that starts in a folder, and whether it fills them; UNKNOWN stands in some."""
    folders = list_folders(line, start)
    kinds = ((line.writes, True), (line.changes, False), (line.reads, False))
    count = 0
    for paths, writes in kinds:
        for path in sorted(paths):
            for folder in folders:
                count += 1
                if count > PATHS_LIMIT:
                    yield UNKNOWN, True
                    return
                yield os.path.join(folder, expand_user(path)), writes


def find_rule_for_files(session: Session, rules: Rules, line: CommandLine, start: str) -> tuple[Verdict, Rule] | None:
    """Find the rule that denies or asks about a file of a command line; deny beats ask."""
    asks: tuple[Verdict, Rule] | None = None
    if not (rules.deny or rules.ask):
        return None
    read = ((path, False) for path, is_certain in list_named_paths(rules, line, start) if is_certain)
    for path, writes in chain(list_files(line, start), read):
        if UNKNOWN not in path and (found := rules.find_for_file(EDITOR, spell_path(session, path), writes=writes)):
            if found[0] == "deny":
                return found
            asks = asks or found
    return asks


def list_file_rules(rules: Rules) -> list[Rule]:
    """List the rules with a pattern that deny or ask about files."""
    return [rule for rule in (*rules.deny, *rules.ask) if rule.covers(EDITOR) and rule.pattern is not None]


def list_named_paths(rules: Rules, line: CommandLine, start: str) -> Iterator[tuple[str, bool]]:
    """Yield what may be files among the arguments of commands, and whether they surely are; UNKNOWN stands in some.

    Without rules about files, nothing is looked for.
    """
    if not list_file_rules(rules):
        return
    folders = list_folders(line, start)
    words = [*islice(list_named_files(line), 2 * PATHS_LIMIT)]
    for word, is_certain in dict.fromkeys(words):
        for folder in folders:
            yield os.path.join(folder, expand_user(word)), is_certain
    if len(words) == 2 * PATHS_LIMIT:
        yield UNKNOWN, False


def find_rule_for_named_files(session: Session, rules: Rules, line: CommandLine, start: str) -> tuple[str, Rule] | None:
    """Find a file that an argument of a command names, and the rule that denies or asks about it."""
    for path, _ in list_named_paths(rules, line, start):
        if UNKNOWN not in path and (found := rules.find_for_file(EDITOR, spell_path(session, path), writes=False)):
            return path, found[1]
    return None


def list_unknown_files(rules: Rules, line: CommandLine, start: str) -> Iterator[str]:
    """Yield the files with which a command line works; UNKNOWN stands in some, also for all below a folder."""
    for path, fills in list_files(line, start):
        is_folder = not fills and UNKNOWN not in path and os.path.isdir(path)
        yield os.path.join(os.path.normpath(path), UNKNOWN) if is_folder else path
    for path, _ in list_named_paths(rules, line, start):
        yield path


def find_rule_for_unknown_files(rules: Rules, line: CommandLine, start: str) -> Rule | None:
    """Find a rule that denies or asks about files and may be about one whose name cannot be known."""
    strict = list_file_rules(rules)
    for path in list_unknown_files(rules, line, start) if strict else ():
        if UNKNOWN in path:
            for rule in strict:
                if may_be_about(rule.pattern or "", path, start):
                    return rule
    return None


def may_be_about(pattern: str, path: str, start: str) -> bool:
    """Test whether a path with unknown parts may match a pattern."""
    path, start = to_subject(path), to_subject(start)
    ends = path.rpartition(UNKNOWN)[2]
    if not set(ends) & set("]},"):
        last = max(pattern.rfind(char) for char in "*?[]")
        known = pattern[last + 1 :].rstrip("/")
        if not (known.endswith(ends) or ends.endswith(known)):
            return False
    begins = path.partition(UNKNOWN)[0]
    first = min((pattern.find(char) for char in "*?[" if char in pattern), default=len(pattern))
    starts = (begins, to_subject(os.path.relpath(begins, start)) if begins.startswith(start + "/") else begins)
    plain = begins.removeprefix(start).lstrip("/")
    return any(text.startswith(pattern[:first]) or pattern[:first].startswith(text) for text in (*starts, plain))


def writes_unknown_files(line: CommandLine) -> bool:
    """Test whether a command line writes files whose names its text does not show."""
    if any(UNKNOWN in expand_user(path) for path in line.writes):
        return True
    return any(unpacks(spelling.split(" ")) for spelling in line.commands)


def find_own_file(session: Session, line: CommandLine, start: str, own_folders: Sequence[str]) -> str:
    """Find a file of crow's own that a command line writes; "" if there is none."""
    for path, writes in list_files(line, start):
        is_known = writes and UNKNOWN not in path and not os.path.isdir(path)
        if is_known and is_inside(session, path, own_folders, ignore_case=True):
            return path
    return ""


def find_protection_of_files(session: Session, line: CommandLine, start: str, protected: Sequence[str]) -> str:
    """Find a reason why the user is asked about a file that a command line writes; "" if there is none."""
    for path, writes in list_files(line, start):
        if not writes or UNKNOWN in path or os.path.isdir(path):
            continue
        if protection := find_protection(path_from_root(session, path), protected):
            return f"This writes {to_line(path)}. {to_line(protection.pattern)}: {protection.reason}."
    return ""


def may_write(session: Session, rules: Rules, paths: Sequence[str], *, accept_edits: bool) -> bool:
    """Test whether all files that redirections and options write may be edited without a question."""
    for path in paths:
        full = os.path.join(session.cwd, path)
        relative = spell_path(session, full)[0]
        in_roots = accept_edits and is_inside(session, full, session.folders.roots)
        if not in_roots and not any(rule.matches(EDITOR, relative) for rule in rules.allow):
            return False
    return True
