"""The processes that a command has started, directly or not, found by psutil; without /proc.

Run as a program, this is a watchdog: see `watchdog.start_watchdog`. It imports no other module of crow.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import TypeAlias

Process: TypeAlias = tuple[int, str]
"""A process id and the time of the process's start, which tells it from a later process with the same id."""

KILL_TIMEOUT = 2.0
"""Seconds to wait for the end of processes that were killed."""
KEPT_VARIABLES = ("PATH", "SYSTEMROOT")
"""The environment of a watchdog, which must not carry a mark itself."""


def make_child_setup() -> Callable[[], None] | None:
    """Return what a new process calls before its program runs: nothing, as orphans go to the system's first process."""
    return None


def find_descendants(*roots: int, with_roots: bool = False) -> set[Process]:
    """Find the living processes below these process ids; and these, if wanted."""
    import psutil  # loaded when the first process has to be ended

    found: set[Process] = set()
    for root in roots:
        with suppress(psutil.Error):
            process = psutil.Process(root)
            tree = [*process.children(recursive=True), *([process] if with_roots else [])]
            found |= {(each.pid, started) for each in tree if (started := read_start_time(each.pid))}
    return found


def read_start_time(pid: int) -> str | None:
    """Return the start time of a process; None if it has ended, "" where the system does not tell."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else repr(process.create_time())
    except psutil.NoSuchProcess:
        return None
    except psutil.Error:
        return ""


def read_parent(pid: int) -> int:
    """Return the id of a process's parent; 0 if it has ended."""
    import psutil

    with suppress(psutil.Error):
        return psutil.Process(pid).ppid()
    return 0


def read_name(pid: int) -> str:
    """Return the name of a process's program; "" if it has ended."""
    import psutil

    with suppress(psutil.Error):
        return psutil.Process(pid).name()
    return ""


def has_variable(pid: int, names: Collection[str]) -> bool:
    """Test whether a process was started with one of these variables; False where its environment cannot be read."""
    import psutil

    with suppress(psutil.Error, OSError):
        return not psutil.Process(pid).environ().keys().isdisjoint(names)
    return False


def kill_all(processes: set[Process]) -> None:
    """Kill these processes and what is below them, unless they have ended. First stop them: they can start no more."""
    import psutil

    stopped: set[Process] = set()
    while new := {each for each in processes - stopped if read_start_time(each[0]) == each[1]}:
        for pid, _ in new:
            with suppress(psutil.Error):
                psutil.Process(pid).suspend()
        stopped |= new
        processes = find_descendants(*(pid for pid, _ in stopped))
    for pid, _ in stopped:
        with suppress(psutil.Error):
            psutil.Process(pid).kill()


def list_members(group: int, mark: str) -> list[int]:
    """Return the ids of the living processes of a group and its session, and of those below its first process. Add
    those that left all these but have the mark in their environment. macOS hides the environment of its own
    programs."""
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
    """True if an environment has a mark in one of its variables."""
    return any(mark in value for value in environment.values())


def is_in_group(pid: int, group: int) -> bool:
    """True if a process is in a process group, or in the session of the same id; on Windows there are none."""
    if sys.platform == "win32" or group <= 0:
        return False
    with suppress(OSError):
        return group in (os.getpgid(pid), os.getsid(pid))
    return False


def count_processes() -> int | None:
    """Return None: macOS limits the number of processes by itself, and Windows has no such limit."""
    return None


def make_watchdog_command(grace: float, *folders: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a watchdog: see `watchdog.start_watchdog`."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return [sys.executable, "-I", __file__, str(grace), *folders], kept


def watch(lines: Iterable[str], grace: float) -> None:
    """Read which commands start and end, then kill those that have not ended."""
    import psutil

    running: dict[str, None] = {}
    for line in lines:
        what, _, one = line.strip().partition(" ")
        if what == "now":
            break
        running.pop(one, None)
        if what == "start":
            running[one] = None
    else:
        time.sleep(grace)
    for one in running:
        group, _, mark = one.partition(":")
        for _ in range(9):
            killed: list[psutil.Process] = []
            for pid in list_members(int(group or -1), mark):
                with suppress(psutil.Error):
                    killed.append(psutil.Process(pid))
                    killed[-1].kill()
            if not killed:
                break
            psutil.wait_procs(killed, KILL_TIMEOUT)


if __name__ == "__main__":
    try:
        watch(sys.stdin, float(sys.argv[1]))
    finally:
        for folder in sys.argv[2:]:
            shutil.rmtree(folder, ignore_errors=True)
