"""Temporary folders for commands, and the watchdog that removes them when the server ends."""

import os
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

from crow_mcp_server.terminal.command_output import OutputCapture
from crow_mcp_server.terminal.command_watchdog import CommandWatchdog

MAX_OUTPUT_FILES = 16
NO_EDITOR = """\
#!/bin/sh
echo 'There is no editor here: give the text as an argument (git commit -m), or run the command in a session.' >&2
exit 1
"""
"""The editor of commands without a terminal: it fails at once with advice, where an editor would wait for a person."""


class TempFolders:
    """The temporary folders and the watchdog that all commands of a server share.

    They are created for the first command, and again if a folder has been removed. Only this user can read them.
    """

    def __init__(self, hidden_env: frozenset[str]) -> None:
        self.hidden_env = hidden_env
        """Names of environment variables that commands never see."""
        self._cached: tuple[str, str, CommandWatchdog] | None = None

    @property
    def output_folder(self) -> str:
        """Folder for long outputs."""
        return self._current[0]

    @property
    def state_folder(self) -> str:
        """Folder for the shell state between commands. It may hold secrets, so it is in memory where possible."""
        return self._current[1]

    @property
    def readable(self) -> tuple[str, ...]:
        """The folder for long outputs, if no shell state is in it."""
        return () if self.output_folder == self.state_folder else (self.output_folder,)

    @property
    def no_editor(self) -> str:
        """Path of the program NO_EDITOR."""
        path = os.path.join(self.output_folder, "no-editor")
        if not os.path.exists(path):
            with open(path, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o700)) as file:
                file.write(NO_EDITOR)
        return path

    @property
    def watchdog(self) -> CommandWatchdog:
        return self._current[2]

    @property
    def _current(self) -> tuple[str, str, CommandWatchdog]:
        if not self._cached or not all(map(os.path.isdir, self._cached[:2])):
            outputs, memory = tempfile.mkdtemp(prefix="crow-terminal-"), "/dev/shm"
            states = tempfile.mkdtemp(prefix="crow-terminal-", dir=memory) if os.access(memory, os.W_OK) else outputs
            self._cached = outputs, states, CommandWatchdog(outputs, states)
        return self._cached

    def open_capture(self, *, from_terminal: bool) -> OutputCapture:
        """Return a capture for a command's output, and remove all but the last MAX_OUTPUT_FILES output files."""
        files = sorted(Path(self.output_folder).glob("*.txt"), key=lambda path: path.stat().st_mtime)
        for old in files[:-MAX_OUTPUT_FILES]:
            with suppress(OSError):
                old.unlink()
        path = os.path.join(self.output_folder, f"{uuid.uuid4().hex[:12]}.txt")
        return OutputCapture(path, from_terminal=from_terminal)
