"""Files in a folder that somebody else may control: no link leads out of it, and no pipe is waited for."""

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import crow_system as system


class UnusableFile(Exception):
    """A file cannot be used. The text is the end of a sentence that begins with the file's path."""


def open_file(path: Path, root: Path | None = None) -> BinaryIO:
    """Open a file without waiting for one that is a pipe.

    Raises UnusableFile, also if it is not a regular file or if links lead the path out of `root`.
    """
    try:
        real = path.resolve(strict=True)
        if root and not real.is_relative_to(root.resolve()):
            raise UnusableFile(f"leads out of {root}")
        opened = os.open(real, os.O_RDONLY | system.NO_WAIT | system.NO_LINKS)
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise UnusableFile("is not a file")
        return open(opened, "rb")
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links; ValueError: a NUL character
        raise UnusableFile(f"cannot be read ({getattr(error, 'strerror', None) or error})") from error


def is_inside(path: Path, root: Path) -> bool:
    """Test whether a path exists and no link leads it out of a folder."""
    try:
        return path.resolve(strict=True).is_relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError):
        return False


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for their owner alone. Raises OSError.

    `Path.mkdir` gives the mode to the last folder only.
    """
    for each in reversed([folder, *folder.parents]):
        if each == folder or not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def lock_folder(folder: Path) -> Generator[None]:
    """Lock a folder, so that only one process at a time changes the files in it."""
    make_private_folder(folder)
    descriptor = system.open_folder_lock(folder)
    try:
        system.lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file that only its owner may read, or leave the old one as it was. Raises OSError."""
    new = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | system.NO_LINKS, 0o600)
        with open(descriptor, "wb") as writing:
            system.set_mode(descriptor, 0o600)
            writing.write(content)
            writing.flush()
            os.fsync(descriptor)
        system.replace_file(new, file)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
