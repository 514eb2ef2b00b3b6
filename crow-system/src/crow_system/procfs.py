"""The processes that a command has started, directly or not, found in /proc by their parents. Linux only.

The mark of `mcp.watchdog` finds processes by their environment, which `env -i` empties.
"""

import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from typing import TypeAlias

assert sys.platform == "linux"

Process: TypeAlias = tuple[int, str]
"""A process id and the time of the process's start, which tells it from a later process with the same id."""

PR_SET_CHILD_SUBREAPER = 36

SWEEP = r"""
read -r word || sleep 2
for round in 1 2 3 4 5 6 7 8 9; do
    files=$(grep -lsF -- "$1" /proc/[0-9]*/environ)
    [ -n "$files" ] || break
    for file in $files; do
        pid=${file#/proc/}
        kill -KILL "${pid%/environ}"
    done
done
"""


@cache
def make_child_setup() -> Callable[[], None] | None:
    """Return what a new process calls between fork and exec: it becomes the parent of all its descendants whose own
    parent ends. Exec preserves this, and whoever becomes a parent has to wait for its children."""
    import ctypes  # loaded when the first process starts

    libc = ctypes.CDLL(None)

    def keep_orphans() -> None:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    return keep_orphans


def find_descendants(*roots: int) -> set[Process]:
    """Find the living processes below these process ids."""
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


def read_start_time(pid: int) -> str | None:
    """Return the start time of a process, in kernel ticks; None if it has ended, "" where the system does not tell."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass  # it runs, as another user
    if not os.path.exists(f"/proc/{pid}/stat"):
        return ""
    found = read_stat(pid)
    return found and found[1][1]


def read_parent(pid: int) -> int:
    """Return the id of a process's parent; 0 if it has ended."""
    found = read_stat(pid)
    return found[0] if found else 0


def read_name(pid: int) -> str:
    """Return the name of a process's program; "" if it has ended."""
    with suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return ""


def has_variable(pid: int, names: Collection[str]) -> bool:
    """Test whether a process was started with one of these variables; False where its environment cannot be read."""
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return any(variable.startswith(f"{name}=".encode()) for variable in file.read().split(b"\0") for name in names)
    return False


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


def make_sweep_command(mark: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a watchdog for the processes that carry a mark.

    It reads one line from standard input, then kills them. If the input ends without a line, crow has died: it waits
    two seconds first, in which a command may end by itself. It searches several times, because a process may have
    started another one between the search and its end.
    """
    return ["/bin/sh", "-c", SWEEP, "watchdog", mark], {"PATH": os.defpath}
