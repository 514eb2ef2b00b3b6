"""Folders for what commands need and leave while the server runs, and the watchdog that removes them after."""

import os
import tempfile
import uuid
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from crow_mcp_server.output import Capture
from crow_mcp_server.watchdog import Watchdog

KEPT = 16  # files with outputs


class Scratch:
    """What all commands of a server share."""

    def __init__(self, hidden: frozenset[str]) -> None:
        self.hidden = hidden
        """Names of variables that commands never see."""

    @cached_property
    def folder(self) -> str:
        """Only this user may look into it."""
        return tempfile.mkdtemp(prefix="crow-terminal-")

    @cached_property
    def notes(self) -> str:
        """The same in memory, where there is such a thing: for what commands leave to the next, which has secrets."""
        memory = "/dev/shm"
        return tempfile.mkdtemp(prefix="crow-", dir=memory) if os.access(memory, os.W_OK) else self.folder

    @cached_property
    def watchdog(self) -> Watchdog:
        return Watchdog(self.folder, self.notes)

    def capture(self) -> Capture:
        """For the output of a command; the files of the last few long ones are kept."""
        files = sorted(Path(self.folder).glob("*.txt"), key=lambda path: path.stat().st_mtime)
        for old in files[:-KEPT]:
            with suppress(OSError):
                old.unlink()
        return Capture(os.path.join(self.folder, f"{uuid.uuid4().hex[:12]}.txt"))
