"""Files that another program may hold open, which on Windows keeps everyone from replacing them."""

import os
import time
from errno import EACCES

HELD = (5, 32, 33)
"""Errors of Windows for a file that another program has open: access denied, sharing violation, lock violation."""
HELD_TIMEOUT = 0.5
"""Seconds to wait for the other program: a search for viruses, an index, a backup."""
HELD_INTERVAL = 0.02
"""Seconds between two attempts. Only Windows makes a second one; no other system refuses to replace an open file."""


def replace_file(new: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Rename a file over another one, in one step.

    Raises OSError; its `strerror` says so if another program holds one of the files after HELD_TIMEOUT.
    """
    end = time.monotonic() + HELD_TIMEOUT
    while True:
        try:
            os.replace(new, file)
            return
        except PermissionError as error:
            if getattr(error, "winerror", None) not in HELD:
                raise
            if time.monotonic() > end:
                raise PermissionError(EACCES, "another program has it open", os.fspath(file)) from error
        time.sleep(HELD_INTERVAL)
