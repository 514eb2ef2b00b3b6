"""Test ACP over WebSocket with real sockets: access, messages, and the end of connections."""

import asyncio
import json
import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from anyio import wait_all_tasks_blocked
from crow_core.acp import websocket
from crow_core.acp.access_token import AccessPolicy
from crow_core.acp.connection import Connection, ConnectionClosed, RpcError
from crow_core.acp.remote_agent import connect
from crow_core.acp.schema import (
    AGENT_METHODS,
    CLIENT_METHODS,
    INVALID_REQUEST,
    NOT_FOUND,
    PARSE_ERROR,
    AgentMessageChunk,
    ClientCapabilities,
    CloseSessionRequest,
    DeleteSessionRequest,
    LoadSessionRequest,
    NewSessionResponse,
    PromptRequest,
    PromptResponse,
    SessionNotification,
    TextBlock,
)
from crow_core.acp.transports import MAX_MESSAGE_BYTES, Transport
from crow_core.acp.websocket import WebSocketServer
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.session.session import Session
from crow_core.testing import Editor, MemoryStore, Reply, ScriptedModel
from crow_testing import listening
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as dial
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as listen
from websockets.exceptions import ConnectionClosedError, InvalidHandshake, InvalidStatus
from websockets.frames import CloseCode, Opcode
from websockets.typing import Subprotocol

pytestmark = pytest.mark.anyio

TOKEN = "a-token-of-32-characters-or-so.~"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
POLICY = AccessPolicy(TOKEN, {"localhost", "127.0.0.1", "[::1]"}, {"https://editor.example"})

Talk = Callable[[Transport], Awaitable[Any]]


@asynccontextmanager
async def serving(talk: Talk | Crow, *, policy: AccessPolicy = POLICY, max_connections: int = 8) -> AsyncIterator[str]:
    """Run a server and yield its URL. An app is served as by `crow serve`."""
    crow = talk if isinstance(talk, Crow) else None
    server = WebSocketServer(
        policy, talk if crow is None else lambda wire: AcpAgent(wire, crow).serve(), max_connections
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.listen(listener)
        try:
            yield f"ws://127.0.0.1:{listener.getsockname()[1]}/acp"
        finally:
            await server.close()
            if crow is not None:
                await crow.shut_down()


@asynccontextmanager
async def editing(url: str, *, permit: str | None = "allow_once") -> AsyncIterator[Editor]:
    """Connect an editor and initialize the agent."""
    editor = Editor(await connect(url, TOKEN), permit=permit)
    async with editor.serving():
        await editor.initialize("editor", ClientCapabilities())
        yield editor


async def echo(wire: Transport) -> None:
    while line := await wire.readline():
        wire.write(line + b"\n")
        await wire.drain()
    await wire.close()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


async def status(url: str, headers: Mapping[str, str], subprotocols: Sequence[str] = ()) -> tuple[int, str]:
    """Return the status of a WebSocket handshake, with the subprotocol or the reason of the refusal."""
    offered = [Subprotocol(name) for name in subprotocols]
    try:
        async with dial(url, additional_headers=headers, subprotocols=offered or None) as connection:
            return 101, connection.subprotocol or ""
    except InvalidStatus as refusal:
        return refusal.response.status_code, refusal.response.body.decode()


async def ask(connection: ClientConnection, message: str | bytes) -> Any:
    """Send a frame and return the answer."""
    await connection.send(message, text=True)
    return json.loads(await connection.recv())


async def raw(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect an accepted client as raw streams, to send data that a library would not send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
    key = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + "A" * 22
    writer.write(f"GET /acp HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n{key}==\r\n\r\n".encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
    return reader, writer


def frame(opcode: int, data: bytes, *, length: int | None = None, last: bool = True) -> bytes:
    """Return a client's frame, masked with zeros; `length` may differ from the real length."""
    head = struct.pack("!BBQ", 0x80 * last | opcode, 0xFF, len(data) if length is None else length)
    return head + bytes(4) + data


async def close_code(reader: asyncio.StreamReader) -> int:
    """Read frames until the close frame and return its code; all frames must be short."""
    while True:
        head, size = await reader.readexactly(2)
        said = await reader.readexactly(size)
        if head & 0x0F == Opcode.CLOSE:
            return int.from_bytes(said[:2])


async def test_session_over_websocket_works_as_over_standard_streams():
    crow = Crow(ScriptedModel([Reply("Ja, \U0001f426.", "Gut."), Reply("More.", pace=0)]))
    async with serving(crow) as url, editing(url) as editor:
        id = (await editor.new_session("/")).session_id
        assert (await editor.prompt(id, "Hör zu: \U0001f426?")).stop_reason == "end_turn"
        assert (editor.text, editor.thoughts) == ("Ja, \U0001f426.", "Gut.")
        assert (await editor.prompt(id, "And?")).stop_reason == "end_turn"
    assert crow.sessions == {}


async def test_three_thousand_updates_arrive_in_order_and_before_the_answer():
    async def count(params: PromptRequest) -> PromptResponse:
        for number in range(3000):
            update = AgentMessageChunk(content=TextBlock(text=f"{number} "))
            await connection.notify("session/update", SessionNotification(session_id="s", update=update))
        return PromptResponse(stop_reason="end_turn")

    async def talk(wire: Transport) -> None:
        nonlocal connection
        connection = Connection(wire, AGENT_METHODS, CLIENT_METHODS, {"session/prompt": count})
        await connection.serve()

    connection: Any = None
    async with serving(talk) as url:
        editor = Editor(await connect(url, TOKEN))
        async with editor.serving():
            assert (await editor.prompt("s", "count")).stop_reason == "end_turn"
            assert editor.text.split() == [str(number) for number in range(3000)]


@pytest.mark.parametrize(
    ("headers", "subprotocols", "expected"),
    [
        (BEARER, [], (101, "")),
        ({"authorization": f"bearer  {TOKEN}"}, [], (101, "")),
        (BEARER, ["acp"], (101, "acp")),
        (BEARER, ["other"], (101, "")),
        ({}, ["acp", f"bearer.{TOKEN}"], (101, "acp")),
        ({}, [f"bearer.{TOKEN}"], (101, "")),  # browsers need a selected subprotocol, but never the token
        ({}, [], 401),
        ({"Authorization": "Bearer "}, [], 401),
        ({"Authorization": "Bearer wrong"}, [], 401),
        ({"Authorization": f"Bearer {TOKEN}x"}, [], 401),
        ({"Authorization": f"Bearer {TOKEN[:-1]}"}, [], 401),
        ({"Authorization": f"Basic {TOKEN}"}, [], 401),
        ({"Authorization": TOKEN}, [], 401),
        ({"Cookie": f"token={TOKEN}"}, [], 401),
        ({}, ["acp", "bearer."], 401),
        ({}, ["acp", TOKEN], 401),
        ({**BEARER, "Origin": "https://editor.example"}, [], (101, "")),
        ({**BEARER, "Origin": "https://evil.example"}, [], 403),
        ({**BEARER, "Origin": "https://editor.example.evil.example"}, [], 403),
        ({**BEARER, "Origin": "http://editor.example"}, [], 403),
        ({**BEARER, "Origin": "http://localhost"}, [], 403),
        ({**BEARER, "Origin": "null"}, [], 403),
        ({**BEARER, "Origin": ""}, [], 403),
    ],
)
async def test_only_requests_with_the_token_and_an_allowed_origin_are_accepted(
    headers: dict[str, str], subprotocols: list[str], expected: Any
):
    async with serving(echo) as url:
        code, words = await status(url, headers, subprotocols)
    if code == 101:
        assert (code, words) == expected
    else:
        assert code == expected
        assert words.endswith(".\n")
        assert words.count("\n") == 1
        assert TOKEN not in words


async def test_token_in_the_url_is_ignored():
    """URLs are written to logs."""
    async with serving(echo) as url:
        assert (await status(f"{url}?token={TOKEN}&access_token={TOKEN}", {}))[0] == 401


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:65535"])
async def test_host_header_with_an_allowed_name_is_accepted(host: str):
    async with serving(echo) as url:
        assert (await http(url, f"GET /acp HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n"))[0] == 400


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "localhost.evil.example", "evil.example:80", "127.0.0.1.nip.io", "localhost.", "", ":80"),
        *(
            "192.168.0.1",
            "[::2]",
            "0.0.0.0",
            "2130706433",
            "localhost:80:80",
            "me@localhost",
            "localhost, evil.example",
        ),
    ],
)
async def test_host_header_with_another_name_is_refused(host: str):
    """A page of evil.example whose name was bound to this address sends its own name."""
    async with serving(echo) as url:
        for request in ("GET /acp", "POST /acp", "GET /", "GET /acp HTTP/1.1\r\nUpgrade: websocket"):
            request = request if "HTTP" in request else f"{request} HTTP/1.1"
            code, _ = await http(url, f"{request}\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n")
            assert code == 403, request


async def test_request_without_a_host_header_is_refused():
    async with serving(echo) as url:
        assert (await http(url, f"GET /acp HTTP/1.0\r\nAuthorization: Bearer {TOKEN}\r\n"))[0] == 403
        assert (await http(url, f"GET /acp HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n"))[0] == 400


async def test_server_on_all_addresses_accepts_any_address_but_no_other_name():
    policy = AccessPolicy(TOKEN, {"localhost", "my-machine"}, accepts_any_address=True)
    async with serving(echo, policy=policy) as url:
        for host, code in {"192.168.0.1": 400, "[fe80::1]:80": 400, "my-machine:80": 400, "evil.example": 403}.items():
            request = f"GET /acp HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n"
            assert (await http(url, request))[0] == code


async def http(url: str, head: str, body: bytes = b"") -> tuple[int, str]:
    """Send a plain HTTP request and return the status and the whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split()[1]), answer


@pytest.mark.parametrize(
    ("request_line", "code"),
    [
        *((f"{method} /acp", 405) for method in ("PUT", "OPTIONS", "HEAD", "PROPFIND")),
        ("GET /acp", 400),
        ("DELETE /acp", 400),
        ("POST /acp", 415),
        *((f"{method} /", 404) for method in ("GET", "POST")),
        *((f"GET {path}", 404) for path in ("/acp/", "/ACP", "//acp", "/acp/../x", "/.env", "/%2e%2e/etc/passwd")),
    ],
)
async def test_plain_http_request_is_answered_with_a_reason(request_line: str, code: int):
    async with serving(echo) as url:
        head = f"{request_line} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        found, answer = await http(url, head, b"{}")
        without, _ = await http(url, f"{request_line} HTTP/1.1\r\nHost: localhost\r\n", b"{}")
    assert (found, without) == (code, 401)
    assert "access-control" not in answer.lower()
    words = answer.partition("\r\n\r\n")[2]
    assert words.endswith(".\n") or request_line.startswith("HEAD")


async def test_data_that_is_not_http_is_refused_and_the_next_client_is_accepted():
    async with serving(echo) as url:
        for junk in (b"\x16\x03\x01\x02\x00\x01\x00", b"\x00" * 100, b"{}\n\n", b"GET\r\n\r\n", b"X" * 100_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
            writer.write(junk)
            writer.write_eof()
            with suppress(ConnectionResetError):
                assert b"200" not in await reader.read()
            writer.close()
        assert (await status(url, BEARER))[0] == 101


async def test_every_connection_has_its_own_id():
    async with serving(echo) as url:
        ids = set[str]()
        for _ in range(3):
            async with dial(url, additional_headers=BEARER) as connection:
                assert connection.response
                ids.add(connection.response.headers["Acp-Connection-Id"])
    assert len(ids) == 3


async def test_refusal_is_sent_before_the_upgrade_and_says_what_to_do():
    async with serving(echo) as url:
        with pytest.raises(InvalidStatus) as refusal:
            await connect(url, "wrong")
    assert refusal.value.response.headers["WWW-Authenticate"] == "Bearer"
    assert b"Authorization: Bearer TOKEN" in (refusal.value.response.body or b"")


async def test_number_of_clients_is_limited_and_a_closed_one_makes_room():
    left = asyncio.Event()

    async def talk(wire: Transport) -> None:
        await echo(wire)
        left.set()

    async with serving(talk, max_connections=2) as url:
        first, second = await connect(url, TOKEN), await connect(url, TOKEN)
        code, words = await status(url, BEARER)
        assert (code, "2 clients are connected" in words) == (503, True)
        await first.close()
        await left.wait()
        await wait_all_tasks_blocked()
        third = await connect(url, TOKEN)
        third.write(b"hello\n")
        assert await third.readline() == b"hello"
        await second.close()
        await third.close()


async def test_silent_connection_is_aborted_after_the_handshake_timeout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(websocket, "HANDSHAKE_TIMEOUT", 0.1)
    async with serving(echo) as url:
        client = None
        while client is None:
            with suppress(OSError, InvalidHandshake):  # a busy machine may take longer than that
                client = await connect(url, TOKEN)
        for beginning in (b"", b"GET /acp HTTP/1.1\r\nHost: local", b"POST /acp HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
            writer.write(beginning)
            with suppress(ConnectionResetError):
                await reader.read()  # to the end
            writer.close()
        client.write(b"still here\n")
        assert await client.readline() == b"still here"
        await client.close()


async def test_half_open_sockets_keep_no_client_out(monkeypatch: pytest.MonkeyPatch):
    """The oldest of those that wait are closed."""
    monkeypatch.setattr(websocket, "MAX_PENDING_SOCKETS", 3)
    monkeypatch.setattr(websocket, "HANDSHAKE_TIMEOUT", 60)
    async with serving(echo, max_connections=1) as url:
        lingering = [await asyncio.open_connection("127.0.0.1", port_of(url)) for _ in range(10)]
        for _, writer in lingering[::2]:
            writer.write(b"GET /acp HTTP/1.1\r\n")
        client = await connect(url, TOKEN)
        client.write(b"hello\n")
        assert await client.readline() == b"hello"
        for reader, _ in lingering[:7]:
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        await client.close()
        for _, writer in lingering:
            writer.close()


async def test_client_takes_over_its_session_from_a_connection_that_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(websocket, "PROBE_TIMEOUT", 0.2)
    held = Held()
    async with serving(held.crow) as url:
        port = port_of(url)
        lost: list[asyncio.StreamWriter] = []
        cut = asyncio.Event()

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            lost.append(writer)
            there, back = await asyncio.open_connection("127.0.0.1", port)
            lost.append(back)

            async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(65536):
                    if cut.is_set():
                        await asyncio.Event().wait()
                    sink.write(data)

            await asyncio.gather(copy(reader, back), copy(there, writer))

        async with listening.listen(forward) as cable:
            mine = Editor(await connect(f"ws://127.0.0.1:{cable}/acp", TOKEN))
            serving_mine = asyncio.ensure_future(mine.connection.serve())
            await mine.initialize("editor", ClientCapabilities())
            session, turn = await held.begin(mine)
            cut.set()
            async with editing(url) as editor:
                request = LoadSessionRequest(session_id=session.session_id, cwd="/", mcp_servers=[])
                await editor.request("session/load", request)
                assert await held.ended.get() == session.session_id
            for writer in lost:
                writer.close()
            turn.cancel()
            await mine.connection.close()
            await asyncio.wait([serving_mine])


@pytest.mark.parametrize(
    "frame", [b'{"jsonrpc":"2.0","id":1,"method":"initialize"}', b"", [b"in", b"", b"pieces"]], ids=repr
)
async def test_binary_frame_closes_the_connection_with_1003_and_a_reason(frame: bytes | list[bytes]):
    left: list[bytes] = []

    async def talk(wire: Transport) -> None:
        left.append(await wire.readline())
        await wire.close()

    async with serving(talk) as url, dial(url, additional_headers=BEARER) as connection:
        await connection.send(frame)
        with pytest.raises(ConnectionClosedError):
            await connection.recv()
        assert connection.close_code == CloseCode.UNSUPPORTED_DATA
        assert connection.close_reason == "ACP messages are text frames"
    assert left == [b""]


async def test_client_closes_the_connection_to_an_agent_that_sends_binary_frames():
    closed = asyncio.Event()

    async def answer(connection: ServerConnection) -> None:
        await connection.send(b"{}")
        await connection.wait_closed()
        assert connection.close_code == CloseCode.UNSUPPORTED_DATA
        closed.set()

    async with listen(answer, "127.0.0.1", 0) as server:
        wire = await connect(f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}")
        assert await wire.readline() == b""
        await closed.wait()
        await wire.close()


async def test_empty_frames_are_ignored():
    async with serving(echo) as url, dial(url, additional_headers=BEARER) as connection:
        await connection.send("")
        assert await ask_text(connection, "text") == "text"
        await connection.send(["in ", "", "pieces"])
        assert await connection.recv() == "in pieces"


async def ask_text(connection: ClientConnection, text: str) -> str | bytes:
    await connection.send(text)
    return await connection.recv()


async def test_thousand_malformed_frames_are_answered_and_the_next_one_works():
    async with serving(Crow(ScriptedModel([]))) as url, dial(url, additional_headers=BEARER) as connection:
        for number in range(250):
            for junk, code in (
                ("{", PARSE_ERROR),
                ('"x"' * number + "x", PARSE_ERROR),
                ("[" * (number + 1) + "]" * (number + 1), INVALID_REQUEST),
                (json.dumps({"jsonrpc": "2.0", "id": number, "method": "session/prompt", "params": 5}), -32602),
            ):
                assert (await ask(connection, junk))["error"]["code"] == code
        answer = await ask(
            connection, '{"jsonrpc": "2.0",\n "id": "x", "method": "initialize", "params": {"protocolVersion": 1}}'
        )
        assert (answer["id"], answer["result"]["protocolVersion"]) == ("x", 1)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (frame(1, b"\xff\xfe"), CloseCode.INVALID_DATA),
        (frame(1, "half of \U0001f426".encode()[:-1]), CloseCode.INVALID_DATA),
        (frame(1, b"x", length=MAX_MESSAGE_BYTES + 1), CloseCode.MESSAGE_TOO_BIG),
        (frame(1, b"x", length=2**63 - 1), CloseCode.MESSAGE_TOO_BIG),
        (frame(1, b"x", last=False) + frame(0, b"x", length=MAX_MESSAGE_BYTES), CloseCode.MESSAGE_TOO_BIG),
        (frame(3, b"x"), CloseCode.PROTOCOL_ERROR),
        (frame(0, b"a continuation of nothing"), CloseCode.PROTOCOL_ERROR),
        (struct.pack("!BB", 0x81, 1) + b"x", CloseCode.PROTOCOL_ERROR),  # not masked
        (frame(0x41, b"compressed, as was not agreed"), CloseCode.PROTOCOL_ERROR),
    ],
)
async def test_invalid_frame_ends_only_its_own_connection(
    bad: bytes, code: CloseCode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Also if the client continues to send: it gets the reason instead of a reset connection."""
    monkeypatch.setattr(websocket, "CLOSE_TIMEOUT", 60)  # the time in which the client sends
    async with serving(echo) as url:
        other = await connect(url, TOKEN)
        reader, writer = await raw(url)
        writer.write(frame(1, b"good") + bad + frame(1, bytes(100_000)) * 80)
        await writer.drain()
        assert await close_code(reader) == code
        writer.close()
        other.write(b"hello\n")
        assert await other.readline() == b"hello"
        await other.close()
    assert caplog.text == ""


@pytest.mark.slow
async def test_message_may_have_at_most_fifty_mebibytes():
    async with serving(echo) as url:
        client = await connect(url, TOKEN)
        full = ("\u00e9x" * MAX_MESSAGE_BYTES).encode()[:MAX_MESSAGE_BYTES]
        client.write(full + b"\n")
        assert await client.readline() == full
        await client.close()
        async with dial(url, additional_headers=BEARER, compression=None) as connection:
            with suppress(ConnectionClosedError):
                await connection.send(bytes(MAX_MESSAGE_BYTES + 1))
            with pytest.raises(ConnectionClosedError) as end:
                await connection.recv()
        assert end.value.rcvd
        assert end.value.rcvd.code == CloseCode.MESSAGE_TOO_BIG


async def test_client_that_does_not_read_delays_only_its_own_agent():
    async def talk(wire: Transport) -> None:
        nonlocal sent
        while await wire.readline() != b"pour":
            wire.write(b"here\n")
        try:
            while True:
                wire.write(b"x" * 10_000 + b"\n")
                sent += 10_000
                await wire.drain()
        except OSError:
            over.set()
        await wire.close()

    sent, over = 0, asyncio.Event()
    async with serving(talk) as url:
        _, writer = await raw(url)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(frame(1, b"pour"))
        other = await connect(url, TOKEN)
        before = -1
        while sent > before or not sent:  # until it waits; the kernel buffers some megabytes before
            before = sent
            other.write(b"are you there?\n")
            assert await other.readline() == b"here"
            await wait_all_tasks_blocked()
        assert sent < 50_000_000
        writer.transport.abort()
        await over.wait()
        await other.close()


async def test_pings_without_reading_end_the_connection():
    async with serving(echo) as url:
        _, writer = await raw(url)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        with pytest.raises(ConnectionError):
            await pour(writer, (struct.pack("!BB", 0x89, 0x80 | 125) + bytes(4) + bytes(125)) * 1000)
        writer.transport.abort()


async def test_client_that_closes_without_reading_is_disconnected(monkeypatch: pytest.MonkeyPatch):
    async def talk(wire: Transport) -> None:
        wire.write(b"x" * MAX_MESSAGE_BYTES + b"\n")
        await wire.readline()
        await wire.close()

    monkeypatch.setattr(websocket, "CLOSE_TIMEOUT", 0.1)
    async with serving(talk) as url:
        _, writer = await raw(url)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(frame(8, struct.pack("!H", CloseCode.NORMAL_CLOSURE)))
        with pytest.raises(ConnectionError):
            await pour(writer, bytes(100_000))
        writer.transport.abort()


async def pour(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()


NEW = '{"jsonrpc":"2.0","id":1,"method":"session/new","params":{"cwd":"/","mcpServers":[]}}'


async def start(connection: ClientConnection) -> str:
    """Open a session, start a turn, wait for its first update, and return the session's id."""
    id = (await ask(connection, NEW))["result"]["sessionId"]
    params = {"sessionId": id, "prompt": [{"type": "text", "text": "Go."}]}
    await connection.send(json.dumps({"jsonrpc": "2.0", "id": 2, "method": "session/prompt", "params": params}))
    while '"word' not in str(await connection.recv()):
        pass
    return id


@pytest.mark.parametrize("reads", [True, False])
async def test_client_that_answers_no_ping_is_disconnected(monkeypatch: pytest.MonkeyPatch, reads: bool):
    async def talk(wire: Transport) -> None:
        try:
            while not reads:
                wire.write(b"x" * 10_000 + b"\n")
                await wire.drain()
            await wire.readline()
        except OSError:
            pass
        finally:
            over.set()
            await wire.close()

    for name in ("PING_INTERVAL", "PONG_TIMEOUT", "CLOSE_TIMEOUT"):
        monkeypatch.setattr(websocket, name, 0.1)
    over = asyncio.Event()
    async with serving(talk) as url:
        reader, writer = await raw(url)
        if reads:
            assert await close_code(reader) == CloseCode.INTERNAL_ERROR
        else:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        await over.wait()
        writer.transport.abort()


@pytest.mark.slow
async def test_message_in_a_hundred_thousand_fragments_takes_little_more_than_its_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(websocket, "PING_INTERVAL", 3600)  # no pings in between
    async with serving(echo) as url:
        reader, writer = await raw(url)
        tracemalloc.start()
        writer.write(frame(1, b"[", last=False))
        for _ in range(100):
            writer.write((struct.pack("!BB", 0, 0x80 | 2) + bytes(4) + b"0,") * 1000 + frame(0, b"", last=False))
            await writer.drain()
        writer.write(frame(9, b"taken?"))
        await reader.readuntil(b"taken?")
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        writer.write(frame(0, b"0]"))
        assert (await reader.readexactly(10 + 200_003)).endswith(b"[" + b"0," * 100_000 + b"0]")
        writer.close()
    assert size < 1_000_000


class Held:
    """A model that streams one word and then waits."""

    def __init__(self) -> None:
        self.crow = Crow(ScriptedModel(lambda request: Reply("word", hang=True)))
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.crow.store = self.store = MemoryStore()
        self.crow.session_end(lambda session: self.ended.put_nowait(session.id))

    async def begin(self, editor: Editor) -> tuple[NewSessionResponse, "asyncio.Task[PromptResponse]"]:
        """Open a session and start a turn."""
        session = await editor.new_session("/")
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "Go."))
        await editor.until(lambda editor: editor.text == "word")
        return session, turn


async def test_lost_connection_leaves_nothing_running():
    held = Held()
    async with serving(held.crow) as url:
        async with dial(url, additional_headers=BEARER) as connection:
            id = await start(connection)
            connection.transport.abort()
        assert await held.ended.get() == id
        assert held.crow.sessions == {}
    assert held.store.records[id].log[-1].get("content") == "word"


async def test_lost_client_is_not_logged_as_an_error(caplog: pytest.LogCaptureFixture):
    held = Held()

    @held.crow.turn_end
    async def say_goodbye(session: Session, outcome: Any) -> None:
        await session.say("Good")
        await wait_all_tasks_blocked()  # until the server has noticed it
        await session.say("bye.")

    async with serving(held.crow) as url:
        async with dial(url, additional_headers=BEARER) as connection:
            id = await start(connection)
            connection.transport.abort()
        assert await held.ended.get() == id
    assert caplog.text == ""


async def test_session_of_a_connected_client_is_joined_by_loading_it():
    held = Held()
    async with serving(held.crow) as url, editing(url) as mine, editing(url) as other:
        session, turn = await held.begin(mine)
        id = session.session_id
        for method, params, code in (
            ("session/prompt", PromptRequest(session_id=id, prompt=[]), NOT_FOUND),
            ("session/delete", DeleteSessionRequest(session_id=id), INVALID_REQUEST),
        ):
            with pytest.raises(RpcError) as refusal:
                await other.request(method, params)
            assert refusal.value.code == code, method
        await other.cancel(id)
        await other.new_session("/")
        assert not turn.done()
        await other.request("session/load", LoadSessionRequest(session_id=id, cwd="/", mcp_servers=[]))
        await other.cancel(id)
        assert (await turn).stop_reason == "cancelled"


@pytest.mark.parametrize("moment", ["turn_end", "session_end"])
async def test_client_that_reconnects_at_once_gets_its_session(moment: str):
    """Also while the turn that it had started is still ending."""
    held, slow = Held(), asyncio.Event()

    async def dawdle(*_: Any) -> None:
        await slow.wait()

    getattr(held.crow, moment)(dawdle)

    async with serving(held.crow) as url:
        async with editing(url) as editor:
            session, turn = await held.begin(editor)
        with pytest.raises(ConnectionClosed):
            await turn
        async with editing(url) as editor:
            request = LoadSessionRequest(session_id=session.session_id, cwd="/", mcp_servers=[])
            loading = asyncio.ensure_future(editor.request("session/load", request))
            await wait_all_tasks_blocked()
            assert not loading.done()
            slow.set()
            await loading
            assert editor.text == "word"


async def test_session_without_a_prompt_can_be_loaded_after_a_reconnect():
    crow = Crow(ScriptedModel([Reply("word")]))
    crow.store = MemoryStore()  # keeps no session without a message
    async with serving(crow) as url:
        async with editing(url) as editor:
            id = (await editor.new_session("/")).session_id
            request = LoadSessionRequest(session_id=id, cwd="/", mcp_servers=[])
            await editor.request("session/load", request)
        async with editing(url) as editor:
            await editor.request("session/load", request)
            await editor.prompt(id, "Go.")
            assert editor.text == "word"
            with pytest.raises(RpcError, match="No session 'x'"):
                await editor.request("session/load", LoadSessionRequest(session_id="x", cwd="/", mcp_servers=[]))


async def test_number_of_sessions_of_a_client_is_limited(monkeypatch: pytest.MonkeyPatch):
    """Also if it requests many at once."""
    monkeypatch.setattr(AcpAgent, "max_sessions", 3)
    crow = Crow(ScriptedModel([]))
    async with serving(crow) as url, editing(url) as one, editing(url) as other:
        opened = await asyncio.gather(*(one.new_session("/") for _ in range(5)), return_exceptions=True)
        sessions = [session for session in opened if not isinstance(session, BaseException)]
        refusals = [refusal for refusal in opened if isinstance(refusal, RpcError)]
        assert (len(sessions), len(crow.sessions)) == (3, 3)
        assert [(refusal.code, str(refusal).partition(":")[0]) for refusal in refusals] == [
            (INVALID_REQUEST, "Too many sessions")
        ] * 2
        await one.request("session/close", CloseSessionRequest(session_id=sessions[0].session_id))
        await one.new_session("/")
        await other.new_session("/")


async def test_close_answers_turns_and_tells_clients(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(websocket, "CLOSE_TIMEOUT", 60)
    held = Held()
    async with AsyncExitStack() as stack:
        async with serving(held.crow) as url:
            connection = await stack.enter_async_context(dial(url, additional_headers=BEARER))
            await start(connection)
            _, idle = await asyncio.open_connection("127.0.0.1", port_of(url))
        idle.close()
        last = [json.loads(message) async for message in connection][-1]
        assert last == {"jsonrpc": "2.0", "id": 2, "result": {"stopReason": "cancelled"}}
        assert connection.close_code == CloseCode.GOING_AWAY
        with pytest.raises(ConnectionRefusedError):
            await connect(url, TOKEN)


async def test_close_does_not_wait_for_clients_that_do_not_read(monkeypatch: pytest.MonkeyPatch):
    async def talk(wire: Transport) -> None:
        try:
            while True:
                wire.write(b"x" * 10_000 + b"\n")
                await wire.drain()
        finally:
            await wire.close()

    monkeypatch.setattr(websocket, "CLOSE_TIMEOUT", 0.1)
    async with serving(talk) as url:
        _, writer = await raw(url)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await wait_all_tasks_blocked()
    writer.transport.abort()
