"""The processes in which crow works. Each holds a file in crow's data, so a command can find one above itself."""

import fcntl
import os
import uuid
import weakref
from contextlib import suppress
from pathlib import Path


class RunningAgents:
    """The running processes that have made an app of the user's configuration."""

    def __init__(self, data: Path) -> None:
        self.folder = data / "agents"
        """Has a file for each, `PID-…`, which its process locks. A file that is not locked is of one that has died."""

    def add(self, owner: object) -> None:
        """Add this process, as long as `owner` lives. A folder that cannot be written is left alone."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.list_pids()  # removes the files of those that have died
            name = f"{os.getpid()}-{uuid.uuid4().hex}"
            file, new = self.folder / name, self.folder / f".{name}"
            descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            weakref.finalize(owner, remove, file, descriptor, os.getpid())
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(file)  # a file with this name is locked from its beginning

    def list_pids(self) -> set[int]:
        """List the processes by their ids, and remove the files of those that have died."""
        found: set[int] = set()
        with suppress(OSError):
            for file in self.folder.iterdir():
                pid = file.name.partition("-")[0]
                if pid.isdecimal() and holds_lock(file):
                    found.add(int(pid))
        return found


def holds_lock(file: Path) -> bool:
    """Test whether a process locks a file; remove the file if none does."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.unlink(missing_ok=True)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def remove(file: Path, descriptor: int, pid: int) -> None:
    """Remove the file of a process that ends; not in a process that it has forked."""
    if pid == os.getpid():
        with suppress(OSError):
            file.unlink(missing_ok=True)
            os.close(descriptor)
