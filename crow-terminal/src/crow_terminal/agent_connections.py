"""Connections to agents: to a command, which is started, and to an address."""

import os
from collections.abc import Awaitable, Callable, Sequence

import crow_system as system
from crow_core.acp.agent_process import start_agent_process
from crow_core.acp.transports import Transport
from msgspec import Struct


class NoAgent(Exception):
    """An agent that cannot be used; the text is a sentence for the user."""


class AgentAddress(Struct, frozen=True):
    """An agent to connect to."""

    name: str
    """The agent for people."""
    command: Sequence[str] = ()
    """Its command; empty for an address."""
    url: str = ""
    token: str = ""
    version: int = 1
    """The version of ACP to offer."""


class AgentLink(Struct):
    """An open connection to an agent."""

    transport: Transport
    describe_end: Callable[[], Awaitable[str]]
    """Makes the sentence for a connection that has ended."""


def parse_command(command: str) -> AgentAddress:
    """Return the agent of a command line. Raises NoAgent."""
    try:
        words = system.split_command(command)
    except ValueError as error:
        raise NoAgent(f"{command} cannot be started: {error}.") from error
    if not words:
        raise NoAgent("The agent's command is empty.")
    return AgentAddress(command, words)


async def connect(agent: AgentAddress, cwd: str) -> AgentLink:
    """Start an agent's command, or connect to its address. Raises NoAgent."""
    return await (connect_address(agent) if agent.url else connect_command(agent, cwd))


async def connect_command(agent: AgentAddress, cwd: str) -> AgentLink:
    try:
        process = await start_agent_process(agent.command, os.environ, cwd)
    except OSError as error:
        raise NoAgent(f"{agent.name} cannot be started: {error.strerror}.") from error
    process.name = agent.name
    return AgentLink(process, process.describe_end)


async def connect_address(agent: AgentAddress) -> AgentLink:
    from crow_core.acp.remote_agent import ServerRefusal, connect  # imported here because few connect to an address
    from websockets.exceptions import InvalidStatus, WebSocketException

    async def describe_end() -> str:
        return f"The connection to {agent.url} has ended."

    try:
        return AgentLink(await connect(agent.url, agent.token), describe_end)
    except ServerRefusal as error:
        raise NoAgent(f"{agent.url} {error}") from error
    except InvalidStatus as error:
        raise NoAgent(f"{agent.url} {ServerRefusal(error.response.status_code)}") from error
    except (OSError, WebSocketException, ValueError) as error:
        raise NoAgent(f"{agent.url} cannot be reached: {error or type(error).__name__}.") from error
