"""Files below the roots of a workspace, and no others: also when a link is swapped in between check and use."""

import errno
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.workspace import Workspace

MAX_FILE_BYTES = 10 * 1024 * 1024  # of a file the editor opens
MAX_ENTRIES = 400  # of a folder listing
MAX_ENTRIES_BELOW = 50  # of each folder in it
SKIPPED_FOLDERS = {"node_modules", "__pycache__"}  # nor hidden folders
FOLDER_FLAGS = os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)


@dataclass(frozen=True)
class ResolvedPath:
    """A path that the roots allow."""

    path: str
    """Absolute, symbolic links resolved."""
    root: str
    """The root it lies in, resolved."""
    as_given: str
    """The same path below the root as that was given: what a host knows it by."""

    @property
    def parts(self) -> list[str]:
        """The names that lead from the root to it; of the root itself, its own dot."""
        return os.path.relpath(self.path, self.root).split(os.sep)


@dataclass(frozen=True)
class FileContent:
    """A file as it was read."""

    data: bytes
    stamp: tuple[int, ...]
    """Changes when the file does."""


def resolve_path(path: str, workspace: Workspace) -> ResolvedPath:
    """Where a path given by the model leads. Raises Refusal when that is outside of every root."""
    try:
        resolved = os.path.realpath(os.path.join(workspace.cwd, os.path.expanduser(path)))
    except ValueError:  # a NUL, or half a surrogate pair
        resolved = ""
    if not path.strip() or not resolved:
        raise ToolRefusal(f"{path!r} is not a path. Give one that is absolute or relative to {workspace.cwd}.")
    for given in (*workspace.roots, *workspace.readable):
        root = os.path.realpath(given)
        if os.path.commonpath([root, resolved]) == root:
            named = os.path.normpath(os.path.join(given, os.path.relpath(resolved, root)))
            return ResolvedPath(resolved, root, named)
    raise ToolRefusal(
        f"{path} leads to {resolved}, outside of the folders open to this tool: {', '.join(workspace.roots)}. "
        "Use a path inside one of them."
    )


def read_file(target: ResolvedPath) -> FileContent | None:
    """The content of a file, None when there is no such file.

    Raises IsADirectoryError for a folder, Refusal for what is neither and for a file too large to edit.
    """
    try:
        opened = open_file(target)
    except FileNotFoundError:
        return None
    with open(opened, "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ToolRefusal(
                f"{target.path} has more than the {MAX_FILE_BYTES:,} bytes this tool opens. "
                "Read parts of it in the terminal (sed -n '1,200p', grep -n, head, tail)."
            )
        return FileContent(data, _stamp(os.fstat(opened)))


def open_file(target: ResolvedPath) -> int:
    """A descriptor of a file to read. Raises IsADirectoryError for a folder, Refusal for what is neither."""
    with _open_parent(target) as (folder, name):
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(opened)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target.path)
        if not stat.S_ISREG(status.st_mode):
            raise ToolRefusal(f"{target.path} is a device, pipe or socket, not a file.")
    except BaseException:
        os.close(opened)
        raise
    return opened


def open_folder(target: ResolvedPath) -> int:
    """A descriptor of a folder to list. Raises NotADirectoryError for anything else."""
    with _open_parent(target) as (above, name):
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)


def write_file(target: ResolvedPath, data: bytes, stamp: tuple[int, ...] | None) -> None:
    """Put the whole content in place at once, keeping the mode; folders above are made.

    `stamp` is what `read` told, None for a file that did not exist. Raises Refusal when that is no longer so.
    """
    with _open_parent(target, make=True) as (folder, name):
        before = _status(folder, name)
        if (before and _stamp(before)) != stamp:
            raise ToolRefusal(f"{target.path} changed at this very moment. View it again, then repeat the edit.")
        if before and not os.access(name, os.W_OK, dir_fd=folder):
            raise ToolRefusal(
                f"{target.path} is read-only. If it should be edited, make it writable first (chmod u+w)."
            )
        temporary = f".{secrets.token_hex(8)}.tmp"
        opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
        try:
            with open(opened, "wb") as file:
                file.write(data)
                if before:
                    _keep_owner_and_mode(opened, before)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(temporary, dir_fd=folder)
            raise


@contextmanager
def create_parents(target: ResolvedPath) -> Generator[None]:
    """Have the folders above a file inside of this block; those made for it go again when it fails."""
    made: list[str] = []
    above = os.path.dirname(target.path)
    while not os.path.lexists(above):
        made.append(above)
        above = os.path.dirname(above)
    with _open_parent(target, make=True):
        pass
    try:
        yield
    except BaseException:
        with suppress(OSError):  # no longer empty
            for folder in made:
                os.rmdir(folder)
        raise


def remove_file(target: ResolvedPath) -> None:
    """Remove a file."""
    with _open_parent(target) as (folder, name):
        os.unlink(name, dir_fd=folder)


def list_folder(target: ResolvedPath) -> list[str]:
    """What lies in a folder and in the folders in it, sorted, one line each; no more than a model wants to read."""
    folder = open_folder(target)
    try:
        lines: list[str] = []
        for entry in _list_entries(folder, MAX_ENTRIES):
            lines.append(entry)
            inner = entry.removesuffix("/")
            if (
                inner != entry
                and not inner.startswith(".")
                and inner not in SKIPPED_FOLDERS
                and len(lines) < MAX_ENTRIES
            ):
                lines += [f"  {below}" for below in _list_entries_below(folder, inner)]
        return lines
    finally:
        os.close(folder)


def list_names(target: ResolvedPath) -> list[bytes]:
    """The names in a folder, sorted."""
    folder = open_folder(target)
    try:
        return sorted(os.fsencode(name) for name in os.listdir(folder))
    finally:
        os.close(folder)


@contextmanager
def _open_parent(target: ResolvedPath, *, make: bool = False) -> Generator[tuple[int, str]]:
    """The folder a file lies in, as a descriptor, and the file's name in it.

    Walked from the root step by step without following a link: `locate` resolved them all, so a link found now was put
    there since, and fails.
    """
    *folders, name = target.parts
    here = os.open(target.root, FOLDER_FLAGS)
    try:
        for step in folders:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(step, dir_fd=here)
            below = os.open(step, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = below
        yield here, name
    finally:
        os.close(here)


def _status(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _keep_owner_and_mode(file: int, before: os.stat_result) -> None:
    with suppress(PermissionError):  # only root gives files away; a group one is no member of stays behind
        os.fchown(file, before.st_uid, before.st_gid)
    os.fchmod(file, stat.S_IMODE(before.st_mode))


def _list_entries(folder: int, limit: int) -> list[str]:
    """The names in a folder, sorted, folders with a slash and links with an at sign."""
    with os.scandir(folder) as found:
        marks = {entry.name: "@" if entry.is_symlink() else "/" if entry.is_dir() else "" for entry in found}
    names = [make_printable(name) + marks[name] for name in sorted(marks)[:limit]]
    return names if len(marks) <= limit else [*names, f"({len(marks) - limit:,} more)"]


def _list_entries_below(folder: int, name: str) -> list[str]:
    try:
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        return [f"({error.strerror})"]
    try:
        return _list_entries(inner, MAX_ENTRIES_BELOW)
    finally:
        os.close(inner)


def make_printable(name: str) -> str:
    """A file name that can be sent as UTF-8 and stays on its line."""
    text = os.fsencode(name).decode("utf-8", "replace")
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
