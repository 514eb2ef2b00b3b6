"""A proxy for HTTP and SOCKS5 that connects commands to allowed hosts only."""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import h11
from crow_system.addresses import is_public

from crow_sandbox.hosts import WEB_PORTS, HostRules, format_authority, is_address, parse_authority, parse_host

MAX_CONNECTIONS = 128  # at a time; further ones wait
MAX_HEAD = 64 * 1024  # bytes of a request's line and headers
MAX_ADDRESSES = 4  # of a host that are tried
MAX_RESOLUTIONS = 8  # at a time, in threads
HEAD_TIMEOUT = 10.0  # seconds until a client has said where it wants to go
DIAL_TIMEOUT = 10.0  # seconds to resolve a name, and to connect to each address
QUIET_TIMEOUT = 300.0  # seconds without a byte, of a server that shall answer, or after one side has closed
LINGER_TIMEOUT = 2.0  # seconds for a client to close after an answer
CHUNK = 64 * 1024
HOP_HEADERS = {
    *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"proxy-authenticate"),
    *(b"te", b"trailer", b"upgrade", b"host", b"expect"),
}
"""Headers that are meant for the proxy, or that it writes itself."""
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True)
class Decision:
    """The proxy's decision about one connection."""

    host: str
    """As the client wrote it, if it cannot be parsed."""
    port: int
    allowed: bool
    reason: str
    """Why not, as a sentence without a period; "" if it is allowed."""
    pattern: str = ""
    """The pattern that allows it, for a question and `Network.allow`; "" if nobody is to be asked."""

    @property
    def where(self) -> str:
        """HOST:PORT."""
        return format_authority(self.host, self.port) if self.port else self.host


class Refused(Exception):
    """A connection is refused by a rule."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision.reason)
        self.decision = decision


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host. Raises OSError."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host} is not a host name") from error
    return list(dict.fromkeys(str(address[4][0]) for address in found))


class Proxy:
    """Connects the clients of a listening socket to the hosts that rules allow, and records each decision."""

    def __init__(self, rules: HostRules, record: Callable[[Decision], object], resolve: Resolver = resolve) -> None:
        self._rules = rules
        self._record = record
        self._resolve = resolve
        self._resolutions = asyncio.Semaphore(MAX_RESOLUTIONS)
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Serve clients until this is cancelled; then end all connections."""
        loop, slots = asyncio.get_running_loop(), asyncio.Semaphore(MAX_CONNECTIONS)
        listener.setblocking(False)
        try:
            while True:
                await slots.acquire()
                try:
                    client, _ = await loop.sock_accept(listener)
                except OSError:  # the process has no descriptor left, or the client is gone again
                    slots.release()
                    await asyncio.sleep(0.05)
                    continue
                task = asyncio.create_task(self._serve_client(client))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(lambda _: slots.release())
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve_client(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with client:
            client.setblocking(False)
            with suppress(OSError, TimeoutError, h11.ProtocolError, EOFError):
                async with asyncio.timeout(HEAD_TIMEOUT):
                    data = await loop.sock_recv(client, CHUNK)
                if data[:1] == b"\x05":
                    await self._serve_socks(client, data)
                elif data:
                    await HttpClient(client, self.connect).serve(data)

    async def connect(self, host: str, port: int) -> socket.socket:
        """Connect to a host as a client wrote it, if rules allow it. Raises Refused, OSError and TimeoutError."""
        try:
            name = parse_host(host)
        except ValueError:
            shown = "".join(c if c.isascii() and c.isprintable() else "?" for c in host[:100])
            reason = f"{shown!r} is not a host name, or an address in an unusual spelling"
            raise self._refuse(shown, port, reason) from None
        where = format_authority(name, port)
        if not self._rules.allow(name, port):
            pattern, reason = make_pattern(name, port), "is not among the hosts that this command may reach"
            raise self._refuse(name, port, f"{where} {reason if pattern else 'is not public'}", pattern)
        async with self._resolutions, asyncio.timeout(DIAL_TIMEOUT):
            found = [name] if is_address(name) else await self._resolve(name, port)
        addresses = [address for address in found if self._rules.allow_address(address, port)][:MAX_ADDRESSES]
        if not addresses:
            inner = found[0].partition("%")[0] if found else ""
            raise self._refuse(name, port, f"{where} has the address {inner}, which is not public")
        self._record(Decision(name, port, True, ""))
        connected = await self._dial(addresses, port)
        here, there = connected.getsockname()[0], connected.getpeername()[0]
        if here == there and not self._rules.name_address(there, port):
            connected.close()
            raise self._refuse(name, port, f"{where} is this machine")
        return connected

    def _refuse(self, host: str, port: int, reason: str, pattern: str = "") -> Refused:
        decision = Decision(host, port, False, reason, pattern)
        self._record(decision)
        return Refused(decision)

    async def _dial(self, addresses: Sequence[str], port: int) -> socket.socket:
        loop = asyncio.get_running_loop()
        failed = OSError("no address")
        for address in addresses:
            connected = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            try:
                connected.setblocking(False)
                async with asyncio.timeout(DIAL_TIMEOUT):
                    await loop.sock_connect(connected, (address, port))
            except (OSError, TimeoutError) as error:
                connected.close()
                failed = error
            except BaseException:
                connected.close()
                raise
            else:
                return connected
        raise failed

    async def _serve_socks(self, client: socket.socket, data: bytes) -> None:
        """Serve SOCKS5 (RFC 1928): the command CONNECT, without authentication."""
        loop = asyncio.get_running_loop()
        reader = SocketReader(client, data)
        async with asyncio.timeout(HEAD_TIMEOUT):
            _, methods = await reader.read(2)
            if 0 not in await reader.read(methods):
                await loop.sock_sendall(client, b"\x05\xff")
                return
            await loop.sock_sendall(client, b"\x05\x00")
            version, command, _, kind = await reader.read(4)
            match kind:
                case 1:
                    host = str(ip_address(await reader.read(4)))
                case 3:
                    (size,) = await reader.read(1)
                    host = (await reader.read(size)).decode("latin-1")
                case 4:
                    host = str(ip_address(await reader.read(16)))
                case _:
                    await loop.sock_sendall(client, make_socks_reply(8))
                    return
            port = int.from_bytes(await reader.read(2))
        if version != 5 or command != 1:
            await loop.sock_sendall(client, make_socks_reply(7))
            return
        try:
            server = await self.connect(host, port)
        except Refused:
            await loop.sock_sendall(client, make_socks_reply(2))
            return
        except (OSError, TimeoutError):
            await loop.sock_sendall(client, make_socks_reply(4))
            return
        with server:
            await loop.sock_sendall(client, make_socks_reply(0))
            await join(client, server, reader.rest)


def make_pattern(host: str, port: int) -> str:
    """Return the pattern that allows a host and port; "" for what only settings may allow: this machine itself, and
    addresses that are not public."""
    if host == "localhost" or host.endswith(".localhost") or (is_address(host) and not is_public(host)):
        return ""
    return host if port in WEB_PORTS else format_authority(host, port)


def make_socks_reply(code: int) -> bytes:
    """Return the reply of SOCKS5 to a request: 0 connected, 2 refused, 4 unreachable, 7 and 8 not supported."""
    return bytes([5, code, 0, 1, 0, 0, 0, 0, 0, 0])


class SocketReader:
    """Reads exact numbers of bytes from a socket."""

    def __init__(self, source: socket.socket, data: bytes) -> None:
        self._source = source
        self.rest = data
        """Data that was received and is unread."""

    async def read(self, size: int) -> bytes:
        """Read so many bytes. Raises EOFError."""
        loop = asyncio.get_running_loop()
        while len(self.rest) < size:
            data = await loop.sock_recv(self._source, CHUNK)
            if not data:
                raise EOFError
            self.rest += data
        data, self.rest = self.rest[:size], self.rest[size:]
        return data


class HttpClient:
    """A client that speaks HTTP: it asks for a tunnel by CONNECT, or for one resource by its absolute URI."""

    def __init__(self, client: socket.socket, connect: Callable[[str, int], Awaitable[socket.socket]]) -> None:
        self._client = client
        self._connect = connect
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)

    async def serve(self, data: bytes) -> None:
        """Serve one request that begins with `data`; then the connection ends."""
        try:
            self._http.receive_data(data)
            async with asyncio.timeout(HEAD_TIMEOUT):
                request = await read_event(self._client, self._http)
            if not isinstance(request, h11.Request):
                return
            if request.http_version not in (b"1.0", b"1.1"):
                raise ValueError("The version of HTTP is neither 1.0 nor 1.1")
            target = request.target.decode("ascii")
            if request.method == b"CONNECT":
                await self._serve_tunnel(request, target)
            else:
                await self._serve_resource(request, target)
        except h11.RemoteProtocolError as error:
            await self._answer(error.error_status_hint, "crow's proxy does not understand this request", str(error))
        except ValueError as error:
            await self._answer(400, "crow's proxy does not understand this request", f"{error}.")
        except Refused as error:
            reason = error.decision.reason
            advice = "The network is off for this command, but for hosts that the user allows."
            await self._answer(403, f"crow: {reason}", f"{reason}. {advice}")

    async def _serve_tunnel(self, request: h11.Request, target: str) -> None:
        if {b"content-length", b"transfer-encoding"} & {name for name, _ in request.headers}:
            raise ValueError("CONNECT has no body")
        host, port = split_target(target)
        server = await self._connect_or_answer(host, port)
        if server:
            with server:
                await asyncio.get_running_loop().sock_sendall(self._client, ESTABLISHED)
                await join(self._client, server, bytes(self._http.trailing_data[0]))

    async def _serve_resource(self, request: h11.Request, target: str) -> None:
        found = re.fullmatch(r"http://([^/?#\\@]+)((?:[/?][^#]*)?)", target, re.IGNORECASE)
        if not found:
            raise ValueError("The target is not an absolute URI that starts with http:// and has no user name")
        path = found[2] if found[2].startswith("/") else f"/{found[2]}"
        host, port = split_target(found[1], 80)
        names = [name for name, _ in request.headers]
        if b"content-length" in names and b"transfer-encoding" in names:
            raise ValueError("The request has two lengths")
        server = await self._connect_or_answer(host, port)
        if not server:
            return
        with server:
            outer = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
            authority = format_authority(parse_host(host), port).removesuffix(":80")
            sent = [(b"host", authority.encode()), *forwarded(request.headers), (b"connection", b"close")]
            changed = h11.Request(method=request.method, target=path.encode(), headers=sent)
            await send_event(server, outer, changed)
            if self._http.they_are_waiting_for_100_continue:
                await send_event(self._client, self._http, h11.InformationalResponse(status_code=100, headers=[]))
            await run_until_second(self._send_body(server, outer), self._send_reply(server, outer))

    async def _send_body(self, server: socket.socket, outer: h11.Connection) -> None:
        while True:
            event = await read_event(self._client, self._http)
            if isinstance(event, h11.EndOfMessage):
                event = h11.EndOfMessage()  # without trailers
            await send_event(server, outer, event)
            if isinstance(event, h11.EndOfMessage):
                return

    async def _send_reply(self, server: socket.socket, outer: h11.Connection) -> None:
        while True:
            async with asyncio.timeout(QUIET_TIMEOUT):
                event = await read_event(server, outer)
            match event:
                case h11.Response() | h11.InformationalResponse():
                    headers = forwarded(event.headers)
                    if isinstance(event, h11.Response):
                        headers.append((b"connection", b"close"))
                    event = type(event)(status_code=event.status_code, reason=event.reason, headers=headers)
                case h11.EndOfMessage():
                    event = h11.EndOfMessage()
                case _:
                    pass
            await send_event(self._client, self._http, event)
            if isinstance(event, h11.EndOfMessage):
                return

    async def _connect_or_answer(self, host: str, port: int) -> socket.socket | None:
        where = format_authority(host, port)
        try:
            return await self._connect(host, port)
        except TimeoutError:
            await self._answer(504, f"crow: {where} does not answer", f"{where} does not answer.")
        except socket.gaierror:
            await self._answer(502, f"crow: no address is known for {host}", f"No address is known for {host}.")
        except OSError as error:
            await self._answer(502, f"crow: {where} cannot be reached", f"{where} cannot be reached: {error.strerror}.")
        return None

    async def _answer(self, status: int, reason: str, text: str) -> None:
        """Send a reply of the proxy's own. Its reason has the sentence, too, since many clients show nothing else."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        shown = "".join(c for c in text if c.isascii() and c.isprintable()) + "\n"
        head = f"HTTP/1.1 {status} {''.join(c for c in reason if c.isascii() and c.isprintable())}\r\n"
        fields = f"Content-Type: text/plain\r\nContent-Length: {len(shown)}\r\nConnection: close\r\n\r\n"
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._client, (head + fields + shown).encode())
        self._client.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(LINGER_TIMEOUT):  # a socket that is closed with unread bytes loses its answer
            while await loop.sock_recv(self._client, CHUNK):
                pass


def split_target(authority: str, port: int | None = None) -> tuple[str, int]:
    """Split HOST:PORT without judging the host, which `Proxy.connect` does. Raises ValueError."""
    try:
        return parse_authority(authority, port)
    except ValueError:
        host, _, digits = authority.rpartition(":")
        if host and digits.isascii() and digits.isdigit() and 0 < int(digits[:6]) < 65536 and "@" not in authority:
            return host.strip("[]"), int(digits)
        if port and authority and ":" not in authority:
            return authority, port
        raise ValueError("The target is not HOST:PORT") from None


def forwarded(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of a message that the proxy passes on."""
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")} - {
        b"transfer-encoding",
        b"content-length",
    }
    return [(name, value) for name, value in headers if name not in HOP_HEADERS | named]


async def read_event(source: socket.socket, http: h11.Connection) -> h11.Event:
    """Read the next event. Raises EOFError at the end, and h11's errors."""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await asyncio.get_running_loop().sock_recv(source, CHUNK))
        elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            raise EOFError
        else:
            assert isinstance(event, h11.Event)
            return event


async def send_event(target: socket.socket, http: h11.Connection, event: h11.Event) -> None:
    """Send an event. Raises OSError and h11's errors."""
    if data := http.send(event):
        await asyncio.get_running_loop().sock_sendall(target, data)


async def run_until_second(first: Coroutine[Any, Any, None], second: Coroutine[Any, Any, None]) -> None:
    """Run two coroutines until the second has ended. Raises its error."""
    beside = asyncio.create_task(first)
    try:
        await second
    finally:
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)


async def join(client: socket.socket, server: socket.socket, received: bytes) -> None:
    """Copy bytes both ways until both sides have closed; `received` has come from the client already."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(server, received)
    count = [0]
    both = {asyncio.create_task(copy(client, server, count)), asyncio.create_task(copy(server, client, count))}
    try:
        done, rest = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        while rest and not any(task.exception() for task in done):
            before = count[0]
            done, rest = await asyncio.wait(rest, timeout=QUIET_TIMEOUT)
            if rest and count[0] == before:
                return
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def copy(source: socket.socket, target: socket.socket, count: list[int]) -> None:
    """Copy bytes until the source has no more, then say so to the target. Raises OSError."""
    loop, buffer = asyncio.get_running_loop(), memoryview(bytearray(CHUNK))
    while size := await loop.sock_recv_into(source, buffer):
        await loop.sock_sendall(target, buffer[:size])
        count[0] += size
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
