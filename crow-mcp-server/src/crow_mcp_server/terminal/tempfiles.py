"""Folders for what commands need and leave while the server runs, and the watchdog that removes them after."""

import os
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

from crow_mcp_server.terminal.output import OutputCapture
from crow_mcp_server.terminal.watchdog import CommandWatchdog

MAX_OUTPUT_FILES = 16  # files with outputs


class TempFolders:
    """What all commands of a server share."""

    def __init__(self, hidden_env: frozenset[str]) -> None:
        self.hidden_env = hidden_env
        """Names of variables that commands never see."""
        self._made: tuple[str, str, CommandWatchdog] | None = None

    @property
    def output_folder(self) -> str:
        """For long outputs."""
        return self._current[0]

    @property
    def state_folder(self) -> str:
        """For what commands leave to the next, which has secrets: in memory, where there is such a folder."""
        return self._current[1]

    @property
    def watchdog(self) -> CommandWatchdog:
        return self._current[2]

    @property
    def _current(self) -> tuple[str, str, CommandWatchdog]:
        """Made with the first command, and anew when somebody removed them; only this user may look into them."""
        if not self._made or not all(map(os.path.isdir, self._made[:2])):
            folder, memory = tempfile.mkdtemp(prefix="crow-terminal-"), "/dev/shm"
            notes = tempfile.mkdtemp(prefix="crow-terminal-", dir=memory) if os.access(memory, os.W_OK) else folder
            self._made = folder, notes, CommandWatchdog(folder, notes)
        return self._made

    def open_capture(self) -> OutputCapture:
        """For the output of a command; the files of the last few long ones are kept."""
        files = sorted(Path(self.output_folder).glob("*.txt"), key=lambda path: path.stat().st_mtime)
        for old in files[:-MAX_OUTPUT_FILES]:
            with suppress(OSError):
                old.unlink()
        return OutputCapture(os.path.join(self.output_folder, f"{uuid.uuid4().hex[:12]}.txt"))
