"""ACP over WebSocket, where each message is a text frame, as in the protocol's draft of remote transports.

`WebSocketServer` accepts clients that know the token, and gives each a transport. It serves streamable HTTP at the same
path, too (`http_stream.py`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from secrets import token_hex
from socket import socket
from typing import Any, Protocol, cast

from h11 import Request
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame

from crow_core.acp import http_stream
from crow_core.acp.access_token import SUBPROTOCOL, AccessPolicy
from crow_core.acp.transports import CLOSE_TIMEOUT, MAX_MESSAGE_BYTES, LineQueue, Transport

logger = logging.getLogger(__name__)

PATH = "/acp"
"""The path of the URL that serves ACP."""

HANDSHAKE_TIMEOUT = 10.0
"""Seconds from the TCP connection until the WebSocket must be open."""

BINARY_REASON = "ACP messages are text frames"
"""The reason with which a connection is closed after a binary frame, with the code 1003."""

PING_INTERVAL, PONG_TIMEOUT = 10.0, 30.0
"""Seconds between pings, and seconds without an answer or other data before the connection is closed."""

PROBE_TIMEOUT = 5.0
"""Seconds to wait for an answer to a ping before another connection may take over the sessions of this one."""

MAX_SOCKETS_PER_CLIENT = 16
"""Sockets that a client has on average at most: over HTTP/1.1, each stream of events needs one."""

ACCEPT = "crow.accept"
"""The name under which the scope of a request holds a function that keeps its socket open."""

PROBE = "crow.probe"
"""The name under which the scope of a connection holds a function that tells whether the client still answers."""

MAX_PENDING_SOCKETS = 100
"""Open sockets beyond those of accepted clients; for a further one, the oldest is closed."""

MAX_UNREAD_BYTES = 1024 * 1024
"""Bytes of the write buffer, filled by pongs, above which a client that does not read is disconnected."""


class TextSocket(Protocol):
    """The operations of an open WebSocket that the transport uses."""

    async def receive(self) -> bytes | None:
        """Return the next text; None at the end, and after a binary frame, which closes the WebSocket."""
        ...

    async def send(self, text: bytes) -> None:
        """Send a text and wait until there is room for it. Raises OSError if the connection was closed."""
        ...

    async def close(self) -> None: ...


class WebSocketTransport:
    """A transport over a WebSocket."""

    def __init__(self, socket: TextSocket, probe: Callable[[], Awaitable[bool]] | None = None) -> None:
        self._socket = socket
        self.probe = probe
        """Tells whether the other side still answers, within a few seconds; None if that cannot be asked."""
        self._outgoing = LineQueue()
        self.write, self.drain = self._outgoing.write, self._outgoing.drain
        self._sending = asyncio.ensure_future(self._send())
        self._closed = False

    async def readline(self) -> bytes:
        while (text := await self._socket.receive()) is not None:
            if text:
                return text
        return b""

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._outgoing.close()
        try:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await asyncio.wait([self._sending])
                    await self._socket.close()
        finally:
            self._sending.cancel()

    async def _send(self) -> None:
        try:
            while line := await self._outgoing.take():
                await self._socket.send(line[:-1])
        except OSError:
            self._outgoing.close()  # `drain` reports it


class ServerSocket:
    """The server's end of a WebSocket, as ASGI messages."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send

    async def receive(self) -> bytes | None:
        message = await self._receive()
        if message["type"] == "websocket.receive":
            if (text := message.get("text")) is not None:
                return text.encode()
            with suppress(OSError):  # the client has left
                await self._close(CloseCode.UNSUPPORTED_DATA, BINARY_REASON)
        return None

    async def send(self, text: bytes) -> None:
        await self._send_message({"type": "websocket.send", "text": text.decode()})

    async def close(self) -> None:
        await self._close(CloseCode.GOING_AWAY, "The agent is going away")

    async def _close(self, code: int, reason: str) -> None:
        await self._send_message({"type": "websocket.close", "code": code, "reason": reason})

    async def _send_message(self, message: Message) -> None:
        try:
            await self._send(message)
        except RuntimeError as error:  # uvicorn raises it after its own close
            raise BrokenPipeError(str(error)) from error


class WebSocketServer:
    """Serves ACP over WebSocket and streamable HTTP at PATH, with one transport per client; refuses other requests
    with a reason."""

    def __init__(
        self, policy: AccessPolicy, serve_client: Callable[[Transport], Awaitable[Any]], max_connections: int
    ) -> None:
        """Call `serve_client` for each client; the connection ends when it returns, and `close` cancels it."""
        self._policy = policy
        self._serve_client = serve_client
        self._max_connections = max_connections
        self._connections = 0
        self._http = http_stream.HttpConnections(serve_client)
        self._state = ServerState()
        self._pending: dict[HttpProtocol, None] = {}
        """The connections that are not a WebSocket yet, oldest first."""
        self._config = Config(
            self,
            interface="asgi3",
            lifespan="off",
            ws=WebSocketProtocol,
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_ping_interval=PING_INTERVAL,
            ws_ping_timeout=PONG_TIMEOUT,
            ws_per_message_deflate=False,
            limit_concurrency=max_connections * MAX_SOCKETS_PER_CLIENT + MAX_PENDING_SOCKETS,
            proxy_headers=False,
            log_config=None,
            access_log=False,
        )

    async def listen(self, listener: socket) -> None:
        """Start to serve the clients that connect to this socket."""
        # uvicorn.Server would handle the process's signals and close connections before their tasks have ended.
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: HttpProtocol(self._config, self._state, self._pending), sock=listener
        )

    async def close(self) -> None:
        """Stop listening, cancel the clients' tasks, wait for them, and close all sockets."""
        self._listener.close()
        await self._http.close()
        if tasks := list(self._state.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # the transports close their sockets in the loop's next iteration
        await self._listener.wait_closed()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if refusal := self._check(scope):
            status, reason = refusal
            headers = {401: {"www-authenticate": "Bearer"}, 405: {"allow": "GET, POST, DELETE"}}
            await PlainTextResponse(f"{reason}\n", status, headers.get(status))(scope, receive, send)
            return
        if scope["type"] == "http":
            scope["extensions"][ACCEPT]()
            await self._http.answer(scope, receive, send)
            return
        self._connections += 1
        try:
            with suppress(OSError):  # the client may be gone; then `serve_client` ends soon
                await self._accept(scope, receive, send)
            probe = scope["extensions"][PROBE]
            await self._serve_client(WebSocketTransport(ServerSocket(receive, send), probe))
        except Exception:  # must not affect other connections
            logger.exception("A connection failed")
        finally:
            self._connections -= 1

    def _check(self, scope: Scope) -> tuple[int, str] | None:
        if refusal := self._policy.check(scope):
            return refusal
        if scope["path"] != PATH:
            return 404, f"ACP is at {PATH}."
        if scope["type"] == "http" and scope["method"] not in ("GET", "POST", "DELETE"):
            return 405, "ACP is spoken by GET, POST and DELETE, or over WebSocket."
        count = self._connections + len(self._http)
        is_new = scope["type"] == "websocket" or not Headers(scope=scope).get(http_stream.CONNECTION_HEADER)
        if is_new and count >= self._max_connections:
            return 503, f"{count} clients are connected, which is the limit."
        return None

    async def _accept(self, scope: Scope, receive: Receive, send: Send) -> None:
        chosen = SUBPROTOCOL if SUBPROTOCOL in scope["subprotocols"] else None
        headers = [(b"acp-connection-id", token_hex(16).encode())]
        await receive()
        await send({"type": "websocket.accept", "subprotocol": chosen, "headers": headers})


SILENT_LOGGER = logging.Logger("uvicorn", logging.CRITICAL + 1)
"""Discards uvicorn's messages about bad requests and lost connections, which may contain tokens."""


class HttpProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, which aborts connections whose first request is not accepted in time.

    If too many wait, the oldest one is aborted, so that half-open ones do not keep a client out.
    """

    def __init__(self, config: Config, state: ServerState, pending: "dict[HttpProtocol, None]") -> None:
        super().__init__(config, state, {})
        self.pending = pending

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.logger = SILENT_LOGGER
        self.pending[self] = None
        if len(self.pending) > MAX_PENDING_SOCKETS:
            next(iter(self.pending)).abort_handshake()
        self.handshake_timer = self.loop.call_later(HANDSHAKE_TIMEOUT, self.abort_handshake)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.pending.pop(self, None)
        self.handshake_timer.cancel()

    def handle_events(self) -> None:
        super().handle_events()
        if scope := cast("dict[str, Any] | None", self.scope):
            scope["extensions"] = {**(scope.get("extensions") or {}), ACCEPT: self.accept}

    def accept(self) -> None:
        """Keep the socket: a request on it has the token."""
        self.pending.pop(self, None)
        self.handshake_timer.cancel()

    def handle_websocket_upgrade(self, event: Request) -> None:
        self.pending.pop(self, None)
        super().handle_websocket_upgrade(event)

    def abort_handshake(self) -> None:
        self.pending.pop(self, None)
        self.connections.discard(self)  # it counts no longer, also before it is closed
        if self.transport.get_protocol() is self:  # otherwise it has become a WebSocket
            self.transport.abort()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol, which sends the reason of a close and aborts connections that stay open."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.logger = SILENT_LOGGER
        self.close_timeout = CLOSE_TIMEOUT
        self.lost_event = asyncio.Event()
        self.fragments = bytearray()
        self.answered = asyncio.Event()
        self.received_at = self.loop.time()

    def data_received(self, data: bytes) -> None:
        self.received_at = self.loop.time()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost_event.set()

    async def run_asgi(self) -> None:
        scope: dict[str, Any] = cast("dict[str, Any]", self.scope)
        scope["extensions"] = {**(scope.get("extensions") or {}), PROBE: self.probe}
        await super().run_asgi()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.lost_event.wait(), CLOSE_TIMEOUT)
        self.transport.abort()

    async def probe(self) -> bool:
        """Return whether the client answers a ping in time; if not, abort the connection."""
        self.answered.clear()
        if self.pending_ping_payload is None:
            self.stop_keepalive()
            self.send_keepalive_ping()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.answered.wait(), PROBE_TIMEOUT)
            return True
        self.transport.abort()
        return False

    def handle_pong(self, event: Frame) -> None:
        self.answered.set()
        super().handle_pong(event)

    def keepalive_timeout(self) -> None:
        if (silence := self.loop.time() - self.received_at) < PONG_TIMEOUT:  # a long message delays the answer
            self.pong_timer = self.loop.call_later(PONG_TIMEOUT - silence, self.keepalive_timeout)
            return
        super().keepalive_timeout()
        self.loop.call_later(CLOSE_TIMEOUT, self.transport.abort)

    def handle_cont(self, event: Frame) -> None:
        """Join the fragments of a message as they arrive: a list of small ones takes thirty times the memory."""
        if self.frames:
            self.fragments = bytearray(self.frames.pop())
        self.fragments += event.data
        if event.fin:
            self.frames = [bytes(self.fragments)]
            self.fragments.clear()
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        super().handle_ping()
        if self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.transport.abort()

    def handle_parser_exception(self) -> None:
        """Send the reason and close after a delay.

        After an immediate close, the data that the client still sends would reset the connection, and the client would
        not receive the reason.
        """
        if self.close_sent:
            return
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": 1006})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)
