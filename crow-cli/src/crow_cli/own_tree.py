"""Commands that change what crow may do are refused below crow itself: a model must not approve its own calls.

A process is taken to be below crow if it, or a process above it, has one of the marks that crow gives to the commands
and servers that it starts; if a process above it is one in which crow works; or if crow works on this machine, and this
process has no terminal, so that nothing tells who has started it.

This is no sandbox. It does not find a process that has cleared its environment, left its parents and made itself a
terminal, nor one that another service starts, such as cron or an SSH server. A command that the user allows can write
crow's files as the user can.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from crow_core.mcp.watchdog import MARK
from crow_core.settings.config import Home
from crow_core.settings.running import RunningAgents
from crow_mcp_server.terminal.watchdog import MARK_VARIABLE

from crow_cli.process import fail

MARKS = (MARK_VARIABLE, MARK)


def refuse_below_crow() -> None:
    """Print a sentence and exit with code 2 if crow has started this process, directly or not."""
    if reason := find_sign_of_crow(Home.find(os.environ).data):
        fail(
            f"this changes what crow may do, so it does not run where crow has started it: {reason}. "
            "Run it in a terminal of your own."
        )


def find_sign_of_crow(data: Path) -> str:
    """Find the sign that crow has started this process, as a text that completes a sentence; "" if there is none."""
    for name in MARKS:
        if name in os.environ:
            return f"{name} is in its environment"
    agents = RunningAgents(data).list_pids()
    above = {pid for start in {os.getpid(), os.getpgrp(), os.getsid(0)} for pid in list_with_parents(start)}
    if found := sorted(above & agents):
        return f"it runs below process {found[0]}, in which crow works"
    if marked := sorted(pid for pid in above - {os.getpid()} if has_mark(pid)):
        return f"it runs below process {marked[0]}, which crow has started"
    if agents and not has_terminal():
        return f"it has no terminal, and crow works in process {min(agents)}"
    return ""


def list_with_parents(pid: int) -> Iterator[int]:
    """Yield a process and those above it."""
    parents: dict[int, int] | None = None if sys.platform == "linux" else read_parents()
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        seen.add(pid)
        yield pid
        pid = read_parent(pid) if parents is None else parents.get(pid, 0)


def read_parent(pid: int) -> int:
    """Read the id of a process's parent from /proc; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def read_parents() -> dict[int, int]:
    """Read the parents of all processes from `ps`, where there is no /proc."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
    rows = (line.split() for line in listed.splitlines())
    return {int(row[0]): int(row[1]) for row in rows if len(row) == 2}


def has_mark(pid: int) -> bool:
    """Test whether a process was started with one of the marks; False where its environment cannot be read."""
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return any(variable.startswith(f"{name}=".encode()) for variable in variables for name in MARKS)
    return False


def has_terminal() -> bool:
    """Test whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
