"""Commands that change what crow may do are refused below crow itself: a model must not approve its own calls.

A process is taken to be below crow if it, or a process above it, has one of the marks that crow gives to the commands
and servers that it starts; if a process above it is one in which crow works; or if crow works on this machine, and this
process has no terminal, so that nothing tells who has started it.

This is no sandbox. It does not find a process that has cleared its environment, left its parents and made itself a
terminal, nor one that another service starts, such as cron or an SSH server. A command that the user allows can write
crow's files as the user can.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import crow_system as system
from crow_agent.settings.home import Home
from crow_agent.settings.running import RunningAgents
from crow_core.mcp.watchdog import MARK
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
    above = {pid for start in {os.getpid(), *system.get_groups()} for pid in list_with_parents(start)}
    if found := sorted(above & agents):
        return f"it runs below process {found[0]}, in which crow works"
    if marked := sorted(pid for pid in above - {os.getpid()} if system.has_variable(pid, MARKS)):
        return f"it runs below process {marked[0]}, which crow has started"
    if agents and not has_terminal():
        return f"it has no terminal, and crow works in process {min(agents)}"
    return ""


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
