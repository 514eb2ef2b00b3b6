"""Folders for what commands need and leave while the server runs, and the watchdog that removes them after."""

import os
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

from crow_mcp_server.terminal.output import Capture
from crow_mcp_server.terminal.watchdog import Watchdog

KEPT = 16  # files with outputs


class Scratch:
    """What all commands of a server share."""

    def __init__(self, hidden: frozenset[str]) -> None:
        self.hidden = hidden
        """Names of variables that commands never see."""
        self._made: tuple[str, str, Watchdog] | None = None

    @property
    def folder(self) -> str:
        """For long outputs."""
        return self._places[0]

    @property
    def notes(self) -> str:
        """For what commands leave to the next, which has secrets: in memory, where there is such a folder."""
        return self._places[1]

    @property
    def watchdog(self) -> Watchdog:
        return self._places[2]

    @property
    def _places(self) -> tuple[str, str, Watchdog]:
        """Made with the first command, and anew when somebody removed them; only this user may look into them."""
        if not self._made or not all(map(os.path.isdir, self._made[:2])):
            folder, memory = tempfile.mkdtemp(prefix="crow-terminal-"), "/dev/shm"
            notes = tempfile.mkdtemp(prefix="crow-terminal-", dir=memory) if os.access(memory, os.W_OK) else folder
            self._made = folder, notes, Watchdog(folder, notes)
        return self._made

    def capture(self) -> Capture:
        """For the output of a command; the files of the last few long ones are kept."""
        files = sorted(Path(self.folder).glob("*.txt"), key=lambda path: path.stat().st_mtime)
        for old in files[:-KEPT]:
            with suppress(OSError):
                old.unlink()
        return Capture(os.path.join(self.folder, f"{uuid.uuid4().hex[:12]}.txt"))
