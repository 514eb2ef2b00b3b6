"""The proxy on a loopback socket: what clients get through to, what they are told, and how connections end."""

import asyncio
import contextlib
import socket
import struct
import tracemalloc
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest
from crow_sandbox import proxy as proxies
from crow_sandbox.hosts import HostRules
from crow_sandbox.proxy import Decision, Proxy
from crow_testing.listening import listen

pytestmark = [pytest.mark.anyio, pytest.mark.posix("sockets that an event loop polls")]

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class World:
    """A proxy, and a server that it may reach by the name `server.test`, whose requests are kept."""

    at: tuple[str, int]
    server: int
    decisions: list[Decision]
    requests: list[bytes] = field(default_factory=list[bytes])
    answers: dict[str, list[Sequence[str]]] = field(default_factory=dict[str, list[Sequence[str]]])
    """The addresses of each name, one answer after another; the last one stays."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        answers = self.answers.get(host)
        if not answers:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def ask(self, data: bytes, *, more: bytes = b"") -> bytes:
        """Send bytes to the proxy and return all that comes back."""
        reader, writer = await asyncio.open_connection(*self.at)
        with contextlib.suppress(ConnectionError):
            writer.write(data + more)
            await writer.drain()
        received = b""
        with contextlib.suppress(ConnectionError):
            received = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return received

    @property
    def refused(self) -> list[str]:
        return [each.where for each in self.decisions if not each.allowed]


@contextlib.asynccontextmanager
async def open_world(handle: Handler | None = None, rules: Sequence[str] = ()) -> AsyncGenerator[World]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await (handle or hello)(reader, writer)

    async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        world.requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nSet-Cookie: a\r\n\r\nhello")
        await writer.drain()

    async with listen(serve) as port:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        world = World(listener.getsockname(), port, [])
        world.answers["server.test"] = [["127.0.0.1"]]
        hosts = HostRules([f"127.0.0.1:{port}", f"server.test:{port}", "*.allowed.test", *rules])
        serving = asyncio.create_task(Proxy(hosts, world.decisions.append, world.resolve).serve(listener))
        try:
            yield world
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            listener.close()


async def test_tunnel_reaches_an_allowed_host_by_name_and_by_address():
    async with open_world() as world:
        for host in ("server.test", "SERVER.test", "127.0.0.1"):
            target = f"{host}:{world.server}".encode()
            head = b"CONNECT " + target + b" HTTP/1.1\r\nHost: " + target + b"\r\n\r\n"
            got = await world.ask(head, more=b"GET / HTTP/1.1\r\n\r\n")
            assert got.startswith(b"HTTP/1.1 200 ")
            assert got.endswith(b"\r\n\r\nhello")
        assert [each.allowed for each in world.decisions] == [True] * 3
        assert await world.ask(b"CONNECT " + target + b" HTTP/1.0\r\n\r\n", more=b"GET / HTTP/1.1\r\n\r\n")


async def test_resource_of_an_allowed_host_is_passed_on_with_its_own_host_header():
    async with open_world() as world:
        head = f"GET http://server.test:{world.server}/a?b=c HTTP/1.1\r\nHost: other.test\r\nX: y\r\nX-Gone: 1\r\n"
        hops = "Proxy-Authorization: z\r\nProxy-Connection: close\r\nConnection: X-Gone, close\r\nUpgrade: h2c\r\n"
        got = await world.ask(f"{head}{hops}\r\n".encode())
        assert got.startswith(b"HTTP/1.1 200 OK\r\n")
        assert got.endswith(b"hello")
        assert b"set-cookie: a\r\n" in got.lower()
        (request,) = world.requests
        head = request.lower()
        assert head.startswith(b"get /a?b=c http/1.1\r\n")
        assert head.count(b"host:") == 1
        assert f"host: server.test:{world.server}\r\n".encode() in head
        assert b"x: y\r\n" in head
        assert not [name for name in (b"proxy-", b"x-gone", b"upgrade") if name in head]


@pytest.mark.parametrize(
    "target",
    [
        *("refused.test:443", "allowed.test:443", "a.allowed.test:22", "169.254.169.254:80", "[::1]:443", "0.0.0.0:80"),
        *("[::ffff:127.0.0.1]:80", "[64:ff9b::a9fe:a9fe]:80", "[2002:7f00:1::]:443", "127.0.0.1:22", "2130706433:80"),
        *("0x7f.1:80", "0177.0.0.1:80", "127.1:443", "a.allowed.test.:443", "server.test.:80", "x%00.allowed.test:443"),
        *("evil.test#.allowed.test:443", "a_b.refused.test:443", "localhost:80"),
    ],
)
async def test_refused_host_fails_at_once_and_is_named(target: str):
    async with open_world() as world:
        got = await world.ask(f"CONNECT {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        head, _, body = got.decode().partition("\r\n\r\n")
        assert head.startswith("HTTP/1.1 403 crow: ")
        assert body.count("\n") == 1
        assert "The network is off for this command" in body
        assert len(world.refused) == 1
        again = await world.ask(f"GET http://{target}/ HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        assert again.startswith(b"HTTP/1.1 403 crow: ") or "#" in target
        assert world.requests == []


@pytest.mark.parametrize(
    "request_",
    [
        b"CONNECT server.test HTTP/1.1\r\nHost: a\r\n\r\n",
        b"CONNECT u:p@server.test:80 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"CONNECT server.test:80 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
        b"CONNECT server.test:80 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"CONNECT server.test:80\0 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"CONNECT server.test:80 evil HTTP/1.1\r\nHost: a\r\n\r\n",
        b"CONNECT s\xc3\xa9rver.test:80 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"CONNECT server.test:80 HTTP/1.1\r\n Host: a\r\n\r\n",
        b"CONNECT server.test:80 HTTP/1.1\r\nHost : a\r\n\r\n",
        b"CONNECT server.test:80 HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: server.test\r\n\r\n",
        b"GET https://server.test/ HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET ftp://server.test/ HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET file:///etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http://u:p@server.test/ HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http://server.test\\@evil.test/ HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http:///path HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http://server.test:http/ HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http://server.test/#x HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST http://server.test/ HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST http://server.test/ HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\na",
        b"POST http://server.test/ HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0",
        b"POST http://server.test/ HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n",
        b"POST http://server.test/ HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        b"GET http://server.test/ HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n",
        b"GET http://server.test/ HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n",
        b"GET http://server.test/ HTTP/9.9\r\nHost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n",
        b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"\r\n" * 1000 + b"hello\r\n\r\n",
        b"GET http://server.test/ HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 300_000 + b"\r\n\r\n",
    ],
)
async def test_unclear_request_gets_400_and_reaches_nobody(request_: bytes):
    async with open_world(rules=["server.test"]) as world:
        got = await world.ask(request_)
        assert got[9:12] in (b"400", b"431", b"501", b"505")
        assert world.requests == []
        assert not [each for each in world.decisions if each.allowed]


async def test_two_requests_in_one_connection_are_one_request():
    async with open_world() as world:
        first = f"GET http://server.test:{world.server}/ HTTP/1.1\r\nHost: a\r\n\r\n".encode()
        got = await world.ask(first, more=b"GET http://refused.test/ HTTP/1.1\r\nHost: a\r\n\r\n")
        assert got.count(b"HTTP/1.1") == 1
        assert len(world.requests) == 1
        assert b"refused" not in world.requests[0]


@pytest.mark.parametrize(
    ("name", "address"),
    [
        *(("a.allowed.test", "127.0.0.1"), ("b.allowed.test", "::1"), ("c.allowed.test", "10.0.0.1")),
        *(("d.allowed.test", "169.254.169.254"), ("e.allowed.test", "::ffff:127.0.0.1"), ("f.allowed.test", "0.0.0.0")),
        *(("g.allowed.test", "64:ff9b::7f00:1"), ("h.allowed.test", "2002:7f00:1::"), ("i.allowed.test", "fe80::1%lo")),
        *(("j.allowed.test", "224.0.0.1"), ("k.allowed.test", "100.100.100.200"), ("l.allowed.test", "fd00:ec2::254")),
    ],
)
async def test_allowed_name_with_an_address_that_is_not_public_is_refused(name: str, address: str):
    async with open_world() as world:
        world.answers[name] = [[address]]
        got = await world.ask(f"CONNECT {name}:443 HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        assert got.startswith(b"HTTP/1.1 403 ")
        (decision,) = world.decisions
        assert decision.reason.endswith("which is not public")
        assert decision.pattern == ""


@pytest.mark.parametrize(
    ("target", "pattern"),
    [
        *(
            ("refused.test:443", "refused.test"),
            ("refused.test:80", "refused.test"),
            ("refused.test:22", "refused.test:22"),
        ),
        *(
            ("a.allowed.test:8443", "a.allowed.test:8443"),
            ("10.0.0.1:443", ""),
            ("[fd00::1]:1", ""),
            ("1.1.1.1:443", "1.1.1.1"),
        ),
        *(("localhost:80", ""), ("a.localhost:80", ""), ("127.0.0.9:5432", ""), ("[::1]:80", ""), ("0.0.0.0:80", "")),
        *(("169.254.169.254:80", ""), ("[::ffff:169.254.169.254]:80", ""), ("127.1:80", ""), ("a.test.:443", "")),
    ],
)
async def test_refusal_has_the_pattern_that_allows_it_if_the_host_is_public(target: str, pattern: str):
    async with open_world() as world:
        await world.ask(f"CONNECT {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        (decision,) = world.decisions
        assert decision.pattern == pattern
        assert not pattern or HostRules([pattern]).allow(decision.host, decision.port)


async def test_name_whose_address_changes_is_connected_to_the_address_that_was_checked():
    async with open_world(rules=["rebound.test:1"]) as world:
        name = f"rebound.test:{world.server}"
        async with open_world(rules=[name]) as other:
            other.answers["rebound.test"] = [["127.0.0.9"], ["127.0.0.1"]]
            head = f"CONNECT {name} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
            assert (await other.ask(head)).startswith(b"HTTP/1.1 403 ")
            assert len(other.answers["rebound.test"]) == 1  # it was resolved once


async def test_name_that_is_not_allowed_is_never_resolved():
    async with open_world() as world:
        world.answers["secret.attacker.test"] = [["1.1.1.1"], ["2.2.2.2"]]
        await world.ask(b"CONNECT secret.attacker.test:443 HTTP/1.1\r\nHost: a\r\n\r\n")
        assert len(world.answers["secret.attacker.test"]) == 2


async def test_unknown_and_unreachable_hosts_get_502():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{held.getsockname()[1]}"
        async with open_world(rules=[closed]) as world:
            got = await world.ask(b"CONNECT x.allowed.test:443 HTTP/1.1\r\nHost: a\r\n\r\n")
            assert got.startswith(b"HTTP/1.1 502 crow: no address is known for x.allowed.test")
            got = await world.ask(f"CONNECT {closed} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            assert got.startswith(f"HTTP/1.1 502 crow: {closed} cannot be reached".encode())


def make_socks(kind: int, host: bytes, port: int, command: int = 1) -> bytes:
    return bytes([5, 1, 0, 5, command, 0, kind]) + host + struct.pack(">H", port)


def make_name(name: str) -> bytes:
    return bytes([len(name)]) + name.encode()


async def test_socks_reaches_an_allowed_host_by_name_and_by_address():
    async with open_world() as world:
        for kind, host in ((3, make_name("server.test")), (1, bytes([127, 0, 0, 1]))):
            got = await world.ask(make_socks(kind, host, world.server), more=b"GET / HTTP/1.1\r\n\r\n")
            assert got[:12] == b"\x05\x00\x05\x00\x00\x01" + bytes(6)
            assert got.endswith(b"hello")


@pytest.mark.parametrize(
    ("request_", "reply"),
    [
        (make_socks(3, make_name("refused.test"), 443), b"\x05\x00\x05\x02"),
        (make_socks(3, make_name("a.allowed.test"), 22), b"\x05\x00\x05\x02"),
        (make_socks(3, make_name("a.allowed.test."), 443), b"\x05\x00\x05\x02"),
        (make_socks(3, make_name("a\0.allowed.test"), 443), b"\x05\x00\x05\x02"),
        (make_socks(3, make_name("a\r\n.allowed.test"), 443), b"\x05\x00\x05\x02"),
        (make_socks(3, make_name("127.0.0.1"), 443), b"\x05\x00\x05\x02"),
        (make_socks(3, make_name("::1"), 443), b"\x05\x00\x05\x02"),
        (make_socks(3, b"\x00", 443), b"\x05\x00\x05\x02"),
        (make_socks(1, bytes([169, 254, 169, 254]), 80), b"\x05\x00\x05\x02"),
        (make_socks(4, bytes(15) + b"\x01", 443), b"\x05\x00\x05\x02"),
        (make_socks(4, bytes(10) + b"\xff\xff\x7f\0\0\x01", 443), b"\x05\x00\x05\x02"),
        (make_socks(3, make_name("b.allowed.test"), 443), b"\x05\x00\x05\x04"),
        (make_socks(3, make_name("a.allowed.test"), 443, command=2), b"\x05\x00\x05\x07"),
        (make_socks(3, make_name("a.allowed.test"), 443, command=3), b"\x05\x00\x05\x07"),
        (make_socks(9, b"", 443), b"\x05\x00\x05\x08"),
        (b"\x05\x01\x02", b"\x05\xff"),
        (b"\x05\x00", b"\x05\xff"),
    ],
)
async def test_socks_says_no_at_once(request_: bytes, reply: bytes):
    async with open_world() as world:
        assert (await world.ask(request_))[: len(reply)] == reply
        assert not [each for each in world.decisions if each.allowed]


async def test_body_of_a_request_is_passed_on_in_pieces():
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body.replace(b"\r\n", b"|"))
        await writer.drain()

    async with open_world(echo) as world:
        head = f"POST http://server.test:{world.server}/ HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
        body = b"Transfer-Encoding: chunked\r\n\r\n"
        reader, writer = await asyncio.open_connection(*world.at)
        writer.write(head.encode() + body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(b"3\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\n\r\n")
        got = await reader.read()
        writer.close()
        assert got.startswith(b"HTTP/1.1 200 OK")
        assert b"abc|" in got
        assert b"Trailer" not in got


async def test_side_that_has_closed_still_receives():
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = len(await reader.read())
        writer.write(f"{size} bytes".encode())
        await writer.drain()

    async with open_world(count) as world:
        reader, writer = await asyncio.open_connection(*world.at)
        writer.write(make_socks(3, make_name("server.test"), world.server) + b"x" * 1000)
        writer.write_eof()
        assert (await reader.read())[12:] == b"1000 bytes"
        writer.close()


async def test_hundred_megabytes_go_through_a_slow_reader_in_little_memory():
    size, piece = 100_000_000, bytes(1_000_000)

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(size // len(piece)):
            writer.write(piece)
            await writer.drain()

    async with open_world(send) as world:
        reader, writer = await asyncio.open_connection(*world.at)
        writer.write(make_socks(3, make_name("server.test"), world.server))
        await reader.readexactly(12)
        tracemalloc.start()
        received = 0
        while data := await reader.read(65536):
            received += len(data)
            await asyncio.sleep(0)
        writer.close()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert received == size
        assert peak < 5 * len(piece)


async def test_thousand_connections_are_all_served(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proxies, "MAX_CONNECTIONS", 50)
    async with open_world() as world:
        head = f"GET http://server.test:{world.server}/ HTTP/1.1\r\nHost: a\r\n\r\n".encode()
        limit = asyncio.Semaphore(200)

        async def ask() -> bytes:
            async with limit:
                return await world.ask(head)

        got = await asyncio.gather(*(ask() for _ in range(1000)))
        assert [each for each in got if not each.endswith(b"hello")] == []


async def test_client_that_says_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proxies, "HEAD_TIMEOUT", 0.05)
    async with open_world() as world:
        for start in (b"", b"GET http://server.test", b"\x05\x01\x00\x05"):
            reader, writer = await asyncio.open_connection(*world.at)
            writer.write(start)
            await asyncio.wait_for(reader.read(), 60)
            writer.close()


async def test_connection_whose_other_side_stays_silent_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proxies, "QUIET_TIMEOUT", 0.05)
    released = asyncio.Event()

    async def stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await released.wait()

    async with open_world(stay) as world:
        reader, writer = await asyncio.open_connection(*world.at)
        writer.write(make_socks(3, make_name("server.test"), world.server))
        writer.write_eof()
        assert len(await asyncio.wait_for(reader.read(), 60)) == 12
        released.set()
        writer.close()


async def test_end_of_the_proxy_ends_its_connections():
    async def stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with open_world(stay) as world:
        reader, writer = await asyncio.open_connection(*world.at)
        writer.write(make_socks(3, make_name("server.test"), world.server))
        await reader.readexactly(12)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*world.at)
