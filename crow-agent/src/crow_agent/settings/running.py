"""The processes in which crow works. Each holds a file in crow's data, so a command can find one above itself."""

import os
import uuid
import weakref
from contextlib import suppress
from pathlib import Path

import crow_system as system


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
            file = self.folder / f"{os.getpid()}-{uuid.uuid4().hex}"
            descriptor = system.create_locked(file)
            weakref.finalize(owner, remove, file, descriptor, os.getpid())

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
        descriptor = os.open(file, os.O_RDWR | system.NO_LINKS)
    except OSError:
        return False
    try:
        system.lock(descriptor, wait=False)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    file.unlink(missing_ok=True)  # not before: Windows removes no open file
    return False


def remove(file: Path, descriptor: int, pid: int) -> None:
    """Remove the file of a process that ends; not in a process that it has forked."""
    if pid == os.getpid():
        with suppress(OSError):
            os.close(descriptor)
            file.unlink(missing_ok=True)
