"""Access to files below the roots of a workspace, safe against links that are created between check and use."""

import errno
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import PurePath

from crow_system import Folder, keep_owner, walk

from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.workspace import Workspace

MAX_FILE_BYTES = 10 * 1024 * 1024  # of a file that is read
MAX_ENTRIES = 400  # of a folder listing
MAX_ENTRIES_BELOW = 50  # of each folder in it
MAX_SUGGESTIONS = 3  # paths in place of one that does not exist
MAX_SEARCHED_ENTRIES = 20_000  # files and folders, for such suggestions
MIN_SIMILARITY = 65.0  # of 100, between two names
SKIPPED_FOLDERS = {"node_modules", "__pycache__"}  # named in a listing but not listed; so are hidden folders


@dataclass(frozen=True)
class ResolvedPath:
    """A path below one of the roots."""

    path: str
    """The absolute path, without symbolic links."""
    root: str
    """The root that contains it, without symbolic links."""
    as_given: str
    """The path below the root as the workspace names that root; hosts know files by this path."""

    @property
    def parts(self) -> list[str]:
        """The names on the way from the root to the path; `["."]` for the root itself."""
        return os.path.relpath(self.path, self.root).split(os.sep)


@dataclass(frozen=True)
class FileContent:
    """The content of a file."""

    data: bytes
    stamp: tuple[int, ...] | None
    """Device, inode, size and modification time; differs after the file has changed. None if it is not on the disk."""


def resolve_path(path: str, workspace: Workspace) -> ResolvedPath:
    """Resolve a path that the model gave. Raises ToolRefusal when it leads outside of all roots."""
    try:
        resolved = os.path.realpath(os.path.join(workspace.cwd, os.path.expanduser(path)))
    except ValueError:  # a NUL, which Windows lets pass, or half a surrogate pair
        resolved = ""
    if not path.strip() or "\0" in path or not resolved:
        raise ToolRefusal(f"{path!r} is not a path. Give one that is absolute or relative to {workspace.cwd}.")
    if workspace.path and resolved != workspace.path:
        raise ToolRefusal(
            f"{path} led to {workspace.path} when this was allowed, and leads elsewhere now. Nothing was done. "
            "Try again if it is still right."
        )
    for given in (*workspace.roots, *workspace.readable):
        root = os.path.realpath(given)
        if PurePath(resolved).is_relative_to(root):
            named = os.path.normpath(os.path.join(given, os.path.relpath(resolved, root)))
            return ResolvedPath(resolved, root, named)
    raise ToolRefusal(
        f"{path} leads to {resolved}, outside of the folders open to this tool: {', '.join(workspace.roots)}. "
        "Use a path inside one of them."
    )


def read_file(target: ResolvedPath) -> FileContent | None:
    """Read a file; return None when it does not exist.

    Raises IsADirectoryError for a folder, and ToolRefusal for a device, pipe or socket and for a file of more than
    MAX_FILE_BYTES.
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
    """Open a file for reading and return its descriptor.

    Raises IsADirectoryError for a folder, and ToolRefusal for a device, pipe or socket.
    """
    with _open_parent(target) as (folder, name):
        opened = folder.open_file(name)
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


def open_folder(target: ResolvedPath) -> Folder:
    """Open a folder for listing. Raises NotADirectoryError for anything else."""
    with _open_parent(target) as (above, name):
        return above.open_folder(name, to_list=True)


def write_file(target: ResolvedPath, data: bytes, stamp: tuple[int, ...] | None) -> None:
    """Replace the whole file atomically, keeping its mode; create the folders above it.

    `stamp` is the one that `read_file` returned, None if the file did not exist. Raises ToolRefusal when the file has
    changed since, or is read-only.
    """
    with _open_parent(target, make=True) as (folder, name):
        before = _status(folder, name)
        if (before and _stamp(before)) != stamp:
            raise ToolRefusal(f"{target.path} changed at this very moment. View it again, then repeat the edit.")
        if before and not folder.is_writable(name):
            raise ToolRefusal(
                f"{target.path} is read-only. If it should be edited, make it writable first (chmod u+w)."
            )
        temporary = f".{secrets.token_hex(8)}.tmp"
        opened = folder.create_file(temporary)
        try:
            with open(opened, "wb") as file:
                file.write(data)
                if before:
                    keep_owner(opened, before)
            folder.replace(temporary, name)
        except BaseException:
            folder.remove(temporary)
            raise


@contextmanager
def create_parents(target: ResolvedPath) -> Generator[None]:
    """Context manager: create the folders above a file, and remove those created when the block fails."""
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
        with suppress(OSError):  # they are no longer empty
            for folder in made:
                os.rmdir(folder)
        raise


def remove_file(target: ResolvedPath) -> None:
    with _open_parent(target) as (folder, name):
        folder.remove(name)


def list_folder(target: ResolvedPath) -> list[str]:
    """Return the sorted entries of a folder and of the folders in it, one line each, at most about MAX_ENTRIES."""
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
        folder.close()


def suggest_paths(target: ResolvedPath) -> list[str]:
    """Return up to MAX_SUGGESTIONS paths that may be meant by one that does not exist.

    These are similar names in its folder, and files and folders of its name elsewhere below its root. Hidden folders
    are not searched, nor more than MAX_SEARCHED_ENTRIES entries.
    """
    from rapidfuzz import fuzz, process  # not at the top: only needed here

    *folders, name = target.parts
    names: list[str] = []
    with suppress(OSError):
        names = [os.fsdecode(each) for each in list_names(replace(target, path=os.path.dirname(target.path)))]
    near = process.extract(name, names, scorer=fuzz.ratio, processor=str.lower, limit=2, score_cutoff=MIN_SIMILARITY)
    beside = [os.path.join(*folders, each) for each, _, _ in near]
    elsewhere = sorted(_find_named(target), key=lambda path: -_count_equal_ends(path.split(os.sep), target.parts))
    paths = list(dict.fromkeys([*beside, *elsewhere]))[:MAX_SUGGESTIONS]
    return [make_printable(os.path.join(target.root, path)) for path in paths]


def _find_named(target: ResolvedPath) -> list[str]:
    """Return the relative paths of the files and folders below the root that have the name of a path."""
    found, searched, name = list[str](), 0, target.parts[-1]
    if target.root == os.sep:
        return found
    for here, folders, files in walk(target.root):  # follows no links
        if name in folders or name in files:
            found.append(os.path.relpath(os.path.join(here, name), target.root))
        searched += len(folders) + len(files)
        if searched > MAX_SEARCHED_ENTRIES:
            break
        folders[:] = sorted(each for each in folders if not each.startswith(".") and each not in SKIPPED_FOLDERS)
    return found


def _count_equal_ends(one: list[str], other: list[str]) -> int:
    """Return the number of equal items at the ends of two lists."""
    return next((at for at, (a, b) in enumerate(zip(one[::-1], other[::-1], strict=False)) if a != b), len(one))


def list_names(target: ResolvedPath) -> list[bytes]:
    """Return the sorted names in a folder."""
    folder = open_folder(target)
    try:
        return sorted(os.fsencode(name) for name in folder.list_entries())
    finally:
        folder.close()


@contextmanager
def _open_parent(target: ResolvedPath, *, make: bool = False) -> Generator[tuple[Folder, str]]:
    """Context manager: open the folder that contains a file; the value is the folder and the file's name.

    It opens each folder on the way from the root without following links. `resolve_path` has resolved all links, so a
    link found now was created since; opening it raises OSError.
    """
    *folders, name = target.parts
    here = Folder(target.root)
    try:
        if os.path.realpath(here.start) != target.root:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), target.root)
        for step in folders:
            if make:
                with suppress(FileExistsError):
                    here.create_folder(step)
            below = here.open_folder(step)
            here.close()
            here = below
        yield here, name
    finally:
        here.close()


def _status(folder: Folder, name: str) -> os.stat_result | None:
    try:
        return folder.read_status(name)
    except FileNotFoundError:
        return None


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _list_entries(folder: Folder, limit: int) -> list[str]:
    """Return the sorted names in a folder; folders end with a slash and links with an at sign."""
    marks = folder.list_entries()
    names = [make_printable(name) + marks[name] for name in sorted(marks)[:limit]]
    return names if len(marks) <= limit else [*names, f"({len(marks) - limit:,} more)"]


def _list_entries_below(folder: Folder, name: str) -> list[str]:
    try:
        inner = folder.open_folder(name, to_list=True)
    except OSError as error:
        return [f"({error.strerror})"]
    try:
        return _list_entries(inner, MAX_ENTRIES_BELOW)
    finally:
        inner.close()


def make_printable(name: str) -> str:
    """Replace the bytes that are not UTF-8 and the unprintable characters of a file name."""
    text = os.fsencode(name).decode("utf-8", "replace")
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
