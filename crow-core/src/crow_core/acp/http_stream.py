"""ACP over streamable HTTP, as in the protocol's draft of remote transports: the server's side.

A client posts each message. The agent's messages arrive as events: one stream for the connection, and one for each
session. An event has a number, so a client whose stream was cut goes on with `Last-Event-ID`.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from secrets import token_hex
from typing import Any

import msgspec
from msgspec import Struct
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from crow_core.acp.rpc_messages import decode_message
from crow_core.acp.transports import CLOSE_TIMEOUT, HIGH_WATER_BYTES, MAX_MESSAGE_BYTES, LineQueue, Transport

logger = logging.getLogger(__name__)

CONNECTION_HEADER, SESSION_HEADER, RESUME_HEADER = "acp-connection-id", "acp-session-id", "last-event-id"
NUMBER_HEADER = "crow-message-number"
"""Of crow alone: a client that counts its messages may post one again, and the server takes it once."""
EVENTS = "text/event-stream"
EVENT_HEADERS = [
    (b"content-type", EVENTS.encode()),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),  # a proxy passes each event on at once
]
KEEP_ALIVE = 15.0
"""Seconds without an event after which a comment is sent, so that a proxy does not take the stream for dead."""
RESUME_TIMEOUT = 60.0
"""Seconds for a client to open the stream of its connection again before the connection ends."""
KEPT_BYTES = 1024 * 1024
"""Bytes of sent events that a stream keeps for a client that comes back."""
MAX_STREAMS = 1000
"""Streams of one connection."""

LATER = {"session/load", "session/resume", "session/fork", "session/delete"}
"""Methods about a session that need no header for it: the connection need not have it yet."""
UPDATE = re.compile(rb'\{"jsonrpc":"2.0","method":"session/update","params":\{"sessionId":"([^"\\]+)"')
"""The beginning of an update as the agent encodes it."""


class SessionName(Struct, rename="camel"):
    session_id: str = ""


class OutgoingRoute(Struct):
    """The parts of a message of the agent that say which stream it belongs to."""

    method: str = ""
    id: int | str | None = None
    params: SessionName | None = None
    result: Any = None


class EventStream:
    """The events of one stream: those that are sent and kept, and those that wait."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the last event."""
        self.waiting: deque[bytes] = deque()
        self.waiting_bytes = 0
        self.sent: deque[bytes] = deque()
        self.sent_bytes = 0
        self.reader: object = None
        """The request that reads the events; None while no client does."""
        self.is_ended = False
        self.changed = asyncio.Event()

    def put(self, line: bytes) -> None:
        self.number += 1
        event = b"id: %d\ndata: %s\n" % (self.number, line)
        self.waiting.append(event)
        self.waiting_bytes += len(event)
        self.changed.set()

    def take(self) -> bytes:
        """Return all events that wait, and keep them for a while."""
        data = b"".join(self.waiting)
        self.sent += self.waiting
        self.sent_bytes += len(data)
        self.waiting.clear()
        self.waiting_bytes = 0
        while self.sent_bytes > KEPT_BYTES and len(self.sent) > 1:
            self.sent_bytes -= len(self.sent.popleft())
        return data

    def go_back(self, last: int) -> bool:
        """Let the events after a number wait again. Return whether all of them are kept."""
        again = self.number - len(self.waiting) - last
        if not 0 <= again <= len(self.sent):
            return False
        for _ in range(again):
            event = self.sent.pop()
            self.sent_bytes -= len(event)
            self.waiting.appendleft(event)
            self.waiting_bytes += len(event)
        return True

    async def wait(self, seconds: float) -> bool:
        """Wait until something has changed; return False if nothing has in this time."""
        self.changed.clear()
        timer = asyncio.get_running_loop().call_later(seconds, self.changed.set)
        await self.changed.wait()
        timer.cancel()
        return bool(self.waiting) or asyncio.get_running_loop().time() < timer.when()

    def end(self) -> None:
        """End the stream after the events that wait."""
        self.is_ended = True
        self.changed.set()


class HttpTransport:
    """The server's end of a connection over streamable HTTP."""

    def __init__(self) -> None:
        self.id = token_hex(16)
        self._incoming = LineQueue()
        self.readline = self._incoming.take
        self._loop = asyncio.get_running_loop()
        self.first_answer: asyncio.Future[bytes] = self._loop.create_future()
        """The answer to `initialize`, which no stream has."""
        self._streams = {"": EventStream()}
        """The streams by their sessions; that of the connection has no session."""
        self._asked: dict[int | str, tuple[str, str]] = {}
        """The session and the method of each request that the agent has not answered."""
        self._received = 0
        """The number of the last message of a client that counts them."""
        self._room = asyncio.Event()
        self._room.set()
        self._is_closed = False
        self._expiry = self._loop.call_later(RESUME_TIMEOUT, self.leave)

    # The agent's side: a transport

    def write(self, line: bytes) -> None:
        if self._is_closed and not self._streams:
            return
        if found := UPDATE.match(line):
            session = found[1].decode()
        elif (session := self._route(line)) is None:
            return
        stream = self._streams.get(session) or self._streams[""]
        stream.put(line)
        if stream.waiting_bytes > HIGH_WATER_BYTES:
            self._room.clear()

    def _route(self, line: bytes) -> str | None:
        """Return the session to whose stream a message belongs; None for the answer to `initialize`."""
        message = msgspec.json.decode(line, type=OutgoingRoute)
        if message.method:
            return message.params.session_id if message.params else ""
        if not self.first_answer.done():
            self.first_answer.set_result(line)
            return None
        session, method = self._asked.pop(message.id, ("", "")) if message.id is not None else ("", "")
        match message.result:
            case {"sessionId": str(opened)} if not session:
                self.open_stream(opened)
            case _:
                pass
        if method in ("session/close", "session/delete") and (stream := self._streams.pop(session, None)):
            stream.end()
            return ""
        return session

    async def drain(self) -> None:
        if self._is_closed:
            raise BrokenPipeError("the client has ended the connection")
        await self._room.wait()

    async def close(self) -> None:
        """End the streams after the events that wait, and let their clients have them for a moment."""
        self._is_closed = True
        self._expiry.cancel()
        self._incoming.close()
        self._room.set()
        if not self.first_answer.done():
            self.first_answer.cancel()
        for stream in self._streams.values():
            stream.end()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                while any(stream.reader for stream in self._streams.values()):
                    await asyncio.sleep(0.01)
        self._streams.clear()

    async def probe(self) -> bool:
        """Tell whether the client reads the stream of the connection."""
        return self._streams[""].reader is not None

    # The client's side: its requests

    def receive(self, line: bytes, session: str, method: str, id: Any, number: int = 0) -> None:
        """Pass a message of the client on to the agent; not one whose number it has had."""
        if 0 < number <= self._received:
            return
        self._received = max(number, self._received)
        if method and isinstance(id, int | str):
            self._asked[id] = session, method
        self._incoming.put(line)

    def leave(self) -> None:
        """End the connection, as if the client had closed a socket."""
        self._incoming.close()

    def open_stream(self, session: str) -> EventStream | None:
        """Return the stream of a session; None if there are too many. A client may open it before the session is."""
        if session not in self._streams and len(self._streams) >= MAX_STREAMS:
            return None
        return self._streams.setdefault(session, EventStream())

    async def send_events(self, stream: EventStream, receive: Receive, send: Send) -> None:
        """Send the events of a stream until it ends, the client leaves, or the client opens the stream anew."""
        stream.reader = me = object()
        is_main = stream is self._streams.get("")
        if is_main:
            self._expiry.cancel()
        leaving = asyncio.ensure_future(wait_for_end(receive))
        leaving.add_done_callback(lambda _: stream.changed.set())
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        await send(to_body(b": open\n\n"))
        try:
            while stream.reader is me and not leaving.done():
                if stream.waiting:
                    await send(to_body(stream.take()))
                    self._make_room()
                elif stream.is_ended:
                    break
                elif not await stream.wait(KEEP_ALIVE):
                    await send(to_body(b": alive\n\n"))
        finally:
            leaving.cancel()
            if stream.reader is me:
                stream.reader = None
                if is_main and not self._is_closed:
                    self._expiry = self._loop.call_later(RESUME_TIMEOUT, self.leave)
        await send({"type": "http.response.body", "body": b""})

    def _make_room(self) -> None:
        if all(stream.waiting_bytes <= HIGH_WATER_BYTES for stream in self._streams.values()):
            self._room.set()


def to_body(data: bytes) -> dict[str, Any]:
    """Make the ASGI message for a part of a body."""
    return {"type": "http.response.body", "body": data, "more_body": True}


async def wait_for_end(receive: Receive) -> None:
    """Wait until the client of a request has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class HttpRefusal(Exception):
    """A request that is refused, with the status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class HttpConnections:
    """The connections of a server over streamable HTTP."""

    def __init__(self, serve_client: Callable[[Transport], Awaitable[Any]]) -> None:
        self._serve_client = serve_client
        self._connections: dict[str, tuple[HttpTransport, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        return len(self._connections)

    async def close(self) -> None:
        """Cancel the work for all clients, and wait until it has ended."""
        if tasks := [task for _, task in self._connections.values()]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of a client that may connect."""
        headers = Headers(scope=scope)
        try:
            match scope["method"]:
                case "POST":
                    response = await self._post(headers, receive)
                case "GET":
                    transport, stream = self._find_stream(headers)
                    await transport.send_events(stream, receive, send)
                    return
                case _:
                    await self._delete(self._find(headers))
                    response = Response(status_code=202)
        except HttpRefusal as refusal:
            response = PlainTextResponse(f"{refusal}\n", refusal.status)
        await response(scope, receive, send)

    async def _post(self, headers: Headers, receive: Receive) -> Response:
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HttpRefusal(415, "Post messages as application/json.")
        body = await read_body(receive)
        try:
            message = decode_message(body)
            session = find_session(message.params)
        except (ValueError, RecursionError) as error:
            status = 501 if body.lstrip()[:1] == b"[" else 400
            raise HttpRefusal(status, f"This is not one message of JSON-RPC: {error}") from error
        method = message.method if isinstance(message.method, str) else ""
        line, id = body.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n", message.id
        if CONNECTION_HEADER not in headers and method == "initialize":
            return await self._initialize(line, id)
        transport, named = self._find(headers), headers.get(SESSION_HEADER, "")
        if session and method not in LATER and named != session:
            raise HttpRefusal(400, f"Send the session of this message in the header {SESSION_HEADER}.")
        number = headers.get(NUMBER_HEADER, "")
        transport.receive(line, named or session, method, id, int(number) if number.isdecimal() else 0)
        return Response(status_code=202)

    async def _initialize(self, line: bytes, id: Any) -> Response:
        transport = HttpTransport()
        task = asyncio.ensure_future(self._serve(transport))
        self._connections[transport.id] = transport, task
        transport.receive(line, "", "initialize", id)
        try:
            answer = await transport.first_answer
        except asyncio.CancelledError:
            if not transport.first_answer.cancelled():
                transport.leave()
                raise
            raise HttpRefusal(503, "The agent has ended the connection.") from None
        known = {CONNECTION_HEADER: transport.id, NUMBER_HEADER: "0"}
        return Response(answer, media_type="application/json", headers=known)

    async def _delete(self, transport: HttpTransport) -> None:
        """End a connection, and wait until its sessions are stored."""
        _, task = self._connections[transport.id]
        transport.leave()
        await asyncio.wait([task], timeout=2 * CLOSE_TIMEOUT)

    async def _serve(self, transport: HttpTransport) -> None:
        try:
            await self._serve_client(transport)
        except Exception:  # must not affect other connections
            logger.exception("A connection failed")
        finally:
            await transport.close()
            self._connections.pop(transport.id, None)

    def _find(self, headers: Headers) -> HttpTransport:
        """Find the connection that a request names. Raises HttpRefusal."""
        if not (id := headers.get(CONNECTION_HEADER, "")):
            raise HttpRefusal(400, f"Send the id of your connection in the header {CONNECTION_HEADER}.")
        if id not in self._connections:
            raise HttpRefusal(404, "There is no such connection. Begin a new one with initialize.")
        return self._connections[id][0]

    def _find_stream(self, headers: Headers) -> tuple[HttpTransport, EventStream]:
        """Find the stream that a request reads, at the event after the last that it names. Raises HttpRefusal."""
        if CONNECTION_HEADER in headers and EVENTS not in headers.get("accept", ""):
            raise HttpRefusal(406, f"Accept {EVENTS}.")
        transport = self._find(headers)
        stream = transport.open_stream(headers.get(SESSION_HEADER, ""))
        if stream is None:
            raise HttpRefusal(404, "This connection has too many sessions.")
        last = headers.get(RESUME_HEADER, "")
        if last and not (last.isascii() and last.isdigit() and stream.go_back(int(last))):
            raise HttpRefusal(410, "The events after this one are gone. Connect again, and load your sessions.")
        return transport, stream


async def read_body(receive: Receive) -> bytes:
    """Read the body of a request. Raises HttpRefusal."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpRefusal(400, "The request was not finished.")
        body += message.get("body", b"")
        if len(body) > MAX_MESSAGE_BYTES:
            raise HttpRefusal(413, f"A message may have {MAX_MESSAGE_BYTES >> 20} MiB.")
        if not message.get("more_body"):
            return bytes(body)


def find_session(params: Any) -> str:
    """Return the session that the params of a message name; the empty text if they name none."""
    try:
        return msgspec.json.decode(params, type=SessionName).session_id
    except (msgspec.ValidationError, TypeError):
        return ""
