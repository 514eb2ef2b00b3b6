"""A TCP server for a test, which leaves no connection open at its end."""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

ACCEPTING = 5
"""Steps of the event loop after which a connection that was accepted before them has called its handler."""


@asynccontextmanager
async def listen(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    *,
    at: socket.socket | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncGenerator[int]:
    """Answer each connection by `handle`, and yield the port: the one to which the socket `at` is bound, or a free one.

    At the end, handlers that still run are cancelled, and all connections are closed: the garbage collector would
    report an open one in whatever test runs then.
    """
    handlers: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        handlers.add(task)
        try:
            await handle(reader, writer)
        finally:
            writer.close()
            handlers.discard(task)

    at = at or socket.create_server(("127.0.0.1", 0))
    server = await asyncio.start_server(serve, sock=at, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for _ in range(ACCEPTING):
            await asyncio.sleep(0)
        running = [*handlers]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(0)  # the transports close their sockets in the next step


@asynccontextmanager
async def connect_to(host: str, port: int) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection, which is closed at the end."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await asyncio.sleep(0)  # the transport closes its socket in the next step
