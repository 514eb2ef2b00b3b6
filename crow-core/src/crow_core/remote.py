"""An MCP server behind a URL: FastMCP's transport for it, with other limits to what one answer may be.

The SDK takes an event of a stream up to 1 MB, which is less than a picture of a screen, and a body of any length. This
brings FastMCP: import it where a server is connected.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import httpx2
from fastmcp.client.transports import StreamableHttpTransport
from fastmcp.client.transports.base import SessionKwargs, TransportOptions
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from typing_extensions import Unpack

ANSWER_LIMIT = 8 * 1024 * 1024
"""Bytes of an answer."""


class Remote(StreamableHttpTransport):
    """Streamable HTTP."""

    @asynccontextmanager
    async def connect_session(
        self, *, transport_options: TransportOptions | None = None, **session_kwargs: Unpack[SessionKwargs]
    ) -> AsyncGenerator[ClientSession]:
        options = transport_options or TransportOptions()
        client = create_mcp_http_client(dict(self.headers), None, self.auth)
        client.event_hooks = {"response": [self._capture_session_id, limit]}
        async with (
            client,
            streamable_http_client(self.url, http_client=client, max_sse_event_size=ANSWER_LIMIT) as (read, write),
            options.session_class(read, write, **session_kwargs) as session,
        ):
            yield session


async def limit(response: httpx2.Response) -> None:
    """Have a body break off where it is too long; a stream of events has no end."""
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = Limited(response.stream)


class Limited(httpx2.AsyncByteStream):
    """A body that breaks off when it is too long."""

    def __init__(self, body: httpx2.AsyncByteStream) -> None:
        self.body = body
        self.aclose = body.aclose

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self.body:
            size += len(chunk)
            if size > ANSWER_LIMIT:
                raise httpx2.StreamError(f"it has more than {ANSWER_LIMIT:,} bytes")
            yield chunk
