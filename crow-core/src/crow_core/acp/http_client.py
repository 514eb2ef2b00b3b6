"""ACP over streamable HTTP: the client's side. Messages are posted in order; events are read from streams.

A stream that is cut is opened again, and goes on after the last event that arrived.
"""

import asyncio
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import httpx2
import msgspec

from crow_core.acp.http_stream import (
    CONNECTION_HEADER,
    EVENTS,
    NUMBER_HEADER,
    RESUME_HEADER,
    RESUME_TIMEOUT,
    SESSION_HEADER,
    OutgoingRoute,
)
from crow_core.acp.transports import CLOSE_TIMEOUT, MAX_MESSAGE_BYTES, LineQueue

CONNECT_TIMEOUT = 30.0
"""Seconds to connect and to send a message."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two attempts to reach the server again, at first and at most."""
GONE = (401, 403, 404, 410)
"""Statuses that say that the connection has ended."""


class HttpClientTransport:
    """A client's transport over streamable HTTP."""

    probe = None

    def __init__(self, url: str, client: httpx2.AsyncClient) -> None:
        self._url = url
        self._client = client
        self._incoming = LineQueue()
        self.readline = self._incoming.take
        self._outgoing = LineQueue()
        self.write, self.drain = self._outgoing.write, self._outgoing.drain
        self._id = ""
        self._streams: dict[str, asyncio.Event] = {}
        """The streams by their sessions, each with an event that is set when it is open."""
        self._questions: dict[int | str, str] = {}
        """The sessions of the agent's requests that are not answered."""
        self._posted = 0
        self._repeats = False
        """True if the server ignores a message that it has got already."""
        self._tasks = {asyncio.ensure_future(self._post_all())}
        self._is_closed = False

    async def greet(self) -> int:
        """Ask the server for a connection that does not exist; return the status. Raises httpx2.HTTPError."""
        return (await self._client.get(self._url, headers={"accept": EVENTS})).status_code

    async def close(self) -> None:
        """Post what waits, then end the connection."""
        if self._is_closed:
            return
        self._is_closed = True
        self._outgoing.close()
        with suppress(TimeoutError, httpx2.HTTPError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await asyncio.wait([task for task in self._tasks if task.get_name() == "post"])
                if self._id:
                    await self._client.delete(self._url, headers={CONNECTION_HEADER: self._id})
        self._end()
        await asyncio.wait(self._tasks)
        await self._client.aclose()

    def _end(self) -> None:
        """End the connection: nothing more arrives, and nothing more is sent."""
        self._incoming.close()
        self._outgoing.close()
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    # Messages to the agent

    async def _post_all(self) -> None:
        """Post the messages that are written, one after the other."""
        task = asyncio.current_task()
        assert task
        task.set_name("post")
        try:
            while line := await self._outgoing.take():
                await (self._post(line) if self._id else self._initialize(line))
        except httpx2.HTTPError:
            self._end()

    async def _initialize(self, line: bytes) -> None:
        headers = {"content-type": "application/json"}
        response = await self._client.post(self._url, content=line, headers=headers, timeout=None)
        response.raise_for_status()
        self._id, self._repeats = response.headers.get(CONNECTION_HEADER, ""), NUMBER_HEADER in response.headers
        if not self._id:
            raise httpx2.RemoteProtocolError("the answer to initialize has no id of a connection")
        self._open("")
        self._receive(response.content, "")

    async def _post(self, line: bytes) -> None:
        message = msgspec.json.decode(line, type=OutgoingRoute)
        session = message.params.session_id if message.params else ""
        if not message.method and message.id is not None:
            session = self._questions.pop(message.id, "")
        if session and session not in self._streams and message.method not in ("session/delete", "session/fork"):
            self._open(session)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._streams[session].wait(), CONNECT_TIMEOUT)
        self._posted += 1
        headers = {"content-type": "application/json", **self._make_headers(session), NUMBER_HEADER: str(self._posted)}
        response = await self._send(line, headers)
        if response.status_code in GONE:
            self._end()
        elif response.is_error and message.method and message.id is not None:
            why = f"The server answered with the status {response.status_code}"
            error = {"code": -32603, "message": f"{why}: {response.text[:200].strip()}"}
            self._incoming.put(msgspec.json.encode({"jsonrpc": "2.0", "id": message.id, "error": error}))

    async def _send(self, line: bytes, headers: dict[str, str]) -> httpx2.Response:
        """Post a message; again, if the connection was cut and the server knows what it has got. Raises HTTPError."""
        pause, loop = FIRST_PAUSE, asyncio.get_running_loop()
        end = loop.time() + RESUME_TIMEOUT
        while True:
            try:
                return await self._client.post(self._url, content=line, headers=headers)
            except httpx2.TransportError as error:
                is_unsent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
                if not (is_unsent or self._repeats) or loop.time() > end:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _make_headers(self, session: str) -> dict[str, str]:
        return {CONNECTION_HEADER: self._id, **({SESSION_HEADER: session} if session else {})}

    # Events of the agent

    def _open(self, session: str) -> None:
        if session not in self._streams and not self._incoming.closed:
            self._streams[session] = asyncio.Event()
            task = asyncio.ensure_future(self._read_all(session))
            self._tasks.add(task)

    async def _read_all(self, session: str) -> None:
        """Read the stream of a session, and open it again when it is cut."""
        last, pause, loop = "", FIRST_PAUSE, asyncio.get_running_loop()
        end = loop.time() + RESUME_TIMEOUT
        while True:
            headers = {"accept": EVENTS, **self._make_headers(session), **({RESUME_HEADER: last} if last else {})}
            try:
                async with self._client.stream("GET", self._url, headers=headers) as response:
                    if response.status_code in GONE:
                        break
                    response.raise_for_status()
                    self._streams[session].set()
                    async for event in httpx2.EventSource(response, MAX_MESSAGE_BYTES):
                        last, pause, end = event.id, FIRST_PAUSE, loop.time() + RESUME_TIMEOUT
                        if event.data:
                            self._receive(event.data.encode(), session)
                            await self._incoming.writable.wait()
            except httpx2.HTTPError:
                pass
            if loop.time() > end:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        if not session:
            self._end()

    def _receive(self, line: bytes, session: str) -> None:
        """Pass on a message of the agent; open the stream of a session that it names first."""
        if b'"update"' not in line[:120]:
            message = msgspec.json.decode(line, type=OutgoingRoute)
            match message.result:
                case {"sessionId": str(opened)}:
                    self._open(opened)
                case _:
                    pass
            if message.method and message.id is not None:
                self._questions[message.id] = session
        if not self._incoming.closed:
            self._incoming.put(line)


def connect_http(url: str, token: str = "") -> HttpClientTransport:
    """Make a transport to an agent at an `http://` or `https://` address. Nothing is sent yet."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    timeout: Any = httpx2.Timeout(CONNECT_TIMEOUT, read=None)
    # HTTP/2 is used where the package for it is installed and the server, or a proxy before it, offers it.
    has_http2 = find_spec("h2") is not None
    limits = httpx2.Limits(max_connections=None)
    return HttpClientTransport(
        url, httpx2.AsyncClient(headers=headers, timeout=timeout, limits=limits, http2=has_http2)
    )
