"""Kills the processes that a command has left running, when asked to and when this process has died."""

import os
import subprocess

MARK = "CROW_MCP_SERVER"
"""An environment variable. Each command gets a value of its own, by which all processes it starts are found."""

SCRIPT = r"""
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
"""Reads one line from standard input, then kills. If the input ends without a line, this process has died: the script
waits two seconds first, in which a command may end by itself. It searches several times, because a process may have
started another one between the search and its end."""


class ProcessWatchdog:
    """A shell that runs SCRIPT for one mark. It finds processes in /proc; on a system without it, it does nothing."""

    def __init__(self, mark: str) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, "watchdog", mark],
            env={"PATH": os.defpath},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def kill_marked(self) -> None:
        """Kill all processes that carry the mark. Blocks for some milliseconds."""
        self._shell.communicate(b"now\n")
