"""The state of a git work tree: read it without changing anything, and restore it in another folder.

git is only asked which files differ from the commit; their bytes are read from the disk. So nothing is written into the
repository, neither objects nor its index, and no program from its settings runs. Hooks and the file system monitor are
switched off as in `git.py`, each configured filter is overridden, and submodules are skipped.
"""

import asyncio
import hashlib
import os
import stat
from asyncio.subprocess import PIPE
from base64 import b64decode, b64encode
from binascii import Error as NoBase64
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

import crow_system as system
from crow_core.messages.worktree import ChangedPath, WorkTree
from crow_system.git import make_git_environment, run_git

from crow_extensions.shell import start_command

BYTES_LIMIT = 5_000_000
"""Bytes of changed files that are recorded, since the log of an open session is held in memory."""
FILES_LIMIT = 1_000
"""Changed files that are recorded."""
OUTPUT_LIMIT = 1_000_000
"""Bytes of git's output that are read."""
CLONE_TIMEOUT = 600.0
"""Seconds that a clone may take."""
FOREIGN_VARIABLES = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES"),
    *("GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_PREFIX", "GIT_CONFIG_PARAMETERS", "GIT_EXTERNAL_DIFF"),
)
"""Variables that would choose another repository than the folder's, as in a git hook that has started crow."""
FILTERS = ("filter.*.clean", "filter.*.smudge", "filter.*.process")
STATUS = [
    *("git", "status", "--porcelain=v2", "--branch", "-z", "--untracked-files=all", "--no-renames"),
    *("--no-ahead-behind", "--ignore-submodules=dirty"),
]


class FolderStateError(Exception):
    """A work tree cannot be restored; the text is a sentence for a person."""


async def read_state(folder: str) -> WorkTree | None:
    """Read the state of the work tree that a folder is in; None if it is in none, or git is not installed.

    A state that cannot be read has a `fault`. Cancelling it ends git.
    """
    if not is_in_repository(folder):
        return None
    environment = make_environment()
    try:
        settings = await ask(["git", "config", "--list", "--name-only", "-z"], folder, environment)
        places = await ask(["git", "rev-parse", "--show-toplevel", "--show-prefix"], folder, environment)
    except FileNotFoundError:
        return None
    except OSError as error:
        return WorkTree(folder, fault=describe_fault(error))
    top, prefix, *_ = places.split("\n")
    tree = WorkTree(top, prefix.removesuffix("/"))
    environment |= switch_off_filters(settings.split("\0"), environment)
    if tree.folder and await is_ignored(folder, environment):
        tree.fault = "git ignores the folder"
        return tree
    try:
        status = await ask(STATUS, folder, environment)
        await asyncio.to_thread(read_changes, tree, status.split("\0"))
    except OSError as error:
        tree.changes, tree.staged, tree.fault = [], [], describe_fault(error)
    return tree


def is_in_repository(folder: str) -> bool:
    """Return whether a folder, or one above it, has a `.git`; git may still find no repository there."""
    here = Path(os.path.abspath(folder))
    return any(os.path.lexists(each / ".git") for each in (here, *here.parents))


def make_environment() -> dict[str, str]:
    """Make the environment in which git changes nothing, runs no program of the repository, and asks no other host."""
    own = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    limits = {"GIT_OPTIONAL_LOCKS": "0", "GIT_ALLOW_PROTOCOL": "none", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    return {**own, **make_git_environment(), **limits}


def switch_off_filters(settings: Collection[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Make variables that override each configured filter, so that git runs none of them."""
    found = {name for name in settings if any(fnmatchcase(name.lower(), pattern) for pattern in FILTERS)}
    drivers = {name.rpartition(".")[0] for name in found}
    off = [(f"{driver}.{key}", "") for driver in sorted(drivers) for key in ("clean", "smudge", "process")]
    off += [(f"{driver}.required", "false") for driver in sorted(drivers)]
    first = int(environment["GIT_CONFIG_COUNT"])
    variables = {"GIT_CONFIG_COUNT": str(first + len(off))}
    for index, (key, value) in enumerate(off, first):
        variables |= {f"GIT_CONFIG_KEY_{index}": key, f"GIT_CONFIG_VALUE_{index}": value}
    return variables


async def is_ignored(folder: str, environment: Mapping[str, str]) -> bool:
    """Return whether git ignores a folder of a work tree."""
    try:
        await ask(["git", "check-ignore", "--quiet", "."], folder, environment)
    except OSError:
        return False
    return True


async def ask(command: list[str], folder: str, environment: Mapping[str, str]) -> str:
    """Return what git prints. Raises OSError."""
    hidden = os.environ.keys() - environment.keys()
    async with start_command(command, folder, PIPE, PIPE, hidden=hidden, more=environment) as process:
        assert process.stdout
        assert process.stderr
        printed, said = await asyncio.gather(read_start(process.stdout), read_start(process.stderr))
        if len(printed) > OUTPUT_LIMIT:
            raise OSError("git lists too many changes")
        if await process.wait():
            raise OSError(os.fsdecode(said[:500].strip()))
        return os.fsdecode(printed)


async def read_start(stream: asyncio.StreamReader) -> bytes:
    """Read a stream up to its end, or until it has more than OUTPUT_LIMIT bytes."""
    try:
        return await stream.readexactly(OUTPUT_LIMIT + 1)
    except asyncio.IncompleteReadError as whole:
        return whole.partial


def describe_fault(error: OSError) -> str:
    """Say in a line why a state cannot be read."""
    lines = str(error.strerror or error).strip().splitlines() or ["git failed"]
    return lines[0].removeprefix("fatal: ")[:300].rstrip(".")


def read_changes(tree: WorkTree, fields: Sequence[str]) -> None:
    """Take in what `git status` has printed, and read the files that it names. Raises OSError if they cannot be."""
    paths: dict[str, None] = {}
    for field in fields:
        match field[:2]:
            case "# ":
                name, _, value = field[2:].partition(" ")
                if name == "branch.oid" and value != "(initial)":
                    tree.commit = value
                elif name == "branch.head" and value != "(detached)":
                    tree.branch = value
            case "1 ":
                _, states, submodule, *_, path = field.split(" ", 8)
                if submodule.startswith("S"):
                    raise OSError(f"the submodule {path} is at another commit")
                if not states.startswith("."):
                    tree.staged.append(path)
                paths[path] = None
            case "2 " | "u ":
                raise OSError("a merge is not finished")
            case "? ":
                paths[field[2:]] = None
            case _:
                pass
    if len(paths) > FILES_LIMIT:
        raise OSError(f"{len(paths):,} files are changed, more than {FILES_LIMIT:,}")
    left = BYTES_LIMIT
    for path in paths:
        change, size = read_path(tree.top, path, left)
        tree.changes.append(change)
        left -= size


def read_path(top: str, path: str, limit: int) -> tuple[ChangedPath, int]:
    """Read a changed path; return it with its size. Raises OSError, also if it has more than `limit` bytes."""
    if path.endswith("/"):
        raise OSError(f"{path} is a repository of its own")
    place = os.path.join(top, path)
    try:
        status = os.lstat(place)
    except (FileNotFoundError, NotADirectoryError):
        return ChangedPath(path), 0
    if stat.S_ISLNK(status.st_mode):
        return ChangedPath(path, link=os.readlink(place)), 0
    if stat.S_ISDIR(status.st_mode):  # in place of the file; what it holds is listed by itself
        return ChangedPath(path), 0
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is neither a file nor a link")
    with open(os.open(place, os.O_RDONLY | system.NO_LINKS | system.NO_WAIT | system.BINARY), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(f"the changed files have more than {BYTES_LIMIT:,} bytes")
    change = ChangedPath(path, digest=hashlib.sha256(data).hexdigest(), is_executable=bool(status.st_mode & 0o100))
    try:
        change.text = data.decode()
    except UnicodeDecodeError:
        change.base64 = b64encode(data).decode()
    return change, len(data)


def check_restorable(tree: WorkTree) -> None:
    """Raise FolderStateError, with the reason, if a state cannot be restored."""
    if tree.fault:
        raise FolderStateError(f"its changes were not recorded: {tree.fault}")
    for change in tree.changes:
        read_bytes(change)
        check_path(change.path)
    if tree.folder:
        check_path(tree.folder)
    check_commit(tree)
    if not tree.commit:
        return
    try:
        command = ["git", "ls-tree", "-r", "-z", "--full-tree", tree.commit]
        files = run_git(command, tree.top, make_environment(), CLONE_TIMEOUT)
    except OSError as error:
        raise FolderStateError(f"git cannot read the commit {tree.commit[:12]}: {describe_fault(error)}") from error
    if any(line.startswith("160000 ") for line in files.split("\0")):
        raise FolderStateError("it has submodules, which are not recorded")


def check_commit(tree: WorkTree) -> None:
    """Raise FolderStateError if the commit of a state is not in its repository any more."""
    if not os.path.isdir(tree.top):
        raise FolderStateError(f"the folder {tree.top} is gone")
    if tree.commit:
        try:
            run_git(["git", "cat-file", "-e", f"{tree.commit}^{{commit}}"], tree.top, make_environment())
        except OSError as error:
            raise FolderStateError(f"the commit {tree.commit[:12]} is not in {tree.top} any more") from error


def restore_state(tree: WorkTree, folder: Path) -> Path:
    """Restore a state in an empty folder, in a repository of its own; return the folder that was recorded.

    The new repository reads the objects of the old one, and has no remote. Raises FolderStateError.
    """
    check_restorable(tree)
    environment = {**make_environment(), "GIT_ALLOW_PROTOCOL": "file"}
    start = ["--detach", tree.commit] if not tree.branch else ["-B", tree.branch, *filter(None, [tree.commit])]
    commands = (
        [
            ["git", "clone", "--quiet", "--no-checkout", "--shared", "--", tree.top, str(folder)],
            ["git", "checkout", "--quiet", *start],
            ["git", "remote", "remove", "origin"],
        ]
        if tree.commit
        else [["git", "init", "--quiet"], ["git", "checkout", "--quiet", "-b", tree.branch or "main"]]
    )
    try:
        for command in commands:
            run_git(command, str(folder), environment, CLONE_TIMEOUT)
        write_changes(tree.changes, folder)
        for path in tree.staged:
            literal = {**environment, "GIT_LITERAL_PATHSPECS": "1"}
            run_git(["git", "add", "--all", "--", path], str(folder), literal)
    except OSError as error:
        raise FolderStateError(f"the copy cannot be made: {describe_fault(error)}") from error
    (inside := folder / tree.folder).mkdir(parents=True, exist_ok=True)
    return inside


def write_changes(changes: Sequence[ChangedPath], folder: Path) -> None:
    """Write changed files into a folder, and remove those that were removed. Raises OSError, FolderStateError."""
    for change in changes:  # first, since a folder may take the place of a file
        if (data := read_bytes(change)) is None and os.path.lexists(place := find_place(change.path, folder)):
            if place.is_dir() and not place.is_symlink():
                continue
            place.unlink()
            if change.link is None:
                remove_empty(place.parent, folder)
    for change in changes:
        if (data := read_bytes(change)) is not None:
            place = find_place(change.path, folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.is_symlink():
                place.unlink()
            place.write_bytes(data)
            place.chmod(0o755 if change.is_executable else 0o644)
    for change in changes:  # last, so that nothing is written through one
        if change.link is not None:
            place = find_place(change.path, folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            place.symlink_to(change.link)


def remove_empty(folder: Path, top: Path) -> None:
    """Remove a folder, and those above it below `top`, if they are empty, as git does."""
    while folder != top:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


def find_place(path: str, folder: Path) -> Path:
    """Return where a recorded path is in a folder. Raises FolderStateError if that is outside of it."""
    check_path(path)
    place = folder / path
    if not place.parent.resolve().is_relative_to(folder.resolve()):
        raise FolderStateError(f"the path {path} leads out of the folder")
    return place


def check_path(path: str) -> None:
    """Raise FolderStateError for a path that is not relative, goes up, or is in git's own folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or os.path.isabs(path) or {"..", ".git"} & {part.lower() for part in parts}:
        raise FolderStateError(f"the path {path!r} cannot be restored")


def read_bytes(change: ChangedPath) -> bytes | None:
    """Return the bytes of a recorded file; None for a link, and for a removed file.

    Raises FolderStateError if they are not those that the file had.
    """
    if not change.digest:
        return None
    try:
        data = change.text.encode() if change.text is not None else b64decode(change.base64 or "", validate=True)
    except (UnicodeEncodeError, NoBase64):
        data = b""
    if hashlib.sha256(data).hexdigest() != change.digest:
        raise FolderStateError(f"{change.path} was not kept whole: a secret in it was masked, or the log is damaged")
    return data


def list_removed(changes: Sequence[ChangedPath]) -> list[str]:
    return [change.path for change in changes if not change.digest and change.link is None]
