"""Folders that are named by their path, for systems where a folder cannot be opened. A test run can use it anywhere."""

import errno
import os
import stat
from collections.abc import Iterator
from typing import TypeAlias

from crow_system.held import replace_file

NAME_SURROGATE = 0x20000000
"""The bit in the tag of a reparse point that stands for another path: a link or a junction."""
BINARY = int(getattr(os, "O_BINARY", 0))


class PathFolder:
    """A folder that is checked at each use: a link must not have replaced it."""

    def __init__(self, path: str) -> None:
        """Name a folder by its path, which may lead through links. Raises OSError."""
        if not os.path.isdir(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self.path = path
        self.start = path

    def open_folder(self, name: str, *, to_list: bool = False) -> "PathFolder":
        path = self._check(name)
        if not os.path.isdir(path):
            code = errno.ENOTDIR if os.path.exists(path) else errno.ENOENT
            raise OSError(code, os.strerror(code), path)
        return PathFolder(path)

    def open_file(self, name: str) -> int:
        path = self._check(name)
        if os.path.isdir(path):  # Windows says that this is not permitted
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return os.open(path, os.O_RDONLY | BINARY | int(getattr(os, "O_NONBLOCK", 0)))

    def create_file(self, name: str) -> int:
        return os.open(self._join(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666)

    def create_folder(self, name: str) -> None:
        os.mkdir(self._join(name))

    def read_status(self, name: str) -> os.stat_result:
        return os.lstat(self._join(name))

    def is_writable(self, name: str) -> bool:
        return os.access(self._join(name), os.W_OK)

    def replace(self, old: str, new: str) -> None:
        replace_file(self._join(old), self._join(new))

    def remove(self, name: str) -> None:
        os.unlink(self._join(name))

    def list_entries(self) -> dict[str, str]:
        with os.scandir(self._join(".")) as found:
            return {entry.name: "@" if is_link(entry.path) else "/" if entry.is_dir() else "" for entry in found}

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _join(self, name: str) -> str:
        """Return the path of a name, if the folder itself is still the one that was meant. Raises OSError."""
        if os.path.realpath(self.path) != self.path:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self.path)
        return os.path.normpath(os.path.join(self.path, name))

    def _check(self, name: str) -> str:
        """Return the path of a name that is not a link. Raises OSError."""
        path = self._join(name)
        if is_link(path):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        return path


Folder: TypeAlias = PathFolder


def is_link(path: str) -> bool:
    """True if a path is a symbolic link or a junction."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISLNK(status.st_mode) or bool(int(getattr(status, "st_reparse_tag", 0)) & NAME_SURROGATE)


def walk(root: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each folder below a root with the names of its folders, which may be changed, and of its files."""
    return os.walk(root)
