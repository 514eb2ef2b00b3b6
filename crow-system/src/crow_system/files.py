"""Files in a folder that somebody else may control: no link leads out of it, and no pipe is waited for."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

import crow_system as system


class UnusableFile(Exception):
    """A file cannot be used. The text is the end of a sentence that begins with the file's path."""


def open_file(path: Path, root: Path | None = None) -> BinaryIO:
    """Open a file without waiting for one that is a pipe.

    Raises UnusableFile, also if it is no regular file or if links lead the path out of `root`.
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
