"""Connections to agents: to an app in this process, to a command, to an address."""

import asyncio
import os
import shlex
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import crow_system as system
from crow_core.acp.agent_process import start_agent_process
from crow_core.acp.transports import Transport, memory_pair
from crow_core.errors import ConfigError, ModelError, StoreError

from crow_agent.errors import AgentError, AgentLost

if TYPE_CHECKING:
    from crow_core.app import Crow


@dataclass
class AgentConnection:
    """A transport to an agent, and what is known when it ends."""

    transport: Transport
    name: str
    """The agent for people: a command, an address."""
    describe_end: Callable[[], Awaitable[AgentLost]]
    """Makes the error for a connection that has ended."""
    quote_stderr: Callable[[], str] = str
    """Makes a sentence that quotes what its process wrote to standard error; empty if there is nothing to quote."""
    workspace: Mapping[str, str] | None = None
    """Variables for the agent's commands where it is offered the files and terminals of this machine, else None."""

    def describe_silence(self, method: str, seconds: float) -> AgentLost:
        """Make the error for an agent that has not answered a request in time."""
        question = " Is it an ACP agent?" if method == "initialize" else ""
        sentence = f"{self.name} did not answer {method} within {seconds:g} seconds.{question}{self.quote_stderr()}"
        return AgentLost(sentence, agent=self.name)


def make_end(name: str) -> Callable[[], Awaitable[AgentLost]]:
    """Return a function that makes the error for an ended connection whose cause is unknown."""

    async def describe() -> AgentLost:
        return AgentLost(f"The connection to {name} has ended.", agent=name)

    return describe


@asynccontextmanager
async def connect_app(make: "Callable[[], Awaitable[Crow]]") -> AsyncGenerator[AgentConnection]:
    """Make an app and connect to it in this process; shut it down at the end. Raises AgentError."""
    from crow_agent.in_process import (
        InProcessAgent,  # imported here because it loads half of crow, and other agents do not need it
    )

    try:
        crow = await make()
    except (ConfigError, ModelError, StoreError) as error:
        raise AgentError(str(error)) from error
    del make  # it refers to the agent, which could not be dropped
    ours, theirs = memory_pair()
    agent = InProcessAgent(theirs, crow, unstable=True)
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
    command: str | Sequence[str],
    env: Mapping[str, str] | None,
    cwd: str,
    workspace: Mapping[str, str] | None = None,
) -> AsyncGenerator[AgentConnection]:
    """Start an agent's process, and end it and all processes below it at the end. Raises AgentLost."""
    try:
        words = system.split_command(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise AgentLost(f"{command} cannot be started: {error}.", agent=str(command)) from error
    name = shlex.join(words)
    try:
        process = await start_agent_process(words, {**os.environ, **(env or {})}, cwd)
    except (OSError, IndexError, ValueError) as error:
        reason = getattr(error, "strerror", None) or (str(error) if words else "the command is empty")
        raise AgentLost(f"{name or 'The agent'} cannot be started: {reason}.", agent=name) from error

    async def describe() -> AgentLost:
        sentence = await process.describe_end()
        return AgentLost(sentence, agent=name, exit_code=process.exit_code, stderr=process.stderr)

    try:
        yield AgentConnection(process, name, describe, process.quote_stderr, workspace)
    finally:
        await process.close()


@asynccontextmanager
async def connect_address(
    url: str, token: str, workspace: Mapping[str, str] | None = None
) -> AsyncGenerator[AgentConnection]:
    """Connect to an agent at an address (`ws`, `wss`, `http` or `https`). Raises AgentLost."""
    from crow_core.acp.remote_agent import ServerRefusal, connect  # imported here because it loads uvicorn
    from websockets.exceptions import InvalidStatus, WebSocketException

    try:
        transport = await connect(url, token)
    except ServerRefusal as error:
        raise AgentLost(f"{url} {error}", agent=url) from error
    except InvalidStatus as error:
        raise AgentLost(f"{url} {ServerRefusal(error.response.status_code)}", agent=url) from error
    except (OSError, WebSocketException) as error:
        raise AgentLost(f"{url} cannot be reached: {error or type(error).__name__}.", agent=url) from error
    try:
        yield AgentConnection(transport, url, make_end(url), workspace=workspace)
    finally:
        await transport.close()
