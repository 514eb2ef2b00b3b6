"""The processes of a command, found in /proc. Linux only."""

import os
import sys

assert sys.platform == "linux"

WATCHDOG = r"""
running=
while read -r what one; do
    kept=
    for other in $running; do
        [ "$other" = "$one" ] || kept="$kept $other"
    done
    running=$kept
    [ "$what" = start ] && running="$running $one"
done
for one in $running; do
    kill -KILL -- "-${one%%:*}"
    for file in $(grep -lsF -- "${one#*:}" /proc/[0-9]*/environ); do
        pid=${file#/proc/}
        kill -KILL "${pid%/environ}"
    done
done
rm -rf -- "$@"
"""


def make_watchdog_command(*folders: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a watchdog for all commands of a server.

    It reads lines `start GROUP:MARK` and `end GROUP:MARK` until its input closes. Then it kills the process groups that
    have started and not ended, and the processes with their marks, and removes the folders in its arguments.
    """
    return ["/bin/sh", "-c", WATCHDOG, "watchdog", *folders], {"PATH": os.defpath}


def list_members(group: int, mark: str) -> list[int]:
    """Return the ids of the living processes of a group and of its session, and of those that left both but have the
    mark in their environment."""
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _is_member(pid, group, mark.encode())]


def _is_member(pid: str, group: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, _, its_group, session, *_ = file.read().rpartition(b")")[2].split()
        if state in b"ZX":
            return False
        if group in (int(its_group), int(session)):
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read()
    except OSError:  # it has ended meanwhile, or belongs to another user
        return False


def count_processes() -> int | None:
    """Return how many processes and threads there are."""
    with open("/proc/loadavg", encoding="ascii") as file:
        return int(file.read().split("/")[1].split()[0])
