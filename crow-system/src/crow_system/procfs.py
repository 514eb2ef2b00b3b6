"""The processes that a command has started, directly or not, found in /proc by their parents. Linux only.

A mark finds processes by their environment, which `env -i` empties.
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

WATCHDOG = r"""
grace=$1
shift
running= asked=
while read -r what one; do
    [ "$what" = now ] && asked=1 && break
    kept=
    for other in $running; do
        [ "$other" = "$one" ] || kept="$kept $other"
    done
    running=$kept
    [ "$what" = start ] && running="$running $one"
done
[ "$asked" ] || sleep "$grace"
for one in $running; do
    [ "${one%%:*}" ] && kill -KILL -- "-${one%%:*}"
    for round in 1 2 3 4 5 6 7 8 9; do
        files=$(grep -lsF -- "${one#*:}" /proc/[0-9]*/environ)
        [ "$files" ] || break
        for file in $files; do
            pid=${file#/proc/}
            kill -KILL "${pid%/environ}"
        done
    done
done
rm -rf -- "$@"
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


def read_fields(pid: int) -> list[bytes] | None:
    """Return what /proc says about a process from its state on; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in b"ZX" else fields


def read_stat(pid: int) -> tuple[int, Process] | None:
    """Return the parent of a process and the process; None if it has ended."""
    fields = read_fields(pid)
    return (int(fields[1]), (pid, fields[19].decode())) if fields else None


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


def list_members(group: int, mark: str) -> list[int]:
    """Return the ids of the living processes of a group and of its session, and of those that left both but have the
    mark in their environment."""
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _is_member(int(pid), group, mark.encode())]


def _is_member(pid: int, group: int, mark: bytes) -> bool:
    if not (fields := read_fields(pid)):
        return False
    if group in (int(fields[2]), int(fields[3])):
        return True
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:  # else it belongs to another user
        return mark in file.read()
    return False


def count_processes() -> int | None:
    """Return how many processes and threads there are."""
    with open("/proc/loadavg", encoding="ascii") as file:
        return int(file.read().split("/")[1].split()[0])


def make_watchdog_command(grace: float, *folders: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a watchdog: see `watchdog.start_watchdog`.

    It searches several times for processes with a mark, because one may have started another between the search and
    its end.
    """
    return ["/bin/sh", "-c", WATCHDOG, "watchdog", str(grace), *folders], {"PATH": os.defpath}
