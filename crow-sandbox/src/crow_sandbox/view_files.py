"""Files of a layer and of its root as they are at a moment, and copies of them that follow no links."""

import os
import stat
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from errno import ELOOP, ENOENT, ENOTDIR
from typing import TypeAlias

from crow_sandbox.changes import is_whiteout
from crow_sandbox.layer_files import (
    OVERLAY,
    open_file,
    open_layer_file,
    open_parent_at,
    read_attributes,
    read_status,
)

Mark: TypeAlias = tuple[int, int, int, int, int]
"""Inode, mode, size, and the times of the last change to content and to anything. A file with equal ones is the same.
Only inode and mode of a folder count."""
GONE: Mark = (0, 0, 0, 0, 0)
"""The mark of a file by which the kernel notes in a layer that one is removed."""
MOVED = (ENOENT, ENOTDIR, ELOOP)
"""The numbers of errors about files that a program has moved or replaced meanwhile."""
SETTLING_NS = 20_000_000
"""Two changes to a file in this time may have the same time, as the clock of file systems ticks."""
CHUNK = 1 << 20
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def to_mark(status: os.stat_result) -> Mark:
    if stat.S_ISDIR(status.st_mode):
        return status.st_ino, status.st_mode, 0, 0, 0
    return status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def find_status(base: int, path: str) -> os.stat_result | None:
    """Return the status of a path below an open folder; None if there is none, or a link on the way."""
    with suppress(OSError), open_parent_at(base, path) as (parent, name):
        return read_status(name, parent)
    return None


def read_mark(base: int, path: str) -> Mark | None:
    """Return the mark of a path below an open folder of a root; None if there is none."""
    status = find_status(base, path)
    return to_mark(status) if status else None


def read_layer_mark(base: int, path: str) -> Mark | None:
    """Return the mark of a path below the open folder of a layer; None if the layer says nothing of it."""
    with suppress(OSError), open_parent_at(base, path) as (parent, name):
        if (status := read_status(name, parent)) is not None:
            return GONE if is_whiteout(status, read_attributes(parent, name)) else to_mark(status)
    return None


def copy_entry(
    source: int, target: int, name: str, status: os.stat_result, new_name: str = "", *, in_layer: bool = True
) -> Mark:
    """Copy a file or link that a program may change meanwhile, from a layer or a root; return its mark.

    Anything but a file or a link becomes a pipe, which is never applied. The last number of the mark is 0 if the file
    was changed just now, so that it equals no later one. Raises OSError.
    """
    new_name, mark = new_name or name, to_mark(status)
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), new_name, dir_fd=target)
    elif stat.S_ISREG(status.st_mode):
        mark = copy_file(source, target, name, new_name, in_layer=in_layer)
        if in_layer and "origin" in (marks := read_attributes(source, name)):
            set_attribute(target, new_name, "origin", marks["origin"] or b"y")
        os.chmod(new_name, stat.S_IMODE(status.st_mode), dir_fd=target)
    elif sys.platform != "win32":
        os.mkfifo(new_name, 0o600, dir_fd=target)
    return mark


def copy_file(source: int, target: int, name: str, new_name: str, *, in_layer: bool) -> Mark:
    """Copy the content and times of a file as it is now."""
    with open_layer_file(name, source) if in_layer else open_file(name, source) as old:
        status = os.fstat(old)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(ELOOP, os.strerror(ELOOP), name)
        if is_settling(status):
            time.sleep(SETTLING_NS / 1e9)  # a later write would leave the same times
            status = os.fstat(old)
        new = os.open(new_name, NEW_FILE, 0o600, dir_fd=target)
        try:
            copy_bytes(old, new, status.st_size)
            os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(new)
    mark = to_mark(status)
    return (*mark[:4], 0) if is_settling(status) else mark


def is_settling(status: os.stat_result) -> bool:
    """Test whether another change to a file may have the same time."""
    return time.time_ns() - status.st_ctime_ns < SETTLING_NS


def copy_bytes(old: int, new: int, size: int) -> None:
    """Copy the first bytes of a file, without a copy on the disk where the file system can."""
    if sys.platform == "linux":
        with suppress(OSError):  # not between these file systems: bytes are read and written then
            while size > 0 and (done := os.copy_file_range(old, new, min(size, 1 << 30))):
                size -= done
    while size > 0 and (data := os.read(old, min(size, CHUNK))):
        size -= len(data)
        while data:
            data = data[os.write(new, data) :]


def set_attribute(parent: int, name: str, attribute: str, value: bytes) -> None:
    """Write an attribute as overlayfs does."""
    if sys.platform == "linux":
        os.setxattr(f"/proc/self/fd/{parent}/{name}", OVERLAY + attribute, value, follow_symlinks=False)


def make_whiteout(parent: int, name: str) -> None:
    """Make a file that marks a removed one."""
    os.close(os.open(name, NEW_FILE, 0o600, dir_fd=parent))
    set_attribute(parent, name, "whiteout", b"y")


def make_folder(parent: int, name: str, mode: int) -> None:
    """Make a folder with these permissions, whatever the mask of this process."""
    os.mkdir(name, 0o700, dir_fd=parent)
    os.chmod(name, mode, dir_fd=parent)


@contextmanager
def make_parents(base: int, path: str, like: int) -> Generator[tuple[int, str], None, None]:
    """Open the folder of a path below `base`, and give the last name; make folders as below `like` that are not there.

    Raises OSError.
    """
    *folders, _ = path.split("/")
    for depth in range(1, len(folders) + 1):
        below = "/".join(folders[:depth])
        with open_parent_at(base, below) as (parent, name):
            if read_status(name, parent) is None:
                status = find_status(like, below)
                make_folder(parent, name, stat.S_IMODE(status.st_mode) if status else 0o755)
    with open_parent_at(base, path) as found:
        yield found
