"""A command that the user runs from the prompt."""

import asyncio
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence

import crow_system as system

from crow_terminal.printable_text import escape_output

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
        words = system.make_user_command(self._command)
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=self._cwd,
                start_new_session=True,
                creationflags=system.NEW_GROUP,
            )
        except OSError as error:
            return f"{words[0]} cannot be started: {error.strerror}.", None
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
            system.kill_group(self._process.pid)
