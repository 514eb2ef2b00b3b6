"""Kills the processes that a command has left running, when asked to and when this process has died."""

import os
import subprocess

import crow_system as system

MARK = "CROW_MCP_SERVER"
"""An environment variable. Each command gets a value of its own, by which all processes it starts are found."""


class ProcessWatchdog:
    """A process that kills all processes with one mark."""

    def __init__(self, mark: str) -> None:
        command, env = system.make_sweep_command(mark)
        self._process = subprocess.Popen(
            command,
            env=env,
            cwd=os.path.abspath(os.sep),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            creationflags=system.NEW_GROUP,
        )

    def kill_marked(self) -> None:
        """Kill all processes that carry the mark. Blocks for some milliseconds; without /proc, for some hundred."""
        self._process.communicate(b"now\n")
