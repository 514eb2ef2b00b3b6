"""The changes that a reviewed command made, for the question about it: protected files first, the diffs, git in one
line."""

import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

from crow_core.acp.schema import DiffContent
from crow_core.masking import mask
from crow_core.session.session import Session
from crow_core.text import show_invisible, to_line
from crow_system.shortening import format_count, leave_out

from crow_permissions.protected import find_protection
from crow_permissions.rules import Rules, Verdict
from crow_permissions.subjects import EDITOR, from_root, is_below_any, spell_real_path

if TYPE_CHECKING:
    from crow_sandbox.changes import LayerChange

DIFFS_LIMIT = 40
"""Files that a question shows as diffs."""
DIFF_BYTES = 200_000
"""The largest file that a question shows as a diff."""
DIFF_CHARACTERS = 20_000
"""Characters of each side of a diff that are shown."""
NAMES_LIMIT = 60
"""Ordinary files that a question names, in addition to those that are never left out."""
PARTS_LIMIT = 20
"""Files of a new folder that a question names; those that run later are never left out."""
FOLDER_DIFFS = 10
"""Files of a new folder that a question shows as diffs."""
NOTED_LIMIT = 100
"""Paths in the record of a decision."""
NAMED_FILES = 12
"""Paths in a sentence for the model."""
CACHE = re.compile(
    r"""
    (.*/)? (
    \.pytest_cache (/(README\.md | v(/[\w-]+)*))?
    | \.mypy_cache (/(missing_stubs | \d+\.\d+ | \d+\.\d+/([^/]+/)*[^/.]+
        | \d+\.\d+/.*[._](data|meta|deps|err|snapshot)\.(json|ff)
        | \d+\.\d+/cache\.(\w+\.)?db[\w-]*))?
    | \.ruff_cache (/[\d.]+(/\d+)?)?
    | \.hypothesis (/(examples | examples/[0-9a-f]+(/[0-9a-f]+)? | constants(/[0-9a-f]+)? | tmp(/tmp\w+)?
        | unicode_data(/[\d.]+(/[\w.-]+\.json\.gz)?)? | patches(/[\w.-]+\.patch)?))?
    | \.(pytest_cache|mypy_cache|ruff_cache|hypothesis) /(CACHEDIR\.TAG | \.gitignore)
    )
    """,
    re.VERBOSE | re.ASCII,
)
"""Matches what programs keep in folders of caches, which is applied without a question. Other files in such a folder
are asked about as elsewhere."""
OPERATION = re.compile(r"(^|/\.git/|^\.git/)(worktrees/[^/]+/)?(rebase-merge|rebase-apply|sequencer)(/|$)")
"""Matches the files of a rebase or a cherry-pick in a git folder, which git removes when it is over."""
RUNS_BY_GIT = "git reads from it what to run, or which folder it works on"
KINDS = {"added": "new", "changed": "changed", "removed": "removed"}


@dataclass(frozen=True)
class Part:
    """A file of a new folder, or a folder in it whose files are all asked about."""

    path: str
    """The path from the root of the layer."""
    reason: str = ""
    files: int = 0
    """The number of files, for a folder."""

    def describe(self, folder: str) -> str:
        """Describe the part on one line; `folder` is the new one."""
        count = f" ({self.files:,} files)" if self.files else ""
        return show_name(os.path.relpath(self.path, folder)) + count + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class ShownChange:
    """A change that a command made, as the user is asked about it."""

    change: "LayerChange"
    path: str
    """Absolute, of the real file."""
    name: str
    """From the root of the session, on one line."""
    reason: str = ""
    """The reason why the change is asked about in spite of any permission: it runs later, it conflicts, …"""
    is_git: bool = False
    """True for what git keeps for itself."""
    is_cache: bool = False
    parts: Sequence[Part] = ()
    """The content of a new folder, protected files first, without git's own files."""

    @property
    def removes(self) -> bool:
        """True if a file is gone, or a folder with what it held, also where something else is in its place."""
        return self.change.kind == "removed" or replaces_folder(self.change)

    def describe(self) -> str:
        """Describe the change on one line."""
        change = self.change
        what = "its permissions" if change.mode_only else KINDS[change.kind]
        if replaces_folder(change):
            count = sum(1 for _ in list_removed(change))
            what += f" in place of a folder with {format_count(count, 'file')}, as a {change.type}"
        if change.type == "folder" and not change.mode_only:
            count = change.files if change.kind == "removed" else sum(1 for _ in list_new(change))
            what += f" folder, {format_count(count, 'file')}"
        elif change.type == "file" and change.kind != "removed" and not change.mode_only:
            what += f", {read_size(self):,} bytes"
        elif change.type == "link" and change.kind != "removed":
            what += f" link to {show_name(read_link(self))}"
        why = f": {self.reason}" if self.reason else ""
        return "\n".join([f"{self.name} ({what}){why}", *self._describe_parts()])

    def _describe_parts(self) -> Iterator[str]:
        """Yield a line for each part that the question names."""
        count = max(PARTS_LIMIT, sum(1 for part in self.parts if part.reason))
        yield from (f"  - {part.describe(self.change.path)}" for part in self.parts[:count])
        if len(self.parts) > count:
            yield f"  - and {len(self.parts) - count:,} more"


@dataclass(frozen=True)
class ChangeSet:
    """All that a command changed."""

    shown: Sequence[ShownChange] = field(default_factory=list[ShownChange])
    """The changes that may be applied, in the order of the question."""
    git: Sequence[str] = field(default_factory=list[str])
    """Changes that git made for itself, a line for each repository."""
    denied: tuple[str, str] | None = None
    """A file that a rule forbids to change, and the rule."""
    left: Sequence[str] = field(default_factory=list[str])
    """Files that cannot be applied: devices, sockets and pipes."""

    @property
    def changes(self) -> "list[LayerChange]":
        return [each.change for each in self.shown]

    @property
    def must_ask(self) -> bool:
        """True if the user is asked in every mode but yolo, whatever answers are kept."""
        return any(each.reason for each in self.shown)

    @property
    def only_caches(self) -> bool:
        return all(each.is_cache for each in self.shown)

    def list_names(self) -> list[str]:
        """List the names of the changed files, for a record; git is one."""
        files = [each.name for each in self.shown if not each.is_git and not each.is_cache]
        return [*files, *([".git"] if any(each.is_git for each in self.shown) else [])]

    def name_files(self) -> str:
        """Name the changed files in a sentence."""
        names = self.list_names() or [each.name for each in self.shown]
        more = f" and {len(names) - NAMED_FILES:,} more" if len(names) > NAMED_FILES else ""
        return f"{', '.join(names[:NAMED_FILES])}{more}"


def sort_changes(
    session: Session, rules: Rules, own: Sequence[str], protected: Sequence[str], changes: "Sequence[LayerChange]"
) -> ChangeSet:
    """Sort the changes for the question: conflicts and files that run later, removals, then the others.

    Compiled Python files are dropped: they would run later, and come back by themselves.
    """
    from crow_sandbox.changes import is_compiled  # imported here, as no session needs them before a command
    from crow_sandbox.git_changes import split_git_changes

    shown, left, denied = list[ShownChange](), list[str](), None
    git, _ = split_git_changes(changes)
    data = {change for each in git for change in each.changes}
    for change in changes:
        if is_compiled(change.path) or change.times_only:
            continue
        path = os.path.join(change.layer.root, change.path)
        name = show_name(from_root(session, path))
        if change.type == "other" and change.kind != "removed":
            left.append(name)
            continue
        found = ShownChange(change, path, name, is_git=change in data, is_cache=is_cache(change))
        verdict, reason = find_reason(session, rules, own, protected, found)
        if verdict == "deny":
            denied = denied or (name, reason)
        parts = [] if found.is_git or found.is_cache else list_parts(session, protected, change)
        shown.append(replace(found, reason=reason or next((part.reason for part in parts), ""), parts=parts))
    shown.sort(key=lambda each: (not each.reason, not each.removes, each.is_git, each.name))
    return ChangeSet(shown, [show_name(str(each)) for each in git], denied, left)


def find_reason(
    session: Session, rules: Rules, own: Sequence[str], protected: Sequence[str], found: ShownChange
) -> tuple[Verdict, str]:
    """Find why a change is asked about in every case, or the rule that forbids it."""
    from crow_sandbox.git_changes import classify_git_path  # imported here, as no session needs it before a command

    change, verdict, reason = found.change, cast("Verdict", "allow"), ""
    for name in list_names(found):
        path = os.path.join(change.layer.root, name)
        if is_below_any(path, own, ignore_case=True):
            return "ask", "it is one of crow's own files"
        spellings = spell_real_path(session, path) if rules.has_strict else []
        if rule := rules.find_for_file(EDITOR, spellings, writes=True):
            if rule[0] == "deny":
                return "deny", str(rule[1])
            if rule[0] == "ask":
                verdict, reason = "ask", reason or f"the rule {str(rule[1])!r} says ask"
        is_part = name != change.path and change.kind != "removed" and not replaces_folder(change)  # see list_parts
        is_over = change.kind == "removed" and OPERATION.search(name) is not None
        is_plain = not (found.is_git or found.is_cache or is_part or is_over)
        if is_plain and (protection := find_protection_below(session, path, protected)):
            verdict, reason = "ask", reason or protection
        if not (found.is_git or is_over) and classify_git_path(change.layer, name) == "runs-later":
            verdict, reason = "ask", reason or RUNS_BY_GIT
    if change.conflicts:
        return "ask", "somebody else has changed it meanwhile, and that would be lost"
    return verdict, reason


def find_protection_below(session: Session, path: str, protected: Sequence[str]) -> str:
    """Find why a file is asked about, or all files of a folder."""
    name = from_root(session, path)
    found = find_protection(name, protected) or find_protection(f"{name}/", protected)
    return to_line(found.reason) if found else ""


def list_names(found: ShownChange) -> Iterator[str]:
    """Yield the paths, from the root of the layer, that a change touches; of a folder that is new or gone, those of its
    files, too."""
    change = found.change
    yield change.path
    if not found.is_git:
        yield from (*list_new(change), *list_removed(change))


def list_parts(session: Session, protected: Sequence[str], change: "LayerChange") -> list[Part]:
    """List the content of a new folder; protected files come first, and a wholly protected folder as one part."""
    from crow_sandbox.git_changes import classify_git_path  # imported here, as no session needs it before a command

    new = [*list_new(change)]
    base = from_root(session, os.path.join(change.layer.root, change.path)) if new else ""
    whole, inside, parts = {change.path: ""}, dict[str, list[str]](), list[Part]()
    reasons: dict[str, str] = {}

    def find_whole(folder: str) -> str:
        """Find the outermost folder, below the new one, that is protected and holds this one."""
        if folder not in whole:
            whole[folder] = find_whole(os.path.dirname(folder))
            if not whole[folder] and (found := find_protection(f"{base}{folder[len(change.path) :]}/", protected)):
                whole[folder], reasons[folder] = folder, to_line(found.reason)
        return whole[folder]

    is_whole = bool(new) and find_protection(f"{base}/", protected) is not None
    for path in new:
        git = classify_git_path(change.layer, path)
        if git == "data":
            continue
        if git:
            parts.append(Part(path, RUNS_BY_GIT))
        elif is_whole:
            parts.append(Part(path))
        elif folder := find_whole(os.path.dirname(path)):
            inside.setdefault(folder, []).append(path)
        else:
            found = find_protection(base + path[len(change.path) :], protected)
            parts.append(Part(path, to_line(found.reason) if found else ""))
    for folder, files in inside.items():
        few = files if len(files) <= PARTS_LIMIT else []
        parts += [Part(path, reasons[folder]) for path in few] or [Part(folder, reasons[folder], len(files))]
    return sorted(parts, key=lambda part: (not part.reason, part.path))


def show_name(name: str) -> str:
    """Spell a name, or where a link leads, on one line; bytes that are not UTF-8 are replaced."""
    return show_invisible(to_line(os.fsencode(name).decode(errors="replace")))


def is_text(name: str) -> bool:
    """Test whether a name is Unicode, and so can be stored in the log of a session."""
    return os.fsencode(name).decode(errors="replace") == name


def replaces_folder(change: "LayerChange") -> bool:
    """Test whether a real folder is gone, and something else, or another folder, is in its place."""
    is_there = change.kind == "changed" and not change.mode_only
    return is_there and change.real is not None and stat.S_ISDIR(change.real[1])


def list_new(change: "LayerChange") -> Iterator[str]:
    """Yield the paths of the files of a folder that is new and are applied with it, from the root of the layer."""
    from crow_sandbox.changes import is_compiled, list_files  # imported here, as no session needs them before a command

    if change.type == "folder" and change.kind != "removed" and not change.mode_only:
        yield from (path for path in list_files(change) if not is_compiled(path))


def list_removed(change: "LayerChange") -> Iterator[str]:
    """Yield the paths of the files of a folder that is gone, from the root of the layer."""
    from crow_sandbox.changes import list_files  # imported here, as no session needs it before its first command

    if replaces_folder(change) or (change.type == "folder" and change.kind == "removed"):
        yield from list_files(replace(change, kind="removed", type="folder"))


def is_cache(change: "LayerChange") -> bool:
    """Test whether a change is of nothing but ordinary files that a program keeps in the folder of its cache."""
    from crow_sandbox.git_changes import classify_git_path  # imported here, as no session needs it before a command

    layer, new = change.layer, [*list_new(change)] if CACHE.fullmatch(change.path) else []
    if not CACHE.fullmatch(change.path) or classify_git_path(layer, change.path) is not None:
        return False
    is_ordinary = all(stat.S_ISREG(os.lstat(layer.upper / each).st_mode) for each in new)
    is_ordinary = is_ordinary and (change.type in ("file", "folder") or change.kind == "removed")
    return is_ordinary and all(map(CACHE.fullmatch, (*new, *list_removed(change))))


def list_untracked_removals(found: ChangeSet, git: Collection[str]) -> list[ShownChange]:
    """List the removals of files that git does not have; `git` are the absolute paths that it has."""
    removed = [each for each in found.shown if each.removes and not each.is_git and not each.is_cache]
    return [each for each in removed if each.path not in git]


def describe_changes(found: ChangeSet) -> str:
    """Describe all changes, for the question. Files that run later and removals are never left out."""
    shown = [each for each in found.shown if not each.is_cache]
    first = [each for each in shown if each.reason and each.change.kind != "removed"]
    removed = [each for each in shown if each.removes and each not in first and not (each.is_git and not each.reason)]
    files = [each for each in shown if not (each.reason or each.is_git or each.removes)]
    parts = [
        format_list("⚠ Look at these first", first),
        format_list("Removed", removed),
        format_list("Changed" if first or removed else "", files[:NAMES_LIMIT]),
    ]
    if len(files) > NAMES_LIMIT:
        parts.append(f"And {len(files) - NAMES_LIMIT:,} more.")
    parts += found.git
    return "\n\n".join(filter(None, parts))


def format_list(title: str, changes: Sequence[ShownChange]) -> str:
    """Format changes as a list under a title."""
    lines = [f"- {each.describe()}" for each in changes]
    return "\n".join(filter(None, [f"{title}:" if title and lines else "", *lines]))


def make_diffs(found: ChangeSet, secrets: Collection[str]) -> list[DiffContent]:
    """Make the diffs of the files that are text and not too large, in the order of the question."""
    files = (
        file for each in found.shown if not (each.is_git or each.is_cache) for file in make_file_diffs(each, secrets)
    )
    return [*islice(files, DIFFS_LIMIT)]


def make_file_diffs(shown: ShownChange, secrets: Collection[str]) -> Iterator[DiffContent]:
    """Yield the diff of a file, or those of some files of a new folder."""
    change = shown.change
    if change.type == "folder":
        files = (make_diff(change, part.path, secrets) for part in shown.parts if not part.files)
        yield from islice(filter(None, files), FOLDER_DIFFS)
    elif change.type == "file" and not change.mode_only and (diff := make_diff(change, change.path, secrets)):
        yield diff


def make_diff(change: "LayerChange", name: str, secrets: Collection[str]) -> DiffContent | None:
    """Make the diff of a file that is text and not too large; None for another one."""
    real, is_new = change.layer.root / name, change.kind == "added"
    old = "" if is_new else read_text(real)
    new = read_text(change.layer.upper / name) if change.kind != "removed" else ""
    if change.type == "folder" and not is_new:  # it takes the place of another one
        old, is_new = old or "", not os.path.lexists(real)
    if old is None or new is None:
        return None
    old, new = (leave_out(mask(text, secrets), DIFF_CHARACTERS) for text in (old, new))
    path = os.fsencode(real).decode(errors="replace")
    return DiffContent(path=path, old_text=None if is_new else old, new_text=new)


def read_text(path: Path, limit: int = DIFF_BYTES) -> str | None:
    """Read a text file; None if it is a link, not text, too large or unreadable."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            data = file.read(limit + 1)
        return None if len(data) > limit or b"\0" in data else data.decode()
    except (OSError, UnicodeDecodeError):
        return None


def read_size(found: ShownChange) -> int:
    """Return the size of a new or changed file; 0 if it cannot be read."""
    try:
        return os.lstat(found.change.layer.upper / found.change.path).st_size
    except OSError:
        return 0


def read_link(found: ShownChange) -> str:
    """Return where a new or changed link leads; "" if it cannot be read."""
    try:
        return os.readlink(found.change.layer.upper / found.change.path)
    except OSError:
        return ""
