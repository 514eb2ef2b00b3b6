"""A command that the user runs from the prompt."""

import asyncio
import os
import signal
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from contextlib import suppress

from crow_terminal.text import escape_output

MAX_KEPT = 200_000
"""Characters of the output that are kept: the last ones."""


class UserCommand:
    """A command in the user's shell, without input, in a process group of its own."""

    def __init__(self, command: str, cwd: str) -> None:
        self._command, self._cwd = command, cwd
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, show: Callable[[Sequence[str]], None]) -> tuple[str, int | None]:
        """Run the command to its end. `show` is called with its lines as they come.

        Returns the output, and the exit code: that of the shell, None if the command could not start.
        """
        shell = os.environ.get("SHELL") or "/bin/sh"
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(shell, "-c", self._command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=self._cwd,
                start_new_session=True,
            )
        except OSError as error:
            return f"{shell} cannot be started: {error.strerror}.", None
        assert process.stdout
        decoder, kept, partial = getincrementaldecoder("utf-8")("replace"), "", ""
        try:
            while data := await process.stdout.read(65536):
                text = decoder.decode(data)
                kept = (kept + text)[-MAX_KEPT:]
                *lines, partial = (partial + text).split("\n")
                partial = partial[-MAX_KEPT:]
                if lines:
                    show([escape_output(line) for line in lines[-100:]])
            return kept, await process.wait()
        finally:
            self.stop()

    def stop(self) -> None:
        """Kill the command with all processes of its group."""
        if self._process and self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
