"""A client that sends and receives lines, for messages that a correct client would not send."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from crow_core.acp.transports import MemoryTransport, memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.agent.app_source import AppSource
from crow_core.app import Crow

INVALID_LINES = [
    b"[]",
    b"7",
    b"null",
    b'"initialize"',
    b"{",
    b"{}",
    b"nothing",
    b"\xff\xfe\x00",
    b'{"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": "\xff"}}',
    b'{"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": "gone"}}',
    b'{"jsonrpc": "2.0", "method": "session/cancel", "params": [1]}',
    b'{"jsonrpc": "2.0", "method": "session/prompt", "params": {}}',
    b'{"jsonrpc": "2.0", "method": "$/cancel_request", "params": {"requestId": "never"}}',
    b'{"jsonrpc": "2.0", "method": "_x/y"}',
    b'{"jsonrpc": "2.0", "id": null, "result": {}}',
    b'{"jsonrpc": "2.0", "id": 12345, "error": {"code": 1, "message": "x"}}',
    b'{"jsonrpc": "2.0", "id": 12345, "error": 7}',
    b'{"jsonrpc": "1.0", "id": "old", "method": "initialize"}',
    b'{"id": {}, "jsonrpc": "2.0", "method": "initialize"}',
    b'{"id": 1.5, "jsonrpc": "2.0", "method": "initialize"}',
    b'[{"jsonrpc": "2.0", "id": "batch", "method": "initialize", "params": {"protocolVersion": 1}}]',
    b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    b"[" * 100_000,
    b'{"jsonrpc": "2.0", "method": "_x", "params": "' + b"a" * 1_000_000 + b'"}',
    b'{"jsonrpc": "2.0", "method": "session/cancel", "params": {"x": ' + b"[" * 5000 + b"]" * 5000 + b"}}",
    b" \t ",
]
"""Lines that are not valid requests. None of them has an effect."""


class RawClient:
    """The client's end of a connection, in lines."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.last_id = 0
        self.received: list[dict[str, Any]] = []
        """All received messages, oldest first."""

    def notify(self, method: str, params: Any) -> None:
        self.transport.write(msgspec.json.encode({"jsonrpc": "2.0", "method": method, "params": params}) + b"\n")

    def send(self, id: int | str, method: str, params: Any) -> None:
        """Send a request without waiting for its answer."""
        request = {"jsonrpc": "2.0", "id": id, "method": method, "params": params}
        self.transport.write(msgspec.json.encode(request) + b"\n")

    async def ask(self, method: str, params: Any) -> dict[str, Any]:
        """Send a request and return the message that answers it, which may be an error."""
        self.last_id += 1
        request_id = self.last_id
        self.send(request_id, method, params)
        while True:
            message = await self.receive()
            if message.get("id") == request_id and "method" not in message:
                return message

    async def receive(self) -> dict[str, Any]:
        self.received.append(msgspec.json.decode(await self.transport.readline()))
        return self.received[-1]


@asynccontextmanager
async def connect_raw(crow: Crow | AppSource, **options: Any) -> AsyncGenerator[RawClient]:
    """Connect to an agent of an app, before `initialize`; `options` are the agent's."""
    client_end, agent_end = memory_pair()
    agent = AcpAgent(agent_end, crow, **options)
    serving = asyncio.ensure_future(agent.serve())
    try:
        yield RawClient(client_end)
    finally:
        await client_end.close()
        await serving
        if agent.source.made:
            await agent.source.made.shut_down()
