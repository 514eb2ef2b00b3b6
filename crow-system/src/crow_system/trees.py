"""The processes that a command has started, directly or not, found by psutil; without /proc.

Run as a program, this is the watchdog of one command: see `make_sweep_command`. It imports no other module of crow.
"""

import os
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TypeAlias

Process: TypeAlias = tuple[int, str]
"""A process id and the time of the process's start, which tells it from a later process with the same id."""

KILL_TIMEOUT = 2.0
"""Seconds to wait for the end of processes that were killed."""
ORPHAN_GRACE = 2.0
"""Seconds in which a command may end by itself after crow has died."""
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


def make_sweep_command(mark: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a watchdog for the processes that carry a mark.

    It reads one line from standard input, then kills them. If the input ends without a line, crow has died: it waits
    two seconds first, in which a command may end by itself.
    """
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return [sys.executable, "-I", __file__, mark], kept


def sweep(mark: str) -> None:
    """Kill the processes with a mark in their environment. macOS hides the environment of its own programs."""
    import psutil

    for _ in range(9):
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and any(mark in value for value in process.environ().values()):
                    process.kill()
                    found.append(process)
        if not found:
            return
        psutil.wait_procs(found, KILL_TIMEOUT)


if __name__ == "__main__":
    if not sys.stdin.readline():
        time.sleep(ORPHAN_GRACE)
    sweep(sys.argv[1])
