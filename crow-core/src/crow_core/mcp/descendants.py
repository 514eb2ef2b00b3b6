"""The processes that a command has started, directly or not, found in /proc by their parents. Linux only.

The mark of `watchdog` finds processes by their environment, which `env -i` empties.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import TypeAlias

Process: TypeAlias = tuple[int, str]
"""A process id and the time of the process's start, which tells it from a later process with the same id."""

PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def keep_orphans() -> None:
    """Make this process, on Linux, the parent of all its descendants whose own parent ends; exec preserves this.

    Only for a new process, between fork and exec: whoever becomes a parent has to wait for its children.
    """
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def find_descendants(*roots: int) -> set[Process]:
    """Find the living processes below these process ids; an empty set without /proc."""
    parents: dict[int, list[Process]] = {}
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and (found := read_stat(int(name))):
                parent, process = found
                parents.setdefault(parent, []).append(process)
    known: set[Process] = set()
    ahead = [*roots]
    while ahead:
        below = set(parents.get(ahead.pop(), ())) - known
        known |= below
        ahead += [pid for pid, _ in below]
    return known


def read_stat(pid: int) -> tuple[int, Process] | None:
    """Return the parent of a process and the process; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent, *fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if state in b"ZX" else (int(parent), (pid, fields[17].decode()))


def kill_all(processes: set[Process]) -> None:
    """Kill these processes and what is below them, unless they have ended. First stop them: they can start no more."""
    stopped: set[Process] = set()
    while new := {each for each in processes - stopped if (found := read_stat(each[0])) and found[1] == each}:
        send_signal(new, signal.SIGSTOP)
        stopped |= new
        processes = find_descendants(*(pid for pid, _ in stopped))
    send_signal(stopped, signal.SIGKILL)


def send_signal(processes: set[Process], number: signal.Signals) -> None:
    for pid, _ in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
