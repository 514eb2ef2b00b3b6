"""The terminals of an ACP client on this machine: the commands that an agent runs in them, and their output."""

import asyncio
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

import crow_system as system
from msgspec import UNSET

from crow_core.acp.connection import RpcError
from crow_core.acp.schema import (
    INTERNAL_ERROR,
    NOT_FOUND,
    CreateTerminalRequest,
    CreateTerminalResponse,
    KillTerminalRequest,
    ReleaseTerminalRequest,
    TerminalExitStatus,
    TerminalOutputRequest,
    TerminalOutputResponse,
    WaitForTerminalExitRequest,
    WaitForTerminalExitResponse,
)

OUTPUT_LIMIT = 10_000_000
"""Bytes of a command's output that are kept, unless the agent asks for fewer."""
LINGER = 0.5
"""Seconds for which the output of a command is read after its end: its children may hold it open."""


@dataclass(eq=False)
class ClientTerminal:
    """A command that an agent runs in a terminal of the client."""

    session: str
    """The id of its session."""
    process: Process
    limit: int = OUTPUT_LIMIT
    """The most bytes of the output to keep."""
    output: bytearray = field(default_factory=bytearray)
    truncated: bool = False

    def __post_init__(self) -> None:
        self.reading = asyncio.ensure_future(self.read())

    async def read(self) -> None:
        """Keep the end of the output."""
        assert self.process.stdout
        while data := await self.process.stdout.read(65536):
            self.output += data
            if len(self.output) > self.limit:
                self.truncated = True
                del self.output[: len(self.output) - self.limit]

    def get_text(self) -> str:
        """Return the output; a character whose beginning was cut off is left out."""
        start = 0
        while self.truncated and start < min(3, len(self.output)) and self.output[start] & 0xC0 == 0x80:
            start += 1
        return self.output[start:].decode(errors="replace")

    async def wait(self) -> WaitForTerminalExitResponse:
        """Wait until the command has ended."""
        code = await self.process.wait()
        await asyncio.wait([self.reading], timeout=LINGER)
        if code >= 0:
            return WaitForTerminalExitResponse(exit_code=code)
        known = {number.value: number.name for number in signal.Signals}
        return WaitForTerminalExitResponse(signal=known.get(-code, f"signal {-code}"))

    async def kill(self) -> None:
        """Kill the command and all processes below it."""
        below = await asyncio.to_thread(system.find_descendants, self.process.pid)
        system.kill_group(self.process.pid)
        system.kill_all(below)

    async def close(self) -> None:
        """Kill the command and wait for its end."""
        if self.process.returncode is None or not self.reading.done():
            await self.kill()
        await self.wait()
        self.reading.cancel()


class ClientTerminals:
    """Answers an agent's requests for terminals: each handler is that of one method of ACP."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        """The environment of the commands, in addition to the variables that the agent names."""
        self.opened: dict[str, ClientTerminal] = {}
        """The terminals that are not released, by id."""
        self._ids = count(1)

    async def create(self, request: CreateTerminalRequest) -> CreateTerminalResponse:
        """Run a command. Raises RpcError if it cannot start."""
        env = {**self.env, **{variable.name: variable.value for variable in request.env}}
        try:
            process = await asyncio.create_subprocess_exec(
                system.find_program(request.command, env),
                *request.args,
                env=env,
                cwd=request.cwd or None,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                start_new_session=True,
                creationflags=system.NEW_GROUP,
                preexec_fn=system.make_child_setup(),
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RpcError(INTERNAL_ERROR, "Not started", details=f"{request.command}: {reason}.") from error
        limit = request.output_byte_limit
        terminal_id = f"terminal-{next(self._ids)}"
        kept = OUTPUT_LIMIT if limit is UNSET or limit is None else limit
        self.opened[terminal_id] = ClientTerminal(request.session_id, process, kept)
        return CreateTerminalResponse(terminal_id=terminal_id)

    async def output(self, request: TerminalOutputRequest) -> TerminalOutputResponse:
        """Return the output so far, and the exit status if the command has ended."""
        terminal = self.find(request.session_id, request.terminal_id)
        ended = await terminal.wait() if terminal.process.returncode is not None else None
        return TerminalOutputResponse(
            output=terminal.get_text(),
            truncated=terminal.truncated,
            exit_status=TerminalExitStatus(exit_code=ended.exit_code, signal=ended.signal) if ended else UNSET,
        )

    async def wait_for_exit(self, request: WaitForTerminalExitRequest) -> WaitForTerminalExitResponse:
        """Wait until the command has ended."""
        return await self.find(request.session_id, request.terminal_id).wait()

    async def kill(self, request: KillTerminalRequest) -> None:
        """Kill the command; its output can still be read."""
        await self.find(request.session_id, request.terminal_id).kill()

    async def release(self, request: ReleaseTerminalRequest) -> None:
        """Kill the command if it runs, and forget the terminal."""
        terminal = self.find(request.session_id, request.terminal_id)
        await terminal.close()
        self.opened.pop(request.terminal_id, None)

    async def release_all(self, session: str = "") -> None:
        """Release the terminals of a session, or all of them."""
        for id, terminal in [*self.opened.items()]:
            if session in ("", terminal.session):
                del self.opened[id]
                await terminal.close()

    def find(self, session: str, id: str) -> ClientTerminal:
        """Return a terminal of a session. Raises RpcError."""
        terminal = self.opened.get(id)
        if terminal is None or terminal.session != session:
            raise RpcError(NOT_FOUND, "Not found", details=f"There is no terminal {id!r}.")
        return terminal
