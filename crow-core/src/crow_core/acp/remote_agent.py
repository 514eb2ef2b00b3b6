"""A client's connection to an agent at an address: WebSocket (`ws://`, `wss://`) or streamable HTTP (`http://`)."""

import httpx2
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as dial
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from crow_core.acp.http_client import connect_http
from crow_core.acp.transports import CLOSE_TIMEOUT, MAX_MESSAGE_BYTES, Transport
from crow_core.acp.websocket import BINARY_REASON, PONG_TIMEOUT, WebSocketTransport


class ClientSocket:
    """The client's end of a WebSocket."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self.close = connection.close

    async def receive(self) -> bytes | None:
        try:
            frame = await self._connection.recv()
            if isinstance(frame, str):
                return frame.encode()
            await self._connection.close(CloseCode.UNSUPPORTED_DATA, BINARY_REASON)
        except ConnectionClosed:
            pass
        return None

    async def send(self, text: bytes) -> None:
        try:
            await self._connection.send(text, text=True)
        except ConnectionClosed as error:
            raise BrokenPipeError(str(error)) from error


class ServerRefusal(Exception):
    """A server that refuses the client."""

    def __init__(self, status: int) -> None:
        advice = " Check the token." if status in (401, 403) else ""
        super().__init__(f"refused the connection with the status {status}.{advice}")


async def connect(url: str, token: str = "") -> Transport:
    """Connect to an agent at an address.

    Raises OSError if nothing listens there, and ServerRefusal or `websockets.exceptions.InvalidHandshake` if the server
    refuses.
    """
    if not url.startswith(("http://", "https://")):
        return await connect_websocket(url, token)
    transport = connect_http(url, token)
    try:
        status = await transport.greet()
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        await transport.close()
        raise OSError(str(error) or type(error).__name__) from error
    if status in (401, 403):
        await transport.close()
        raise ServerRefusal(status)
    return transport


async def connect_websocket(url: str, token: str = "") -> WebSocketTransport:
    """Connect to an agent at a `ws://` or `wss://` address. Raises as `connect` does."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection = await dial(
        url,
        additional_headers=headers,
        max_size=MAX_MESSAGE_BYTES,
        compression=None,
        ping_timeout=PONG_TIMEOUT,
        close_timeout=CLOSE_TIMEOUT,
    )
    return WebSocketTransport(ClientSocket(connection))
