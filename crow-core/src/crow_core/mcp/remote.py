"""Transports for MCP servers behind a URL, with crow's own limits to the size and time of an answer.

The SDK accepts events of up to 1 MB, which is less than a screenshot, and bodies of any size.
It gives up a stream that is silent for five minutes. Importing this module imports FastMCP.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import msgspec
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from typing_extensions import Unpack

from crow_core.mcp.sdk import SessionKwargs, StreamableHttpTransport, TransportOptions
from crow_core.mcp.stdio import LINE_LIMIT, IncomingLine

EVENT_LIMIT = 1_000_000
"""Bytes of an answer over the old SSE transport; the SDK accepts events of up to 1 MiB there."""
HTTP_TIMEOUT = httpx2.Timeout(30.0, read=None)
"""Seconds to connect and to send. Reading has no limit: each tool call has its own timeout."""


class RequestHead(msgspec.Struct):
    """The fields of a request that tell whether it is a tool call."""

    id: int | str | None = None
    method: str = ""


@dataclass(eq=False)
class HttpClientFactory:
    """Makes the HTTP clients of one server, which shorten answers that are too long."""

    folder: Callable[[], Path | None]
    """Returns the folder for answers that are too long; None discards them."""
    add_secret: Callable[[str], None]
    """Called with each value of the header `Authorization` that is sent."""
    limit: int = LINE_LIMIT
    """Bytes of an answer; a longer one is shortened."""
    calls: set[int | str] = field(default_factory=set[int | str])
    """The ids of the tool calls whose answers have not been shortened."""

    def __call__(
        self,
        headers: dict[str, str] | None = None,
        timeout: httpx2.Timeout | None = None,
        auth: httpx2.Auth | None = None,
    ) -> httpx2.AsyncClient:
        client = httpx2.AsyncClient(headers=headers, timeout=HTTP_TIMEOUT, auth=auth)
        client.headers["Accept-Encoding"] = "identity"  # a small compressed body may have no end when it is unpacked
        client.event_hooks = {"request": [self.inspect_request], "response": [self.shorten_response]}
        return client

    async def inspect_request(self, request: httpx2.Request) -> None:
        """Note the credentials and the id of a tool call."""
        if authorization := request.headers.get("authorization"):
            self.add_secret(authorization)
        with suppress(msgspec.MsgspecError):
            head = msgspec.json.decode(request.content, type=RequestHead)
            if head.method == "tools/call" and head.id is not None:
                self.calls.add(head.id)

    async def shorten_response(self, response: httpx2.Response) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = ShortenedBody(response.stream, response.headers, self)


class UrlTransport(StreamableHttpTransport):
    """Streamable HTTP with a client that shortens long answers, and a larger limit for events."""

    def __init__(self, url: str, headers: dict[str, str], auth: httpx2.Auth, http: HttpClientFactory) -> None:
        super().__init__(url, headers, auth)
        self.http = http

    @asynccontextmanager
    async def connect_session(
        self, *, transport_options: TransportOptions | None = None, **session_kwargs: Unpack[SessionKwargs]
    ) -> AsyncGenerator[ClientSession]:
        options = transport_options or TransportOptions()
        client = self.http(dict(self.headers), None, self.auth)
        async with (
            client,
            streamable_http_client(self.url, http_client=client, max_sse_event_size=2 * LINE_LIMIT) as (read, write),
            options.session_class(read, write, **session_kwargs) as session,
        ):
            yield session


class ShortenedBody(httpx2.AsyncByteStream):
    """A response body in which each answer that is too long is replaced by a shorter one."""

    def __init__(self, body: httpx2.AsyncByteStream, headers: httpx2.Headers, http: HttpClientFactory) -> None:
        self.body = body
        self.aclose = body.aclose
        self.http = http
        self.encoding = headers.get("content-encoding", "identity")
        self.is_stream = headers.get("content-type", "").lower().startswith("text/event-stream")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self.encoding != "identity":
            raise httpx2.StreamError(f"it is compressed ({self.encoding}), which nobody asked for")
        line = self.make_line()
        try:
            async for chunk in self.body:
                *ends, rest = chunk.split(b"\n") if self.is_stream else [chunk]
                for end in ends:
                    await line.add(end)
                    yield self.to_bytes(line) + b"\n"
                    line = self.make_line()
                await line.add(rest)
            yield self.to_bytes(line)
        finally:
            line.discard()

    def make_line(self) -> IncomingLine:
        return IncomingLine(self.http.limit, self.http.folder)

    def to_bytes(self, line: IncomingLine) -> bytes:
        """Return a line of a stream, or a whole body, or its replacement if it is too long.

        Raises StreamError if a body has no replacement.
        """
        if not line.is_too_long:
            return bytes(line.start)
        if (replacement := line.to_replacement(self.http.calls)) is not None:
            text = replacement.model_dump_json(by_alias=True, exclude_unset=True).encode()
            return b"data: " + text if self.is_stream else text
        if self.is_stream:
            return b": something too long"  # a comment
        raise httpx2.StreamError(f"it has more than {self.http.limit:,} bytes")
