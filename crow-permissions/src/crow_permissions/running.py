"""The processes in which crow works, and whether this process is below one of them.

Each holds a file in crow's data, so a command can find one above itself.
"""

import os
import uuid
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import crow_system as system
from crow_core.mcp.watchdog import MARK
from crow_system.files import make_private_folder

COMMAND_MARK = "CROW_COMMAND"
"""The variable that crow_mcp_server.terminal sets for each command."""
MARKS = (COMMAND_MARK, MARK)


class RunningAgents:
    """The running processes that have made an app of the user's configuration."""

    def __init__(self, data: Path) -> None:
        self.folder = data / "agents"
        """Has a file for each, `PID-…`, which its process locks. A file that is not locked is of one that has died."""

    def add(self, owner: object) -> None:
        """Add this process, as long as `owner` lives. A folder that cannot be written is left alone."""
        with suppress(OSError):
            make_private_folder(self.folder.parent)
            self.folder.mkdir(exist_ok=True, mode=0o700)
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


def find_sign_of_crow(data: Path) -> str:
    """Find the sign that crow has started this process, as a text that completes a sentence; "" if there is none.

    This process itself may be one in which crow works: then a program of the user's own asks.
    """
    for name in MARKS:
        if name in os.environ:
            return f"{name} is in its environment"
    agents, above = RunningAgents(data).list_pids(), list_above()
    if found := sorted(above & agents):
        return f"it runs below process {found[0]}, in which crow works"
    if marked := sorted(pid for pid in above if system.has_variable(pid, MARKS)):
        return f"it runs below process {marked[0]}, which crow has started"
    return ""


def find_unknown_origin(data: Path) -> str:
    """Find out why it cannot be known who has started this process, as a sentence; "" if crow has not started it.

    A process that has left its parents is below none of them. A process with a terminal is the user's. So is one with a
    parent that is older than each process in which crow works, as cron or an SSH server is.
    """
    agents = RunningAgents(data).list_pids() - {os.getpid()}
    if not agents or has_terminal():
        return ""
    started = [read_start(pid) for pid in agents]
    if any(is_parent(pid) and read_start(pid) < min(started) for pid in list_above()):
        return ""
    return f"it has no terminal, and crow works in process {min(agents)}"


def is_parent(pid: int) -> bool:
    """Test whether a process starts others, and does not only take over those that have left their parents."""
    return pid > 1 and system.read_name(pid) not in ("systemd", "init", "launchd")


def read_start(pid: int) -> float:
    """Read when a process has started, on a clock that all processes share; infinity if it is not known."""
    return float(system.read_start_time(pid) or "inf")


def list_above() -> set[int]:
    """List the processes above this one, and above those that lead its group and its session."""
    starts = {os.getpid(), *system.get_groups()}
    return {pid for start in starts for pid in list_with_parents(start)} - {os.getpid()}


def list_with_parents(pid: int) -> Iterator[int]:
    """Yield a process and those above it."""
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        seen.add(pid)
        yield pid
        pid = system.read_parent(pid)


def has_terminal() -> bool:
    """Test whether this process has a controlling terminal."""
    try:
        os.close(system.open_terminal())
    except OSError:
        return False
    return True


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
