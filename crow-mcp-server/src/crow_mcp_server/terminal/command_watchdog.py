"""A watchdog process that kills running commands when this process dies without having ended them."""

import os
import subprocess
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from threading import Lock

from crow_system.watchdog import start_watchdog

MARK_VARIABLE = "CROW_COMMAND"
"""An environment variable of all processes of a command, to find those that leave its group, and to tell them from the
user's processes."""


class CommandWatchdog:
    """A process that is told which commands run. Its input closes when this process ends."""

    def __init__(self, *folders: str) -> None:
        """`folders` are removed when this process ends."""
        process = start_watchdog(*folders)
        assert process.stdin
        weakref.finalize(self, _end, process)
        self._lock = Lock()
        self._stdin = process.stdin.fileno()

    @contextmanager
    def watch(self, group: int | str, mark: str) -> Generator[None]:
        """Context manager: have processes killed if this process ends inside the block.

        These are the group ("" for none), and the processes that have the mark in their environment.
        """
        self._write(f"start {group}:{mark}\n")
        try:
            yield
        finally:
            self._write(f"end {group}:{mark}\n")

    def _write(self, line: str) -> None:
        with self._lock, suppress(BrokenPipeError):  # the watchdog was killed: commands run without it
            os.write(self._stdin, line.encode())


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin
    process.stdin.close()
    process.wait()
