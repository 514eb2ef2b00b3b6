"""Kills the processes that a command has left running, when asked to and when this process has died."""

from crow_system.watchdog import start_watchdog

MARK = "CROW_MCP_SERVER"
"""An environment variable. Each command gets a value of its own, by which all processes it starts are found."""
ORPHAN_GRACE = 2.0
"""Seconds in which a command may end by itself after crow has died."""


class ProcessWatchdog:
    """A process that kills all processes with one mark."""

    def __init__(self, mark: str) -> None:
        self._process = start_watchdog(grace=ORPHAN_GRACE)
        assert self._process.stdin
        self._process.stdin.write(f"start :{mark}\n".encode())
        self._process.stdin.flush()

    def kill_marked(self) -> None:
        """Kill all processes that carry the mark. Blocks for some milliseconds; without /proc, for some hundred."""
        self._process.communicate(b"now\n")
