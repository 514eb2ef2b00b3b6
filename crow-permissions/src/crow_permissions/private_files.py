"""The private files in the folders of a session, which commands in the sandbox do not see: `.env`, keys, credentials.

Private is what private_data.toml lists, what the user's patterns name, and what rules that deny or ask name for all
tools. Three kinds of files are shown nevertheless: files in git, as its objects show them too; files made by the
session itself; and files that the user exposes or allows.
"""

import os
import re
import subprocess
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from time import time_ns

from crow_core.mcp.result import ToolResult
from crow_core.messages.message import list_edits
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.text import to_line
from crow_system.git import make_git_environment

from crow_permissions.private_data import INSTALLED, is_private_path
from crow_permissions.protected import to_regex
from crow_permissions.rules import Rules
from crow_permissions.subjects import EDITOR, spell_real_path

FOLDERS_LIMIT = 1_000
"""Folders that are looked at in a root, the outer ones first."""
NAMES_LIMIT = 5_000
"""Names that are looked at in a folder."""
NEW_NAMES_LIMIT = 20_000
"""Names that are looked at before a command; the next command goes on."""
HIDDEN_LIMIT = 50
"""Files that are hidden; the outer ones first."""
RECENT_NS = 50_000_000
"""The time within which a folder may change twice without a new time of its change."""
GIT_NAMES = 1_000
"""Names that git is given at once."""
GIT_TIMEOUT = 5.0
"""Seconds that git may take to list files."""
VARIABLE = re.compile(r"^\s*(?:export\s+)?([A-Z][A-Z0-9_]{3,})\s*=", re.MULTILINE)
"""Finds the variables in a file for an environment."""
TEXT_LIMIT = 100_000
"""Bytes of a private file in which variables are looked for."""
RESULT_LIMIT = 20_000
"""Characters at the end of a result that are looked at."""


@dataclass(frozen=True)
class KnownFolder:
    """The content of a folder."""

    changed: int
    """When it was changed last; 0 if it is to be read again."""
    folders: Sequence[str]
    private: Sequence[str]


@dataclass
class PrivateFiles:
    """The known content of the folders of a session."""

    folders: dict[str, KnownFolder] = field(default_factory=dict[str, KnownFolder])
    in_git: dict[Path, tuple[object, Collection[str]]] = field(
        default_factory=dict[Path, tuple[object, Collection[str]]]
    )
    """For each repository: what the list depends on, and the private files that git has."""


PRIVATE_FILES = StateKey("private_files", PrivateFiles)


def find_private_files(
    session: Session, rules: Rules, roots: Iterable[str], private: Sequence[str], expose: Sequence[str]
) -> list[str]:
    """Find the private files in the roots, by their absolute paths.

    `private` and `expose` are patterns, compared with the path from the root; one without a slash is also compared with
    the name.
    """
    state = session.state[PRIVATE_FILES]
    strict = [
        rule for rule in chain(rules.deny, rules.ask) if rule.covers("grep") and (rule.pattern or "").strip("*?/. ")
    ]
    allowing = [rule for rule in rules.allow if rule.pattern is not None and rule.covers(EDITOR)]

    def is_private(path: str, name: str) -> bool:
        is_known = is_private_path(name) or matches(private, name)
        if not (is_known or strict) or matches(expose, name):
            return False
        forms = spell_real_path(session, path)
        if not (is_known or any(rule.matches_any(EDITOR, forms) for rule in strict)):
            return False
        return not any(rule.matches(EDITOR, form) for rule in allowing for form in forms)

    found = [path for root in roots for path in scan(root, state.folders, is_private)]
    if not found:
        return []
    made = {edit["path"] for entry in session.log for edit in list_edits(entry) if edit.get("before") is None}
    shown = made | find_in_git(found, state)
    return [path for path in found if path not in shown][:HIDDEN_LIMIT]


def matches(patterns: Sequence[str], name: str) -> bool:
    """Test whether a path, from its root, or its name matches one of the patterns."""
    return any(
        to_regex(pattern).fullmatch(name)
        or ("/" not in pattern and to_regex(pattern).fullmatch(os.path.basename(name)))
        for pattern in patterns
    )


def scan(root: str, known: dict[str, KnownFolder], is_private: Callable[[str, str], bool]) -> Iterator[str]:
    """Yield the private files in a folder and below it. A folder is read again only if it has changed."""
    todo, left, start = deque([root]), NEW_NAMES_LIMIT, len(os.path.join(root, ""))
    for _ in range(FOLDERS_LIMIT):
        if not todo:
            return
        path = todo.popleft()
        try:
            changed = os.stat(path).st_mtime_ns
            folder = known.get(path)
            if folder is None or folder.changed != changed:
                if left <= 0:
                    continue
                folder, count = read_folder(path, changed, lambda path: is_private(path, path[start:]))
                known[path], left = folder, left - count
        except OSError:
            known.pop(path, None)
            continue
        yield from folder.private
        todo.extend(folder.folders)


def read_folder(path: str, changed: int, is_private: Callable[[str], bool]) -> tuple[KnownFolder, int]:
    """Read a folder; return with it how many names were looked at. Raises OSError."""
    folders, private, count = list[str](), list[str](), 0
    with os.scandir(path) as entries:
        for entry in islice(entries, NAMES_LIMIT):
            count += 1
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in INSTALLED:
                    folders.append(entry.path)
            elif is_private(entry.path):
                private.append(os.path.realpath(entry.path))
    is_settled = time_ns() - changed > RECENT_NS
    return KnownFolder(changed if is_settled else 0, folders, private), count


def find_in_git(paths: Iterable[str], state: PrivateFiles) -> set[str]:
    """Find those of the files that git has; it is asked again only if the index of a repository may have changed."""
    repositories: dict[Path, list[str]] = {}
    for path in paths:
        if top := next((each for each in Path(path).parents if (each / ".git").exists()), None):
            repositories.setdefault(top, []).append(path)
    found = set[str]()
    for top, inside in repositories.items():
        try:
            key = os.stat(top / ".git" / "index").st_mtime_ns, *inside
        except OSError:  # the index of a worktree is elsewhere
            key = None
        before, known = state.in_git.get(top, (None, ()))
        if key is None or key != before:
            known = list_in_git(top, [os.path.relpath(path, top) for path in inside])
            state.in_git[top] = key, known
        found.update(known)
    return found


def list_in_git(root: str | os.PathLike[str], names: Sequence[str]) -> set[str]:
    """List those of the files, whose paths are from the root, that git has, by their absolute paths."""
    found = set[str]()
    for start in range(0, len(names), GIT_NAMES):
        try:
            listed = subprocess.run(
                ["git", "--literal-pathspecs", "ls-files", "-z", "--", *names[start : start + GIT_NAMES]],
                cwd=root,
                env={**os.environ, **make_git_environment()},
                capture_output=True,
                timeout=GIT_TIMEOUT,
                check=True,
            ).stdout
        except (OSError, subprocess.SubprocessError):
            break
        found |= {os.path.join(root, os.fsdecode(name)) for name in listed.split(b"\0") if name}
    return found


def describe_missed(command: str, result: ToolResult, hidden: Sequence[str], start: str) -> str:
    """Say which of the hidden files a command wanted, as its text, or the end of what it printed when it failed, tells;
    "" for none. The command started in the folder `start`."""
    missed = dict.fromkeys(find_named(command, hidden, start))
    if result.meta.get("crow/exit") or result.is_error:
        text = "\n".join(str(block.get("text", ""))[-RESULT_LIMIT:] for block in result.content)
        missed |= dict.fromkeys(find_named(text, hidden, start))
        missed |= dict.fromkeys(path for path in hidden if names_variable(text, path))
    if not missed:
        return ""
    names = [to_line(os.path.relpath(path, start)) for path in missed]
    more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    are, it = ("are", "them") if len(names) > 1 else ("is", "it")
    exposed = ", ".join(f'"{name}"' for name in sorted({os.path.basename(path) for path in missed})[:5])
    return (
        f"{', '.join(names[:5])}{more} {are} hidden from commands in the sandbox, which see an empty file that they"
        f" cannot change. The user can show {it}: expose = [{exposed}] in [sandbox] of the settings"
    )


def find_named(text: str, hidden: Sequence[str], start: str) -> Iterator[str]:
    """Yield the files that a text names. A name without a folder stands for the file in the folder `start`, if there is
    one, else for any file of that name."""
    for name in {os.path.basename(path) for path in hidden}:
        for word in set(re.findall(rf"([^\s'\"=:;|&<>()`,]*(?<![\w.-])){re.escape(name)}(?![\w-]|\.\w)", text)):
            folder = re.sub(r"^(\.{0,2}/)+", "", word)
            path = os.path.normpath(os.path.join(start, word, name))
            yield from (
                [path]
                if path in hidden
                else (path for path in hidden if path.endswith(f"{'/' if '$' in folder else folder or '/'}{name}"))
            )


def names_variable(text: str, path: str) -> bool:
    """Test whether a text names one of the variables that a file sets."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            variables = VARIABLE.findall(file.read(TEXT_LIMIT))
    except OSError:
        return False
    return any(re.search(rf"\b{variable}\b", text) for variable in variables)
