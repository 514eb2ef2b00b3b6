"""A folder for what commands need and leave while the server runs, and the watchdog that removes it after."""

import os
import tempfile
import uuid
from contextlib import suppress
from functools import cached_property

from crow_mcp_server.output import Capture
from crow_mcp_server.watchdog import Watchdog

KEPT = 16  # files with outputs


class Scratch:
    """What all commands of a server share."""

    def __init__(self, hidden: frozenset[str]) -> None:
        self.hidden = hidden
        """Names of variables that commands never see."""
        self._captures: list[str] = []

    @cached_property
    def folder(self) -> str:
        """Only this user may look into it."""
        return tempfile.mkdtemp(prefix="crow-terminal-")

    @cached_property
    def watchdog(self) -> Watchdog:
        return Watchdog(self.folder)

    def path(self) -> str:
        """Where a new file may stand."""
        return os.path.join(self.folder, uuid.uuid4().hex[:12])

    def capture(self) -> Capture:
        """For the output of a command; the files of the last few long ones are kept."""
        path = self.path() + ".txt"
        self._captures.append(path)
        for old in self._captures[:-KEPT]:
            with suppress(OSError):
                os.unlink(old)
        del self._captures[:-KEPT]
        return Capture(path)
