"""The processes of a command, found by psutil; without /proc.

Run as a program, this is the watchdog of all commands of a server: see `make_watchdog_command`. It imports no other
module of crow.
"""

import os
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress

KEPT_VARIABLES = ("PATH", "SYSTEMROOT")
"""The environment of a watchdog, which must not carry a mark itself."""


def make_watchdog_command(*folders: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a watchdog for all commands of a server.

    It reads lines `start GROUP:MARK` and `end GROUP:MARK` until its input closes. Then it kills the process groups that
    have started and not ended, and the processes with their marks, and removes the folders in its arguments.
    """
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return [sys.executable, "-I", __file__, *folders], kept


def list_members(group: int, mark: str) -> list[int]:
    """Return the ids of the living processes of a group and of its session, of those below its first process, and of
    those that left all these but have the mark in their environment. macOS hides that of its own programs."""
    import psutil  # loaded when the first command has started

    below: set[int] = set()
    with suppress(psutil.Error):
        below = {group, *(each.pid for each in psutil.Process(group).children(recursive=True))} if group > 0 else below
    found: list[int] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                continue
            if process.pid in below or is_in_group(process.pid, group) or has_mark(process.environ(), mark):
                found.append(process.pid)
    return found


def has_mark(environment: dict[str, str], mark: str) -> bool:
    """Whether an environment has a mark in one of its variables."""
    return any(mark in value for value in environment.values())


def is_in_group(pid: int, group: int) -> bool:
    """Whether a process is in a process group, or in the session of the same id; on Windows there are none."""
    if sys.platform == "win32" or group <= 0:
        return False
    with suppress(OSError):
        return group in (os.getpgid(pid), os.getsid(pid))
    return False


def count_processes() -> int | None:
    """Return None: macOS limits the number of processes by itself, and Windows has no such limit."""
    return None


def watch(lines: Iterable[str]) -> None:
    """Read which commands start and end, then kill those that have not ended."""
    import psutil

    running: dict[str, None] = {}
    for line in lines:
        what, _, one = line.strip().partition(" ")
        running.pop(one, None)
        if what == "start":
            running[one] = None
    for one in running:
        group, _, mark = one.partition(":")
        for _ in range(9):
            members = list_members(int(group or -1), mark)
            for pid in members:
                with suppress(psutil.Error):
                    psutil.Process(pid).kill()
            if not members:
                break


if __name__ == "__main__":
    try:
        watch(sys.stdin)
    finally:
        for folder in sys.argv[1:]:
            shutil.rmtree(folder, ignore_errors=True)
