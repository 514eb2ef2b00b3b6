"""The process of an ACP agent: how it is started, what it said when it ended, and its end with all that it started."""

import asyncio
import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from subprocess import PIPE
from typing import Any

import crow_system as system

from crow_core.acp.transports import ChildTransport, spawn

START_TIMEOUT = 60.0
"""Seconds that an agent may take to answer `initialize` and to open a session."""
CLOSE_TIMEOUT = 1.0
"""Seconds that an agent may take to end after the end of its input, and again after SIGTERM."""
EXIT_WAIT = 0.5
"""Seconds to wait for the exit code of a process whose connection has ended."""
STDERR_LINES = 20
"""Lines of standard error that are kept."""
STDERR_LIMIT = 2_000
"""Characters of them that are kept."""


class AgentProcess:
    """The process of an ACP agent, and the transport to it."""

    def __init__(self, name: str, transport: ChildTransport) -> None:
        self.name = name
        """Its command, as one line."""
        self.readline, self.write, self.drain = transport.readline, transport.write, transport.drain
        self._transport = transport
        self._lines: deque[str] = deque(maxlen=STDERR_LINES)
        """The last lines that it wrote to standard error."""
        self._closed = False
        self._reading = asyncio.ensure_future(self._read_stderr())

    async def close(self) -> None:
        """End the process and all processes below it."""
        if self._closed:  # another process may have its id by now
            return
        self._closed = True
        below: set[Any] = set()
        async with AsyncExitStack() as stack:  # a cancel, after which the event loop may end, leaves out no step
            stack.push_async_callback(self._stop_reading)
            stack.callback(system.kill_all, below)
            stack.push_async_callback(self._transport.close)
            below |= await asyncio.to_thread(system.find_descendants, self._transport.process.pid)

    async def _stop_reading(self) -> None:
        """Stop reading standard error, after a moment for the last lines."""
        try:
            await asyncio.wait({self._reading}, timeout=EXIT_WAIT)
        finally:
            self._reading.cancel()
            if self._transport.errors:
                self._transport.errors.close()
            await asyncio.wait({self._reading})

    @property
    def stderr(self) -> str:
        """The end of what it wrote to standard error."""
        return "\n".join(self._lines).strip()[-STDERR_LIMIT:]

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None while it runs. A negative one is the number of a signal."""
        return self._transport.exit.result() if self._transport.exit.done() else None

    async def describe_end(self) -> str:
        """Make the sentences for a connection that has ended."""
        await asyncio.wait({self._transport.exit, self._reading}, timeout=EXIT_WAIT)
        how = "closed its connection" if self.exit_code is None else f"ended with exit code {self.exit_code}"
        return f"{self.name} {how}.{self.quote_stderr()}"

    def describe_silence(self, seconds: float) -> str:
        """Make the sentences for a process that has not answered in time."""
        return f"{self.name} did not answer within {seconds:g} seconds. Is it an ACP agent?{self.quote_stderr()}"

    def quote_stderr(self) -> str:
        """Make the sentence that quotes its standard error; empty if there is nothing to quote."""
        return f" It said: {self.stderr}" if self.stderr else ""

    async def _read_stderr(self) -> None:
        """Keep the last lines of standard error."""
        rest = b""
        while self._transport.errors and (data := await self._transport.errors.read(65536)):
            *whole, rest = (rest + data).split(b"\n")
            self._lines.extend(line[:STDERR_LIMIT].decode(errors="replace") for line in whole)
            rest = rest[-STDERR_LIMIT:]
        if rest:
            self._lines.append(rest.decode(errors="replace"))


async def start_agent_process(words: Sequence[str], env: Mapping[str, str], cwd: str | None = None) -> AgentProcess:
    """Start an ACP agent. `env` is its whole environment. Raises OSError if it cannot start."""
    prepare = system.make_child_setup()
    transport = await spawn(words[0], words[1:], env, cwd, PIPE, CLOSE_TIMEOUT, prepare)
    return AgentProcess(shlex.join(words), transport)
