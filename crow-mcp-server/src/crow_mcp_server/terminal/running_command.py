"""A command that runs, as the host of the tool sees it."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from crow_mcp_server.terminal.processes import ProcessTree, name_signal

if TYPE_CHECKING:
    from crow_mcp_server.terminal.interactive_shell import Shell


class RunningCommand:
    """Implements `crow_mcp_server.workspace.Running` for a command of a process tree."""

    kind = "command"

    def __init__(self, title: str, program: "ProcessTree | Shell", name: str = "") -> None:
        self.title = title
        self.name = name
        self.over: asyncio.Event = asyncio.Event()
        """Set when the command has ended. An event of its own: a shell runs several commands."""
        self.is_told = False
        self.end = ""
        self.exit: Mapping[str, int | str] = {}
        self._program = program

    def answer(self) -> None:
        self._program.answer_wanted.set()

    def get_last_line(self, limit: int) -> str:
        return self._program.capture.get_last_line(limit)

    def read_output(self, start: int, limit: int) -> tuple[str, int]:
        return self._program.capture.read_new(start, limit, whole_lines=not self.over.is_set())

    async def kill(self) -> None:
        await self._program.kill()

    def finish(self) -> None:
        """Note that the command has ended."""
        if self.over.is_set():
            return
        program, code = self._program, self._program.exit_code
        code = getattr(program, "status", 0) if code is None else code
        self.exit = {"exitCode": code} if code >= 0 else {"signal": name_signal(-code)}
        if program.timed_out:
            self.end = f"timed out after {program.timeout:g} s"
        else:
            self.end = f"exit code {code}" if code >= 0 else f"killed by {name_signal(-code)}"
        self.over.set()
