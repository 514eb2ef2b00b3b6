"""An app served as `crow serve` does, and proxies before it that cut connections or hold answers back."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from crow_core.acp.access_token import AccessPolicy
from crow_core.acp.websocket import WebSocketServer
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow

from crow_testing.listening import connect_to, listen

TOKEN = "a-token-of-32-characters-or-so.~"


@asynccontextmanager
async def serving(crow: Crow, max_connections: int = 8) -> AsyncGenerator[str]:
    """Serve an app as `crow serve` does, and yield its URL."""
    policy = AccessPolicy(TOKEN, {"127.0.0.1"}, {"https://editor.example"})
    server = WebSocketServer(policy, lambda wire: AcpAgent(wire, crow).serve(), max_connections)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.listen(listener)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/acp"
        finally:
            await server.close()
            await crow.shut_down()


@asynccontextmanager
async def proxying(url: str, pump: Callable[..., Any]) -> AsyncGenerator[str]:
    """Run a TCP proxy before a server. `pump(reader, writer, is_answer)` passes on the bytes of one direction."""
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with connect_to(host, port) as (there, back):
            pumps = [asyncio.ensure_future(pump(reader, back, False)), asyncio.ensure_future(pump(there, writer, True))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in pumps:
                    each.cancel()
                for each in (writer, back):
                    each.transport.abort()

    async with listen(accept) as own_port:
        yield f"http://127.0.0.1:{own_port}/acp"


def cut_after(limit: int) -> Callable[..., Any]:
    """Make a pump that cuts a connection after so many bytes of answers."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_answer: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := await reader.read(1000):
                passed += len(data)
                writer.write(data)
                await writer.drain()
                if is_answer and passed > limit:
                    return

    return pump


async def buffer_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_answer: bool) -> None:
    """Pass on bytes as a proxy that holds answers back until they end, unless the server asks it not to."""
    held, is_held = b"", False
    with suppress(OSError):
        while data := await reader.read(1000):
            held += data
            if is_answer and data.startswith(b"HTTP/1.1 "):
                is_held = b"x-accel-buffering: no" not in data and b"content-length" not in data
            if not is_held:
                writer.write(held)
                await writer.drain()
                held = b""
