"""ACP over WebSocket: every message is one text frame, as the protocol's draft of remote transports has it.

`connect` is a client's way to an agent; `Server` lets those in who know the token, and gives each a transport.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hmac import compare_digest
from ipaddress import ip_address
from re import fullmatch
from secrets import token_hex
from socket import socket
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as dial
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame

from crow_core.acp.transports import GRACE, MAX_MESSAGE, Channel, Transport

logger = logging.getLogger(__name__)

PATH = "/acp"

SUBPROTOCOL = "acp"
"""What a client that has to offer its token as a subprotocol offers beside it, to be chosen."""

HANDSHAKE = 10.0
"""Seconds that somebody who has connected may take to be let in."""

PING, PONG = 20.0, 60.0
"""Seconds between two pings, and those after which a client that did not answer one is gone."""

WAITING_ROOM = 100
"""Sockets, beyond those of clients that were let in, that may be open at once."""

MAX_UNREAD = 1024 * 1024
"""Bytes of pongs and the like that may wait for a client that sends pings and does not read."""


class Socket(Protocol):
    """An open WebSocket, as far as a transport needs it."""

    async def receive(self) -> bytes | None:
        """The next text; None at the end. Binary frames are ignored."""
        ...

    async def send(self, text: bytes) -> None:
        """Send a text, when there is room. Raises OSError once the other side is gone."""
        ...

    async def close(self) -> None:
        """Say goodbye, if anyone listens."""
        ...


class Frames:
    """The transport over a WebSocket."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._outgoing = Channel()
        self._sending = asyncio.ensure_future(self._send())
        self._closed = False

    async def readline(self) -> bytes:
        while (text := await self._socket.receive()) is not None:
            if text:
                return text
        return b""

    def write(self, line: bytes) -> None:
        if not self._outgoing.closed:
            self._outgoing.put(line)

    async def drain(self) -> None:
        await self._outgoing.writable.wait()
        if self._outgoing.closed:
            raise BrokenPipeError("the WebSocket is closed")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._outgoing.close()
        try:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(GRACE):
                    await asyncio.wait([self._sending])
                    await self._socket.close()
        finally:
            self._sending.cancel()

    async def _send(self) -> None:
        try:
            while line := await self._outgoing.take():
                await self._socket.send(line[:-1])
        except OSError:
            self._outgoing.close()  # `drain` tells


class Dialled:
    """The client's end."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self.close = connection.close

    async def receive(self) -> bytes | None:
        try:
            while not isinstance(frame := await self._connection.recv(), str):
                pass
        except ConnectionClosed:
            return None
        return frame.encode()

    async def send(self, text: bytes) -> None:
        try:
            await self._connection.send(text, text=True)
        except ConnectionClosed as error:
            raise BrokenPipeError(str(error)) from error


async def connect(url: str, token: str = "") -> Frames:
    """Connect to an agent at a `ws://` or `wss://` address.

    Raises OSError if nobody is there, `websockets.exceptions.InvalidHandshake` if one is not let in.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection = await dial(
        url, additional_headers=headers, max_size=MAX_MESSAGE, compression=None, ping_timeout=PONG, close_timeout=GRACE
    )
    return Frames(Dialled(connection))


class Upgraded:
    """The server's end, in ASGI's words."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send

    async def receive(self) -> bytes | None:
        while (message := await self._receive())["type"] == "websocket.receive":
            if (text := message.get("text")) is not None:
                return text.encode()
        return None

    async def send(self, text: bytes) -> None:
        await self._tell({"type": "websocket.send", "text": text.decode()})

    async def close(self) -> None:
        await self._tell({"type": "websocket.close", "code": 1001, "reason": "The agent is going away"})

    async def _tell(self, message: Message) -> None:
        try:
            await self._send(message)
        except RuntimeError as error:  # uvicorn's, once it has said goodbye itself
            raise BrokenPipeError(str(error)) from error


@dataclass(frozen=True)
class Gate:
    """Who is let in: who knows the token, called this server by one of its names, and is no foreign page."""

    token: str = field(repr=False)
    hosts: Collection[str]
    """Names and addresses (IPv6 in brackets) that a Host header may hold; a page of another name that leads here,
    by DNS rebinding, holds its own."""
    origins: Collection[str] = ()
    """Those whose pages may connect, as browsers write them: `https://example.org`. What is no page has no origin."""
    any_address: bool = False
    """A Host header may hold any address, as nobody knows them all; they cannot be rebound."""

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the reason for which a request is refused."""
        headers = Headers(scope=scope)
        if not self.knows(headers.get("host", "")):
            return 403, "This server does not go by the name in your Host header."
        if (origin := headers.get("origin")) is not None and origin.lower() not in self.origins:
            return 403, "Pages of your origin may not connect."
        if not any(compare_digest(token.encode(), self.token.encode()) for token in tokens(scope, headers)):
            return 401, (
                "Send the token that the server was started with, as the header Authorization: Bearer TOKEN,"
                f" or offer the subprotocols {SUBPROTOCOL} and bearer.TOKEN."
            )
        return None

    def knows(self, host: str) -> bool:
        """Whether a Host header, which may end with a port, means this server."""
        found = fullmatch(r"(\[[^]]*\]|[^:]*)(:\d*)?", host.lower())
        return found is not None and (found[1] in self.hosts or (self.any_address and is_address(found[1])))


def is_address(host: str) -> bool:
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def tokens(scope: Scope, headers: Headers) -> Iterator[str]:
    """The tokens that came with a request. A page in a browser can set no header, but offer a subprotocol."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield token.strip()
    for offered in scope.get("subprotocols", ()):
        if offered.startswith("bearer."):
            yield offered.removeprefix("bearer.")


class Server:
    """Serves ACP at one path, one transport a client; whoever else comes gets a sentence."""

    def __init__(self, gate: Gate, talk: Callable[[Transport], Awaitable[Any]], max_connections: int) -> None:
        """`talk` is called for each client, and has ended when it returns; `close` cancels it."""
        self._gate = gate
        self._talk = talk
        self._max_connections = max_connections
        self._connections = 0
        self._state = ServerState()
        self._config = Config(
            self,
            interface="asgi3",
            lifespan="off",
            ws=Line,
            ws_max_size=MAX_MESSAGE,
            ws_ping_interval=PING,
            ws_ping_timeout=PONG,
            ws_per_message_deflate=False,
            limit_concurrency=max_connections + WAITING_ROOM,
            proxy_headers=False,
            log_config=None,
            access_log=False,
        )

    async def listen(self, listener: socket) -> None:
        """Begin to serve those who connect to this socket."""
        # uvicorn.Server would take over the process's signals, and end the connections before their work.
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: Door(self._config, self._state, {}), sock=listener
        )

    async def close(self) -> None:
        """Let nobody in any more, and see those out who are."""
        self._listener.close()
        if tasks := list(self._state.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # the transports close their sockets in the loop's next round
        await self._listener.wait_closed()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if refusal := self._refusal(scope):
            status, reason = refusal
            headers = {401: {"www-authenticate": "Bearer"}, 405: {"allow": "GET"}, 426: {"upgrade": "websocket"}}
            await PlainTextResponse(f"{reason}\n", status, headers.get(status))(scope, receive, send)
            return
        self._connections += 1
        try:
            with suppress(OSError):  # it may be gone already; then the talk is short
                await self._welcome(scope, receive, send)
            await self._talk(Frames(Upgraded(receive, send)))
        except Exception:  # one connection's failure is nobody else's
            logger.exception("A connection failed")
        finally:
            self._connections -= 1

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        if refusal := self._gate.refusal(scope):
            return refusal
        if scope["path"] != PATH:
            return 404, f"Nothing is here; ACP is at {PATH}."
        if scope["type"] != "websocket":
            return 426 if scope["method"] == "GET" else 405, "ACP is spoken over WebSocket here."
        if self._connections >= self._max_connections:
            return 503, f"{self._connections} clients are connected, and no more may be."
        return None

    async def _welcome(self, scope: Scope, receive: Receive, send: Send) -> None:
        chosen = SUBPROTOCOL if SUBPROTOCOL in scope["subprotocols"] else None
        headers = [(b"acp-connection-id", token_hex(16).encode())]
        await receive()
        await send({"type": "websocket.accept", "subprotocol": chosen, "headers": headers})


QUIET = logging.Logger("uvicorn", logging.CRITICAL + 1)
"""What uvicorn has to say of bad requests and lost connections is no news, and may hold tokens."""


class Door(H11Protocol):
    """uvicorn's HTTP/1.1, where nobody stays long: clients are let in, all others leave."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.logger = QUIET
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            transport.abort()
        self.patience = self.loop.call_later(HANDSHAKE, self.show_out)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.patience.cancel()

    def show_out(self) -> None:
        if self.transport.get_protocol() is self:  # else the client was let in
            self.transport.abort()


class Line(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, up to a decent end: clients hear why, and those that do not leave are hung up on."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.logger = QUIET
        self.close_timeout = GRACE
        self.gone = asyncio.Event()
        self.pieces = bytearray()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.gone.set()

    async def run_asgi(self) -> None:
        await super().run_asgi()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.gone.wait(), GRACE)
        self.transport.abort()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.loop.call_later(GRACE, self.transport.abort)

    def handle_cont(self, event: Frame) -> None:
        """Join pieces as they come: kept apart, small ones take thirty times the memory of the message."""
        if self.frames:
            self.pieces = bytearray(self.frames.pop())
        self.pieces += event.data
        if event.fin:
            self.frames = [bytes(self.pieces)]
            self.pieces.clear()
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        super().handle_ping()
        if self.transport.get_write_buffer_size() > MAX_UNREAD:
            self.transport.abort()

    def handle_parser_exception(self) -> None:
        """Say what was wrong, and hang up later: at once, what the client still sends would meet a reset connection,
        and the reason would be lost."""
        if self.close_sent:
            return
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": 1006})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)
