"""Files and folders of a root or a layer, opened without following links, and what overlayfs wrote about them."""

import os
import stat
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from errno import ENAMETOOLONG

from crow_sandbox.policy import SandboxError

FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
FILE_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
DEPTH_LIMIT = 250
"""The greatest depth of folders in one that is new or gone: the time to read them grows with the square of it."""
OVERLAY = "user.overlay."
"""The prefixes of the extended attributes that overlayfs writes in a user namespace."""


def read_status(name: str | bytes, parent: int) -> os.stat_result | None:
    """Return the status of a file or link; None if there is none."""
    with suppress(FileNotFoundError):
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    return None


def read_attributes(parent: int, name: str) -> dict[str, bytes]:
    """Read what overlayfs wrote about a file, by the names without their beginning.

    Raises SandboxError for a file if the kernel kept only a part of it, or a former name, here.
    """
    found = {
        mark.removeprefix(OVERLAY): read_attribute(parent, name, mark) if mark.endswith("opaque") else b""
        for mark in list_marks(parent, name)
    }
    if parts := {"metacopy", "redirect"} & found.keys():
        raise SandboxError(f"What the command changed cannot be read: {name} is marked as {parts.pop()} by the kernel.")
    return found


def list_marks(parent: int, path: str) -> list[str]:
    """List the attributes that overlayfs wrote about a file."""
    if sys.platform != "linux":
        return []
    found = os.listxattr(f"/proc/self/fd/{parent}/{path}", follow_symlinks=False)
    return [attribute for attribute in found if attribute.startswith(OVERLAY)]


def read_attribute(parent: int, name: str, attribute: str) -> bytes:
    """Read an attribute, also of a file of a layer whose permissions forbid that."""
    if sys.platform != "linux":
        return b""
    path = f"/proc/self/fd/{parent}/{name}"
    try:
        return os.getxattr(path, attribute, follow_symlinks=False)
    except PermissionError:
        with unlocked(parent, name):
            return os.getxattr(path, attribute, follow_symlinks=False)


def walk(parent: int, name: str, *, in_layer: bool = False) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the file or folder and all below it, with the paths from it, without following links.

    A folder `in_layer` is read also if its permissions forbid that.
    """
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    yield "", status
    if not stat.S_ISDIR(status.st_mode):
        return
    for found, entry in walk_entries(parent, name, in_layer=in_layer):
        yield found, entry.stat(follow_symlinks=False)


def walk_files(parent: int, name: str, *, in_layer: bool) -> Iterator[str]:
    """Yield the path of every file in a folder as `walk` does, but without its status; for a file, an empty one."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        yield ""
        return
    for found, entry in walk_entries(parent, name, in_layer=in_layer):
        if not entry.is_dir(follow_symlinks=False):
            yield found


def walk_entries(parent: int, name: str, *, in_layer: bool) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield what is in a folder and in those below it. Raises OSError, also where they are deeper than DEPTH_LIMIT."""
    folders = [""]
    while folders:
        below = folders.pop()
        with ExitStack() as stack:
            holder, last = stack.enter_context(open_parent_at(parent, name + below))
            try:
                opened = open_layer_folder(last, holder) if in_layer else open_folder(last, holder)
                folder = stack.enter_context(opened)
            except PermissionError:  # a real folder that this user may not read
                continue
            for entry in stack.enter_context(os.scandir(folder)):
                found = f"{below}/{entry.name}"
                if found.count("/") > DEPTH_LIMIT:
                    raise OSError(ENAMETOOLONG, f"its folders are more than {DEPTH_LIMIT} deep", name)
                yield found, entry
                if entry.is_dir(follow_symlinks=False):
                    folders.append(found)


@contextmanager
def open_folder(path: str, parent: int | None = None) -> Generator[int, None, None]:
    """Open a folder that is not a link."""
    descriptor = os.open(path, FOLDER_FLAGS, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_in_layer(path: str, flags: int, parent: int) -> int:
    """Open a file or folder of a layer, also if its permissions forbid that."""
    try:
        return os.open(path, flags, dir_fd=parent)
    except PermissionError:
        with unlocked(parent, path):
            return os.open(path, flags, dir_fd=parent)


@contextmanager
def open_layer_folder(path: str, parent: int) -> Generator[int, None, None]:
    """Open a folder of a layer, also if its permissions forbid that."""
    descriptor = open_in_layer(path, FOLDER_FLAGS, parent)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o700 == 0o700:
            yield descriptor
        else:
            with unlocked(parent, path):
                yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def unlocked(parent: int, name: str) -> Generator[None, None, None]:
    """Let the owner read and change a file of a layer meanwhile."""
    mode = stat.S_IMODE(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    os.chmod(name, mode | 0o700, dir_fd=parent)
    try:
        yield
    finally:
        os.chmod(name, mode, dir_fd=parent)


@contextmanager
def open_layer_file(path: str, parent: int) -> Generator[int, None, None]:
    """Open a file of a layer, also if its permissions forbid that."""
    descriptor = open_in_layer(path, FILE_FLAGS, parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_file(path: str, parent: int) -> Generator[int, None, None]:
    """Open a file that is not a link, to read it."""
    descriptor = os.open(path, FILE_FLAGS, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_parent(base: str, path: str) -> Generator[tuple[int, str], None, None]:
    """Open the folder of a path below `base`, and give the last name. A link on the way is not followed."""
    with open_folder(base) as descriptor, open_parent_at(descriptor, path) as found:
        yield found


@contextmanager
def open_parent_at(base: int, path: str) -> Generator[tuple[int, str], None, None]:
    *folders, name = path.split("/")
    descriptor = os.dup(base)
    try:
        for folder in folders:
            below = os.open(folder, FOLDER_FLAGS, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor, name
    finally:
        os.close(descriptor)
