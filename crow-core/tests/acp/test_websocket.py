"""ACP over WebSocket, with real sockets: who is let in, what passes, and how it ends."""

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
from crow_core import agent
from crow_core.acp import websocket
from crow_core.acp.connection import Connection, ConnectionClosed, RpcError
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
from crow_core.acp.transports import MAX_MESSAGE, Transport
from crow_core.acp.websocket import Gate, Server, connect
from crow_core.agent import Agent
from crow_core.app import Crow
from crow_core.session import Session
from crow_core.store import Record
from crow_core.testing import Editor, Reply, ScriptedModel
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as dial
from websockets.exceptions import ConnectionClosedError, InvalidHandshake, InvalidStatus
from websockets.frames import CloseCode, Opcode
from websockets.typing import Subprotocol

pytestmark = pytest.mark.anyio

TOKEN = "a-token-of-32-characters-or-so.~"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
GATE = Gate(TOKEN, {"localhost", "127.0.0.1", "[::1]"}, {"https://editor.example"})

Talk = Callable[[Transport], Awaitable[Any]]


@asynccontextmanager
async def serving(talk: Talk | Crow, *, gate: Gate = GATE, max_connections: int = 8) -> AsyncIterator[str]:
    """A server's URL. An app is served as `crow serve` does it."""
    crow = talk if isinstance(talk, Crow) else None
    server = Server(gate, talk if crow is None else lambda wire: Agent(wire, crow).serve(), max_connections)
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
    """An editor in conversation with the agent there, past `initialize`."""
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
    """What a WebSocket client is answered, and the subprotocol or the sentence that comes with it."""
    offered = [Subprotocol(name) for name in subprotocols]
    try:
        async with dial(url, additional_headers=headers, subprotocols=offered or None) as connection:
            return 101, connection.subprotocol or ""
    except InvalidStatus as refusal:
        return refusal.response.status_code, refusal.response.body.decode()


async def ask(connection: ClientConnection, message: str | bytes) -> Any:
    """The answer to one frame."""
    await connection.send(message, text=True)
    return json.loads(await connection.recv())


async def raw(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that was let in and does by hand what a library would not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
    key = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + "A" * 22
    writer.write(f"GET /acp HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n{key}==\r\n\r\n".encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
    return reader, writer


def frame(opcode: int, data: bytes, *, length: int | None = None, last: bool = True) -> bytes:
    """A client's frame, masked with zeros; it may claim to be longer than it is."""
    head = struct.pack("!BBQ", 0x80 * last | opcode, 0xFF, len(data) if length is None else length)
    return head + bytes(4) + data


async def close_code(reader: asyncio.StreamReader) -> int:
    """The code with which the server closed, after whatever it said before, all of it short."""
    while True:
        head, size = await reader.readexactly(2)
        said = await reader.readexactly(size)
        if head & 0x0F == Opcode.CLOSE:
            return int.from_bytes(said[:2])


async def test_a_client_and_an_agent_talk_as_they_do_over_standard_streams():
    crow = Crow(ScriptedModel([Reply("Ja, \U0001f426.", "Gut."), Reply("More.", pace=0)]))
    async with serving(crow) as url, editing(url) as editor:
        id = (await editor.new_session("/")).session_id
        assert (await editor.prompt(id, "Hör zu: \U0001f426?")).stop_reason == "end_turn"
        assert (editor.text, editor.thoughts) == ("Ja, \U0001f426.", "Gut.")
        assert (await editor.prompt(id, "And?")).stop_reason == "end_turn"
    assert crow.sessions == {}


async def test_three_thousand_updates_come_in_order_and_before_the_answer():
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
        ({}, [f"bearer.{TOKEN}"], (101, "")),  # browsers want one to be chosen, and it is never this one
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
async def test_only_who_knows_the_token_and_is_no_foreign_page_is_let_in(
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


async def test_a_token_in_the_address_does_not_count():
    """It would end in logs."""
    async with serving(echo) as url:
        assert (await status(f"{url}?token={TOKEN}&access_token={TOKEN}", {}))[0] == 401


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:65535"])
async def test_a_server_answers_to_its_names(host: str):
    async with serving(echo) as url:
        assert (await http(url, f"GET /acp HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n"))[0] == 426


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
async def test_a_name_that_was_bound_to_this_address_by_others_is_refused(host: str):
    """A page of evil.example, which now leads here, sends its own name along."""
    async with serving(echo) as url:
        for request in ("GET /acp", "POST /acp", "GET /", "GET /acp HTTP/1.1\r\nUpgrade: websocket"):
            request = request if "HTTP" in request else f"{request} HTTP/1.1"
            code, _ = await http(url, f"{request}\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n")
            assert code == 403, request


async def test_a_request_without_a_host_is_refused():
    async with serving(echo) as url:
        assert (await http(url, f"GET /acp HTTP/1.0\r\nAuthorization: Bearer {TOKEN}\r\n"))[0] == 403
        assert (await http(url, f"GET /acp HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n"))[0] == 400


async def test_a_server_at_every_address_answers_to_each_of_them_and_to_no_foreign_name():
    gate = Gate(TOKEN, {"localhost", "my-machine"}, any_address=True)
    async with serving(echo, gate=gate) as url:
        for host, code in {"192.168.0.1": 426, "[fe80::1]:80": 426, "my-machine:80": 426, "evil.example": 403}.items():
            request = f"GET /acp HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n"
            assert (await http(url, request))[0] == code


async def http(url: str, head: str, body: bytes = b"") -> tuple[int, str]:
    """The status and the whole of what a plain HTTP request is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split()[1]), answer


@pytest.mark.parametrize(
    ("request_line", "code"),
    [
        *((f"{method} /acp", 405) for method in ("POST", "DELETE", "PUT", "OPTIONS", "HEAD", "PROPFIND")),
        ("GET /acp", 426),
        *((f"{method} /", 404) for method in ("GET", "POST")),
        *((f"GET {path}", 404) for path in ("/acp/", "/ACP", "//acp", "/acp/../x", "/.env", "/%2e%2e/etc/passwd")),
    ],
)
async def test_what_is_no_websocket_is_answered_with_a_sentence(request_line: str, code: int):
    async with serving(echo) as url:
        head = f"{request_line} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        found, answer = await http(url, head, b"{}")
        without, _ = await http(url, f"{request_line} HTTP/1.1\r\nHost: localhost\r\n", b"{}")
    assert (found, without) == (code, 401)
    assert "access-control" not in answer.lower()
    words = answer.partition("\r\n\r\n")[2]
    assert words.endswith(".\n") or request_line.startswith("HEAD")


async def test_what_is_no_http_is_refused_and_the_next_one_is_let_in():
    async with serving(echo) as url:
        for junk in (b"\x16\x03\x01\x02\x00\x01\x00", b"\x00" * 100, b"{}\n\n", b"GET\r\n\r\n", b"X" * 100_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
            writer.write(junk)
            writer.write_eof()
            with suppress(ConnectionResetError):
                assert b"200" not in await reader.read()
            writer.close()
        assert (await status(url, BEARER))[0] == 101


async def test_every_connection_has_an_id_of_its_own():
    async with serving(echo) as url:
        ids = set[str]()
        for _ in range(3):
            async with dial(url, additional_headers=BEARER) as connection:
                assert connection.response
                ids.add(connection.response.headers["Acp-Connection-Id"])
    assert len(ids) == 3


async def test_what_is_not_let_in_is_told_before_the_upgrade_and_with_what_to_do():
    async with serving(echo) as url:
        with pytest.raises(InvalidStatus) as refusal:
            await connect(url, "wrong")
    assert refusal.value.response.headers["WWW-Authenticate"] == "Bearer"
    assert b"Authorization: Bearer TOKEN" in (refusal.value.response.body or b"")


async def test_as_many_as_may_are_let_in_and_the_next_one_when_somebody_has_left():
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


async def test_who_connects_and_says_nothing_is_shown_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(websocket, "HANDSHAKE", 0.1)
    async with serving(echo) as url:
        client = None
        while client is None:
            with suppress(OSError, InvalidHandshake):  # this machine may take longer than that
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


async def test_sockets_that_are_not_let_in_cannot_pile_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(websocket, "WAITING_ROOM", 3)
    monkeypatch.setattr(websocket, "HANDSHAKE", 60)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(echo, max_connections=1))
        lingering = [await asyncio.open_connection("127.0.0.1", port_of(url)) for _ in range(4)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        with suppress(ConnectionResetError):
            await reader.read()  # to the end
        for _, other in [*lingering, (reader, writer)]:
            other.close()


async def test_binary_and_empty_frames_are_ignored():
    async with serving(echo) as url, dial(url, additional_headers=BEARER) as connection:
        await connection.send(b'{"jsonrpc":"2.0","id":1,"method":"initialize"}')
        await connection.send("")
        await connection.send([b"in", b"", b"pieces"])
        assert await ask_text(connection, "text") == "text"
        await connection.send(["in ", "", "pieces"])
        assert await connection.recv() == "in pieces"


async def ask_text(connection: ClientConnection, text: str) -> str | bytes:
    await connection.send(text)
    return await connection.recv()


async def test_a_thousand_frames_of_junk_are_answered_and_the_next_one_works():
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
        (frame(1, b"x", length=MAX_MESSAGE + 1), CloseCode.MESSAGE_TOO_BIG),
        (frame(1, b"x", length=2**63 - 1), CloseCode.MESSAGE_TOO_BIG),
        (frame(1, b"x", last=False) + frame(0, b"x", length=MAX_MESSAGE), CloseCode.MESSAGE_TOO_BIG),
        (frame(3, b"x"), CloseCode.PROTOCOL_ERROR),
        (frame(0, b"a continuation of nothing"), CloseCode.PROTOCOL_ERROR),
        (struct.pack("!BB", 0x81, 1) + b"x", CloseCode.PROTOCOL_ERROR),  # not masked
        (frame(0x41, b"compressed, as was not agreed"), CloseCode.PROTOCOL_ERROR),
    ],
)
async def test_a_frame_against_the_rules_ends_its_connection_and_no_other(
    bad: bytes, code: CloseCode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Also when the client goes on sending: it hears why, and no reset connection."""
    monkeypatch.setattr(websocket, "GRACE", 60)  # in which it sends
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
async def test_a_message_may_have_fifty_mebibytes_and_no_more():
    async with serving(echo) as url:
        client = await connect(url, TOKEN)
        full = ("\u00e9x" * MAX_MESSAGE).encode()[:MAX_MESSAGE]
        client.write(full + b"\n")
        assert await client.readline() == full
        await client.close()
        async with dial(url, additional_headers=BEARER, compression=None) as connection:
            with suppress(ConnectionClosedError):
                await connection.send(bytes(MAX_MESSAGE + 1))
            with pytest.raises(ConnectionClosedError) as end:
                await connection.recv()
        assert end.value.rcvd
        assert end.value.rcvd.code == CloseCode.MESSAGE_TOO_BIG


async def test_a_client_that_does_not_read_keeps_its_agent_waiting_and_nobody_else():
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
        while sent > before or not sent:  # until it waits; the kernel takes some megabytes meanwhile
            before = sent
            other.write(b"are you there?\n")
            assert await other.readline() == b"here"
            await wait_all_tasks_blocked()
        assert sent < 50_000_000
        writer.transport.abort()
        await over.wait()
        await other.close()


async def test_pings_that_nobody_wants_to_hear_answered_end_the_connection():
    async with serving(echo) as url:
        _, writer = await raw(url)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        with pytest.raises(ConnectionError):
            await pour(writer, (struct.pack("!BB", 0x89, 0x80 | 125) + bytes(4) + bytes(125)) * 1000)
        writer.transport.abort()


async def test_who_says_goodbye_and_does_not_read_is_hung_up_on(monkeypatch: pytest.MonkeyPatch):
    async def talk(wire: Transport) -> None:
        wire.write(b"x" * MAX_MESSAGE + b"\n")
        await wire.readline()
        await wire.close()

    monkeypatch.setattr(websocket, "GRACE", 0.1)
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
    """The id of a new session, in which a turn has begun to stream."""
    id = (await ask(connection, NEW))["result"]["sessionId"]
    params = {"sessionId": id, "prompt": [{"type": "text", "text": "Go."}]}
    await connection.send(json.dumps({"jsonrpc": "2.0", "id": 2, "method": "session/prompt", "params": params}))
    while '"word' not in str(await connection.recv()):
        pass
    return id


@pytest.mark.parametrize("reads", [True, False])
async def test_who_answers_no_ping_is_gone(monkeypatch: pytest.MonkeyPatch, reads: bool):
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

    for name in ("PING", "PONG", "GRACE"):
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
async def test_a_message_in_a_hundred_thousand_pieces_takes_little_more_than_its_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(websocket, "PING", 3600)  # what comes back is taken as it comes
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
    """A model that streams a word and waits."""

    def __init__(self) -> None:
        self.crow = Crow(ScriptedModel(lambda request: Reply("word", hang=True)))
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.stored: dict[str, Record] = {}
        self.crow.session_end(self.end)
        self.crow.load_session(self.stored.get)
        self.crow.delete_session(lambda id: self.stored.pop(id, None) and None)

    def end(self, session: Session) -> None:
        self.stored[session.id] = Record(session.id, list(session.log))
        self.ended.put_nowait(session.id)

    async def begin(self, editor: Editor) -> tuple[NewSessionResponse, "asyncio.Task[PromptResponse]"]:
        """A new session in which a turn runs."""
        session = await editor.new_session("/")
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "Go."))
        await editor.until(lambda editor: editor.text == "word")
        return session, turn


async def test_a_client_that_is_cut_off_leaves_nothing_running():
    held = Held()
    async with serving(held.crow) as url:
        async with dial(url, additional_headers=BEARER) as connection:
            id = await start(connection)
            connection.transport.abort()
        assert await held.ended.get() == id
        assert held.crow.sessions == {}
    assert held.stored[id].log[-1].get("content") == "word"


async def test_that_a_client_is_gone_is_no_error(caplog: pytest.LogCaptureFixture):
    held = Held()

    @held.crow.turn_end
    async def say_goodbye(session: Session, outcome: Any) -> None:
        await session.say("Good")
        await wait_all_tasks_blocked()  # until it is known that nobody is there
        await session.say("bye.")

    async with serving(held.crow) as url:
        async with dial(url, additional_headers=BEARER) as connection:
            id = await start(connection)
            connection.transport.abort()
        assert await held.ended.get() == id
    assert caplog.text == ""


async def test_a_session_is_nobody_elses_while_its_client_is_there():
    held = Held()
    async with serving(held.crow) as url, editing(url) as mine, editing(url) as other:
        session, turn = await held.begin(mine)
        id = session.session_id
        for method, params, code in (
            ("session/prompt", PromptRequest(session_id=id, prompt=[]), NOT_FOUND),
            ("session/load", LoadSessionRequest(session_id=id, cwd="/", mcp_servers=[]), INVALID_REQUEST),
            ("session/delete", DeleteSessionRequest(session_id=id), INVALID_REQUEST),
        ):
            with pytest.raises(RpcError) as refusal:
                await other.request(method, params)
            assert refusal.value.code == code, method
        await other.cancel(id)
        await other.new_session("/")
        assert not turn.done()
        await mine.cancel(id)
        assert (await turn).stop_reason == "cancelled"


@pytest.mark.parametrize("moment", ["turn_end", "session_end"])
async def test_a_client_that_comes_back_at_once_gets_its_session(moment: str):
    """Also while what it had begun is still ending."""
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


async def test_one_client_cannot_open_sessions_without_end(monkeypatch: pytest.MonkeyPatch):
    """Also when it asks for many at once."""
    monkeypatch.setattr(agent, "MAX_SESSIONS", 3)
    crow = Crow(ScriptedModel([]))
    async with serving(crow) as url, editing(url) as one, editing(url) as other:
        opened = await asyncio.gather(*(one.new_session("/") for _ in range(5)), return_exceptions=True)
        sessions = [session for session in opened if not isinstance(session, BaseException)]
        refusals = [refusal for refusal in opened if isinstance(refusal, RpcError)]
        assert (len(sessions), len(crow.sessions)) == (3, 3)
        assert [(refusal.code, refusal.message) for refusal in refusals] == [(INVALID_REQUEST, "Too many sessions")] * 2
        await one.request("session/close", CloseSessionRequest(session_id=sessions[0].session_id))
        await one.new_session("/")
        await other.new_session("/")


async def test_at_the_end_turns_are_answered_and_clients_are_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(websocket, "GRACE", 60)
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


async def test_the_end_does_not_wait_for_clients_that_do_not_read(monkeypatch: pytest.MonkeyPatch):
    async def talk(wire: Transport) -> None:
        try:
            while True:
                wire.write(b"x" * 10_000 + b"\n")
                await wire.drain()
        finally:
            await wire.close()

    monkeypatch.setattr(websocket, "GRACE", 0.1)
    async with serving(talk) as url:
        _, writer = await raw(url)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await wait_all_tasks_blocked()
    writer.transport.abort()
