"""The client's end of a conversation in bare lines: for what no well-behaved client would say."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from crow_core.acp.transports import Memory, memory_pair
from crow_core.agent import Agent, AppSource
from crow_core.app import Crow

RUBBISH = [
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
"""Lines that are no request, or one that nobody can read; none of them has an effect."""


class Wire:
    """The client's end, in lines."""

    def __init__(self, transport: Memory) -> None:
        self.transport = transport
        self.last_id = 0
        self.heard: list[dict[str, Any]] = []
        """Everything that came, in order."""

    def tell(self, method: str, params: Any) -> None:
        self.transport.write(msgspec.json.encode({"jsonrpc": "2.0", "method": method, "params": params}) + b"\n")

    def send(self, id: int | str, method: str, params: Any) -> None:
        """A request whose answer is not waited for."""
        request = {"jsonrpc": "2.0", "id": id, "method": method, "params": params}
        self.transport.write(msgspec.json.encode(request) + b"\n")

    async def ask(self, method: str, params: Any) -> dict[str, Any]:
        """The whole answer to a request, an error too."""
        self.last_id = id = self.last_id + 1
        self.send(id, method, params)
        while True:
            message = await self.hear()
            if message.get("id") == id and "method" not in message:
                return message

    async def hear(self) -> dict[str, Any]:
        self.heard.append(msgspec.json.decode(await self.transport.readline()))
        return self.heard[-1]


@asynccontextmanager
async def wired(crow: Crow | AppSource, **options: Any) -> AsyncGenerator[Wire]:
    """A conversation with an agent of this app, before `initialize`; `options` are the agent's."""
    ours, theirs = memory_pair()
    agent = Agent(theirs, crow, **options)
    serving = asyncio.ensure_future(agent.serve())
    try:
        yield Wire(ours)
    finally:
        await ours.close()
        await serving
        if agent.source.made:
            await agent.source.made.shut_down()
