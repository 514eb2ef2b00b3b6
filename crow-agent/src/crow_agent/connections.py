"""Connections to agents: to an app in this process, to a command, to an address."""

import asyncio
import os
import shlex
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from subprocess import PIPE
from typing import TYPE_CHECKING

from crow_core.acp.transports import ChildTransport, Transport, memory_pair, spawn
from crow_core.errors import ConfigError, ModelError, StoreError

from crow_agent.errors import AgentError, AgentLost

if TYPE_CHECKING:
    from crow_core.app import Crow

STDERR_LINES = 20
"""Lines of standard error of an agent's process that are kept for an error."""
EXIT_WAIT = 0.5
"""Seconds to wait for the exit code of a process whose connection has ended."""


@dataclass
class AgentConnection:
    """A transport to an agent, and what is known when it ends."""

    transport: Transport
    name: str
    """The agent for people: a command, an address."""
    describe_end: Callable[[], Awaitable[AgentLost]]
    """Makes the error for a connection that has ended."""


def make_end(name: str) -> Callable[[], Awaitable[AgentLost]]:
    """Return a function that makes the error for an ended connection of which nothing more is known."""

    async def describe() -> AgentLost:
        return AgentLost(f"The connection to {name} has ended.", agent=name)

    return describe


@asynccontextmanager
async def connect_app(make: "Callable[[], Awaitable[Crow]]") -> AsyncGenerator[AgentConnection]:
    """Make an app and connect to it in this process; shut it down at the end. Raises AgentError."""
    from crow_core.agent import AcpAgent  # imported here because it loads half of crow, and other agents do not need it

    try:
        crow = await make()
    except (ConfigError, ModelError, StoreError) as error:
        raise AgentError(str(error)) from error
    ours, theirs = memory_pair()
    agent = AcpAgent(theirs, crow, unstable=True)
    agent.max_sessions = None
    serving = asyncio.ensure_future(agent.serve())
    try:
        yield AgentConnection(ours, "crow", make_end("crow"))
    finally:
        await ours.close()
        try:
            await serving
        finally:
            await crow.shut_down()


@asynccontextmanager
async def connect_command(
    command: str | Sequence[str], env: Mapping[str, str] | None
) -> AsyncGenerator[AgentConnection]:
    """Start an agent's process, and end it at the end. Raises AgentLost."""
    words = shlex.split(command) if isinstance(command, str) else list(command)
    name = shlex.join(words)
    try:
        transport = await spawn(words[0], words[1:], env={**os.environ, **(env or {})}, stderr=PIPE)
    except (OSError, IndexError) as error:
        reason = getattr(error, "strerror", None) or "the command is empty"
        raise AgentLost(f"{name} cannot be started: {reason}.", agent=name) from error
    stderr: deque[str] = deque(maxlen=STDERR_LINES)
    reading = asyncio.ensure_future(read_lines(transport, stderr))

    async def describe() -> AgentLost:
        await asyncio.wait({transport.exit}, timeout=EXIT_WAIT)
        code = transport.exit.result() if transport.exit.done() else None
        said = "\n".join(stderr).strip()
        how = f"ended with exit code {code}" if code is not None else "closed its connection"
        return AgentLost(f"{name} {how}.{f' It said: {said}' if said else ''}", agent=name, exit_code=code, stderr=said)

    try:
        yield AgentConnection(transport, name, describe)
    finally:
        await transport.close()
        reading.cancel()
        await asyncio.wait([reading])


async def read_lines(transport: ChildTransport, lines: deque[str]) -> None:
    """Keep the last lines that a process writes to standard error."""
    rest = b""
    while transport.errors and (data := await transport.errors.read(65536)):
        *whole, rest = (rest + data).split(b"\n")
        lines.extend(line.decode(errors="replace") for line in whole)
        rest = rest[-10_000:]
    if rest:
        lines.append(rest.decode(errors="replace"))


@asynccontextmanager
async def connect_address(url: str, token: str) -> AsyncGenerator[AgentConnection]:
    """Connect to an agent at a `ws://` or `wss://` address. Raises AgentLost."""
    from crow_core.acp.websocket import connect  # imported here because it loads uvicorn
    from websockets.exceptions import WebSocketException

    try:
        transport = await connect(url, token)
    except (OSError, WebSocketException) as error:
        raise AgentLost(f"{url} cannot be reached: {error}.", agent=url) from error
    try:
        yield AgentConnection(transport, url, make_end(url))
    finally:
        await transport.close()
