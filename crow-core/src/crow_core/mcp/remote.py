"""An MCP server behind a URL: FastMCP's transports for it, with other limits to how long an answer may be, or take.

The SDK takes an event of a stream up to 1 MB, which is less than a picture of a screen, a body of any length, and gives
up a stream in which nothing comes for five minutes. This brings FastMCP: import it where a server is connected.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import msgspec
from fastmcp.client.transports import StreamableHttpTransport
from fastmcp.client.transports.base import SessionKwargs, TransportOptions
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from typing_extensions import Unpack

from crow_core.mcp.stdio import LINE_LIMIT, Line

EVENT_LIMIT = 1_000_000
"""Bytes of an answer over the old SSE transport, whose events the SDK takes up to 1 MiB."""
PATIENCE = httpx2.Timeout(30.0, read=None)
"""Seconds to connect, and to send; how long an answer may take is for those to say who wait for it."""


class Request(msgspec.Struct):
    """What is looked at of a request."""

    id: int | str | None = None
    method: str = ""


@dataclass(eq=False)
class Http:
    """Makes the HTTP clients of one server."""

    folder: Callable[[], Path | None]
    """Gives where answers are kept that are too long to be read; None keeps none."""
    learn: Callable[[str], None]
    """Told what the server is shown as `Authorization`."""
    limit: int = LINE_LIMIT
    """Bytes of an answer that is not too long."""
    calls: set[int | str] = field(default_factory=set[int | str])
    """The ids of the tool calls that have not been answered at too great a length."""

    def __call__(
        self,
        headers: dict[str, str] | None = None,
        timeout: httpx2.Timeout | None = None,
        auth: httpx2.Auth | None = None,
    ) -> httpx2.AsyncClient:
        client = create_mcp_http_client(headers, PATIENCE, auth)
        client.headers["Accept-Encoding"] = "identity"  # a little that is compressed may be without end
        client.event_hooks = {"request": [self.look], "response": [self.shorten]}
        return client

    async def look(self, request: httpx2.Request) -> None:
        if told := request.headers.get("authorization"):
            self.learn(told)
        with suppress(msgspec.MsgspecError):
            asked = msgspec.json.decode(request.content, type=Request)
            if asked.method == "tools/call" and asked.id is not None:
                self.calls.add(asked.id)

    async def shorten(self, response: httpx2.Response) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = Short(response.stream, response.headers, self)


class Remote(StreamableHttpTransport):
    """Streamable HTTP."""

    def __init__(self, url: str, headers: dict[str, str], auth: httpx2.Auth, http: Http) -> None:
        super().__init__(url, headers, auth)
        self.http = http

    @asynccontextmanager
    async def connect_session(
        self, *, transport_options: TransportOptions | None = None, **session_kwargs: Unpack[SessionKwargs]
    ) -> AsyncGenerator[ClientSession]:
        options = transport_options or TransportOptions()
        client = self.http(dict(self.headers), None, self.auth)
        client.event_hooks["response"].append(self._capture_session_id)
        async with (
            client,
            streamable_http_client(self.url, http_client=client, max_sse_event_size=2 * LINE_LIMIT) as (read, write),
            options.session_class(read, write, **session_kwargs) as session,
        ):
            yield session


class Short(httpx2.AsyncByteStream):
    """A body in which something shorter stands for an answer that is too long."""

    def __init__(self, body: httpx2.AsyncByteStream, headers: httpx2.Headers, http: Http) -> None:
        self.body = body
        self.aclose = body.aclose
        self.http = http
        self.encoding = headers.get("content-encoding", "identity")
        self.is_stream = headers.get("content-type", "").lower().startswith("text/event-stream")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self.encoding != "identity":
            raise httpx2.StreamError(f"it is compressed ({self.encoding}), which nobody asked for")
        line = self.line()
        try:
            async for chunk in self.body:
                *ends, begun = chunk.split(b"\n") if self.is_stream else [chunk]
                for end in ends:
                    await line.add(end)
                    yield self.told(line) + b"\n"
                    line = self.line()
                await line.add(begun)
            yield self.told(line)
        finally:
            line.discard()

    def line(self) -> Line:
        return Line(self.http.limit, self.http.folder)

    def told(self, line: Line) -> bytes:
        """What is handed on of a line, or of a body. Raises StreamError where nothing can stand for it."""
        if not line.too_long:
            return bytes(line.begun)
        if (instead := line.instead(self.http.calls)) is not None:
            text = instead.model_dump_json(by_alias=True, exclude_unset=True).encode()
            return b"data: " + text if self.is_stream else text
        if self.is_stream:
            return b": something too long"  # a comment
        raise httpx2.StreamError(f"it has more than {self.http.limit:,} bytes")
