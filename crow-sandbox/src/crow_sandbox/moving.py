"""Moves files and sets permissions, one system call at a time, in open folders that are not reached over links."""

import ctypes
import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from errno import EEXIST, EINVAL, ELOOP, ENOSYS, ENOTDIR
from functools import cache
from typing import ParamSpec, TypeVar

import crow_system as system

from crow_sandbox.apply_journal import MarkedFile
from crow_sandbox.layer_files import FOLDER_FLAGS, list_marks, open_parent_at, read_status
from crow_sandbox.policy import SandboxError

PATH_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | FOLDER_FLAGS
UNLESS_GONE = suppress(FileNotFoundError, NotADirectoryError)
"""Ends a block without an error where a file, or its folder, is gone."""
NO_REPLACE = 1
"""RENAME_NOREPLACE of Linux's renameat2."""

P = ParamSpec("P")
T = TypeVar("T")


class Mover:
    """Makes every change to the file system through `call`, and keeps the last open folder for each use."""

    def __init__(self, before_step: Callable[[], object]) -> None:
        self.before_step = before_step
        self.opened: dict[str, tuple[bytes, bytes, int]] = {}
        self.path: tuple[bytes, bytes] = b"", b""
        """The root and the path at hand, for an error."""

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self.before_step()
        return function(*args, **kwargs)

    def open(self, use: str, base: bytes, path: bytes) -> tuple[int, bytes]:
        """Return the open folder of a path below `base`, and its last name. Raises OSError."""
        folder, _, name = path.rpartition(b"/")
        last_base, last_folder, descriptor = self.opened.get(use, (b"", b"", -1))
        if descriptor < 0 or folder != last_folder or base != last_base:
            opened = open_path(os.path.join(base, folder))
            if descriptor >= 0:
                os.close(descriptor)
            self.opened[use] = base, folder, opened
            return opened, name
        return descriptor, name

    def close(self) -> None:
        while self.opened:
            os.close(self.opened.popitem()[1][2])

    def to_error(self, error: Exception) -> SandboxError:
        if isinstance(error, SandboxError):
            return error
        path = os.fsdecode(os.path.join(*self.path))
        if isinstance(error, OSError) and error.errno in (ELOOP, ENOTDIR):
            return SandboxError(f"{path} cannot be changed, as a folder of its path is a link or a file now.")
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return SandboxError(f"{path} cannot be changed: {reason}.")

    def to_conflict(self) -> SandboxError:
        path = os.fsdecode(os.path.join(*self.path))
        return SandboxError(f"Somebody else has changed {path} meanwhile; nothing was applied.")

    def move(self, parent: int, name: bytes, target: int, target_name: bytes, mode: int) -> None:
        """Rename a file or folder of that mode to a name that is free. Raises FileExistsError."""
        status = os.stat(name, dir_fd=parent, follow_symlinks=False) if stat.S_ISDIR(mode) else None
        if status is None or is_writable(status):
            self.call(rename, parent, name, target, target_name)
            return
        self.call(chmod_folder, parent, name, stat.S_IMODE(status.st_mode) | 0o700)  # its `..` could not be changed
        self.call(rename, parent, name, target, target_name)
        self.call(chmod_folder, target, target_name, stat.S_IMODE(status.st_mode))

    def set_folder_mode(self, path: bytes, mode: int) -> None:
        """Set the permissions of a folder, if it is there and has others."""
        parent, name = self.open("mode", b"/", path.lstrip(b"/"))
        status = read_status(name, parent)
        if status and stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) != stat.S_IMODE(mode):
            self.call(chmod_folder, parent, name, stat.S_IMODE(mode))

    def set_mode(self, parent: int, name: str, mode: int) -> None:
        """Set the permissions of a file that is not a link, if it has others."""
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode) and stat.S_IMODE(status.st_mode) != stat.S_IMODE(mode):
            self.call(os.chmod, name, stat.S_IMODE(mode), dir_fd=parent)

    def remove(self, parent: int, path: bytes) -> None:
        with UNLESS_GONE, open_parent_at(parent, os.fsdecode(path)) as (holder, name):
            status = os.stat(name, dir_fd=holder, follow_symlinks=False)
            self.call(os.rmdir if stat.S_ISDIR(status.st_mode) else os.unlink, name, dir_fd=holder)

    def unlock(self, parent: int, name: bytes, marked: list[MarkedFile]) -> None:
        """Let the owner read and change files."""
        for file in marked:
            with UNLESS_GONE, open_parent_at(parent, os.fsdecode(name + file.path)) as (holder, last):
                status = os.stat(last, dir_fd=holder, follow_symlinks=False)
                if is_locked(status):
                    self.set_mode(holder, last, file.mode | 0o700)

    def set_marks(self, parent: int, name: bytes, marked: list[MarkedFile], *, present: bool) -> None:
        """Remove what overlayfs wrote about files, or write it again, and set the permissions that they had."""
        for file in reversed(marked):
            with UNLESS_GONE, open_parent_at(parent, os.fsdecode(name + file.path)) as (holder, last):
                path = f"/proc/self/fd/{holder}/{last}"
                found = list_marks(holder, last)
                if sys.platform == "linux":
                    for mark, value in file.marks:
                        if (mark in found) != present:
                            self.set_mode(holder, last, file.mode | 0o600)
                            if present:
                                self.call(os.setxattr, path, mark, value, follow_symlinks=False)
                            else:
                                self.call(os.removexattr, path, mark, follow_symlinks=False)
                self.set_mode(holder, last, file.mode)


def open_path(path: bytes) -> int:
    """Open a folder by its absolute path, which must not lead over links. Raises OSError."""
    descriptor = os.open("/", PATH_FLAGS)
    for name in filter(None, path.split(b"/")):
        try:
            below = os.open(name, PATH_FLAGS, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = below
    return descriptor


@cache
def load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def rename(parent: int, name: bytes, target: int, target_name: bytes) -> None:
    """Rename a file to a name that is free, in one step where the system can. Raises FileExistsError."""
    if hasattr(libc := load_libc(), "renameat2"):
        if not libc.renameat2(parent, name, target, target_name, NO_REPLACE):
            return
        number = ctypes.get_errno()
        if number not in (EINVAL, ENOSYS):
            raise OSError(number, os.strerror(number), os.fsdecode(name))
    if read_status(target_name, target) is not None:
        raise FileExistsError(EEXIST, os.strerror(EEXIST), os.fsdecode(target_name))
    os.rename(name, target_name, src_dir_fd=parent, dst_dir_fd=target)


def chmod_folder(parent: int, name: bytes, mode: int) -> None:
    """Set the permissions of a folder, but not of what a link names."""
    descriptor = os.open(name, PATH_FLAGS, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", mode)
    finally:
        os.close(descriptor)


def is_writable(status: os.stat_result) -> bool:
    """Tell if the owner of a folder may change what it holds; True for a folder of another owner."""
    return status.st_mode & 0o300 == 0o300 or status.st_uid != system.get_user()


def is_locked(status: os.stat_result) -> bool:
    """Tell if the owner may not read a file, or not list and search a folder."""
    wanted = 0o700 if stat.S_ISDIR(status.st_mode) else 0o400
    return not stat.S_ISLNK(status.st_mode) and status.st_mode & wanted != wanted
