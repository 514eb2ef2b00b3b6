"""Test the JSON-RPC peer by the lines that it writes and by requests between two peers."""

import asyncio
import gc
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anyio import wait_all_tasks_blocked
from crow_core.acp import connection as acp_connection
from crow_core.acp.connection import MAX_RUNNING, MAX_RUNNING_BYTES, Connection, ConnectionClosed, Handler, RpcError
from crow_core.acp.schema import (
    AGENT_METHODS,
    AUTH_REQUIRED,
    CLIENT_METHODS,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    REQUEST_CANCELLED,
    AgentMessageChunk,
    CancelNotification,
    ListSessionsRequest,
    ListSessionsResponse,
    NewSessionRequest,
    NewSessionResponse,
    PromptRequest,
    PromptResponse,
    ReadTextFileRequest,
    ReadTextFileResponse,
    SessionNotification,
    TextBlock,
)
from crow_core.acp.transports import HIGH_WATER_BYTES, MemoryTransport, memory_pair
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.anyio

PROMPT = PromptRequest(session_id="s", prompt=[TextBlock(text="hi")])
NEW = NewSessionRequest(cwd="/tmp", mcp_servers=[])


def update(text: str) -> SessionNotification:
    return SessionNotification(session_id="s", update=AgentMessageChunk(content=TextBlock(text=text)))


def get_text(update: SessionNotification) -> str:
    assert isinstance(update.update, AgentMessageChunk)
    assert isinstance(update.update.content, TextBlock)
    return update.update.content.text


async def list_nothing(params: ListSessionsRequest) -> ListSessionsResponse:
    return ListSessionsResponse(sessions=[])


async def wait_forever(params: Any) -> None:
    await asyncio.get_running_loop().create_future()


class Wire:
    """The other end of a connection, as lines."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport

    async def send(self, line: bytes | dict[str, Any]) -> None:
        raw = line if isinstance(line, bytes) else json.dumps(line).encode()
        self.transport.write(raw + b"\n")
        await self.transport.drain()

    async def request(self, id: Any, method: str, params: Any) -> None:
        await self.send({"jsonrpc": "2.0", "id": id, "method": method, "params": params})

    async def notify(self, method: str, params: Any) -> None:
        await self.send({"jsonrpc": "2.0", "method": method, "params": params})

    async def receive(self) -> dict[str, Any]:
        line = await self.transport.readline()
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        message = json.loads(line)
        assert message.pop("jsonrpc") == "2.0"
        return message

    async def receive_until(self, id: Any) -> list[dict[str, Any]]:
        """Return the messages up to the answer to `id`."""
        received: list[dict[str, Any]] = []
        while (message := await self.receive()).get("id") != id:
            received.append(message)
        return received


@asynccontextmanager
async def serving(handlers: Mapping[str, Handler]) -> AsyncIterator[tuple[Connection, Wire]]:
    """Serve an agent's connection; yield it and its other end as lines."""
    ours, theirs = memory_pair()
    connection = Connection(ours, AGENT_METHODS, CLIENT_METHODS, handlers)
    async with asyncio.TaskGroup() as group:
        group.create_task(connection.serve())
        yield connection, Wire(theirs)
        await theirs.close()


@asynccontextmanager
async def connected(
    agent_handlers: Mapping[str, Handler], client_handlers: Mapping[str, Handler]
) -> AsyncIterator[tuple[Connection, Connection]]:
    """Connect an agent and a client, and yield both."""
    one, other = memory_pair()
    agent = Connection(one, AGENT_METHODS, CLIENT_METHODS, agent_handlers)
    client = Connection(other, CLIENT_METHODS, AGENT_METHODS, client_handlers)
    async with asyncio.TaskGroup() as group:
        group.create_task(agent.serve())
        group.create_task(client.serve())
        yield agent, client
        await client.close()


async def test_request_and_result_are_structs_on_both_sides():
    async def new(params: NewSessionRequest) -> NewSessionResponse:
        file = await agent.request("fs/read_text_file", ReadTextFileRequest(session_id="s", path=params.cwd))
        return NewSessionResponse(session_id=file.content)

    async def read(params: ReadTextFileRequest) -> ReadTextFileResponse:
        return ReadTextFileResponse(content=f"what is in {params.path}")

    async with connected({"session/new": new}, {"fs/read_text_file": read}) as (agent, client):
        assert await client.request("session/new", NEW) == NewSessionResponse(session_id="what is in /tmp")


@pytest.mark.parametrize("id", [0, 1, -1, 2**70, "1", "", "\u00e9\U0001f426", None])
async def test_answer_has_the_id_with_its_type(id: Any):
    async with serving({"session/list": list_nothing}) as (_, wire):
        await wire.request(id, "session/list", {})
        answer = await wire.receive()
        assert answer == {"id": id, "result": {"sessions": []}}
        assert type(answer["id"]) is type(id)


@pytest.mark.parametrize("params", ["", ',"params":{}', ',"params":null'])
async def test_params_without_required_fields_may_be_left_out(params: str):
    async with serving({"session/list": list_nothing}) as (_, wire):
        await wire.send(b'{"jsonrpc":"2.0","id":1,"method":"session/list"%b}' % params.encode())
        assert await wire.receive() == {"id": 1, "result": {"sessions": []}}


async def test_handler_that_returns_none_answers_an_empty_object():
    async def load(params: Any) -> None: ...

    async with serving({"session/load": load}) as (_, wire):
        await wire.request(1, "session/load", {"sessionId": "s", "cwd": "/", "mcpServers": []})
        assert await wire.receive() == {"id": 1, "result": {}}


@pytest.mark.parametrize(
    ("line", "id", "code"),
    [
        (b"hello", None, PARSE_ERROR),
        (b'{"jsonrpc":"2.0","id":1,"method":"session/list"', None, PARSE_ERROR),
        (b'{"jsonrpc":"2.0","id":1,"method":"session/list"} {}', None, PARSE_ERROR),
        (b'{"jsonrpc":1,"id":1,"method":"session/list",}', None, PARSE_ERROR),
        (b'{"jsonrpc":"2.0","id":1,"method":"session/list","params":{"cwd":"\xff"}}', None, PARSE_ERROR),
        (b'{"jsonrpc":"2.0","id":1,"method":"session/list","\xc3\x28":0}', None, PARSE_ERROR),
        (b"[" * 100_000, None, PARSE_ERROR),
        (b'{"jsonrpc":"2.0","id":1,"method":"session/list","params":' + b"[" * 100_000, None, PARSE_ERROR),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, None, PARSE_ERROR),
        (b"[]", None, INVALID_REQUEST),
        (b'[{"jsonrpc":"2.0","id":1,"method":"session/list"}]', None, INVALID_REQUEST),
        (b"12", None, INVALID_REQUEST),
        (b'"text"', None, INVALID_REQUEST),
        (b"null", None, INVALID_REQUEST),
        (b"{}", None, INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":7}', 7, INVALID_REQUEST),
        (b'{"id":7,"method":"session/list"}', 7, INVALID_REQUEST),
        (b'{"jsonrpc":"1.0","id":"7","method":"session/list"}', "7", INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":7,"method":5}', 7, INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","method":5}', None, INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"session/list"}', None, INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":true,"method":"session/list"}', None, INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":{},"method":"session/list"}', None, INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":%b,"method":"session/list"}' % (b"9" * 5000), None, INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":7,"error":5}', None, INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":7,"method":"no/such"}', 7, METHOD_NOT_FOUND),
        (b'{"jsonrpc":"2.0","id":7,"method":"$/no/such"}', 7, METHOD_NOT_FOUND),
        (b'{"jsonrpc":"2.0","id":7,"method":"_no/such","params":{}}', 7, METHOD_NOT_FOUND),
        (b'{"jsonrpc":"2.0","id":7,"method":"logout","params":{}}', 7, METHOD_NOT_FOUND),
        (b'{"jsonrpc":"2.0","id":7,"method":"session/cancel","params":{"sessionId":"s"}}', 7, METHOD_NOT_FOUND),
        (b'{"jsonrpc":"2.0","id":7,"method":"session/prompt"}', 7, INVALID_PARAMS),
        (b'{"jsonrpc":"2.0","id":7,"method":"session/prompt","params":5}', 7, INVALID_PARAMS),
        (b'{"jsonrpc":"2.0","id":7,"method":"session/prompt","params":[]}', 7, INVALID_PARAMS),
    ],
)
async def test_malformed_line_gets_one_error_and_the_next_line_works(line: bytes, id: Any, code: int):
    async def cancel(params: CancelNotification) -> None: ...

    async with serving({"session/list": list_nothing, "session/prompt": wait_forever, "session/cancel": cancel}) as (
        _,
        wire,
    ):
        await wire.send(line)
        refusal = await wire.receive()
        assert (refusal["id"], refusal["error"]["code"]) == (id, code)
        assert "\n" not in refusal["error"]["message"]
        await wire.request("next", "session/list", {})
        assert await wire.receive() == {"id": "next", "result": {"sessions": []}}


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b" \t\r",
        b'{"jsonrpc":"2.0","method":"no/such","params":{}}',
        b'{"jsonrpc":"2.0","method":"$/no/such"}',
        b'{"jsonrpc":"2.0","method":"_no/such"}',
        b'{"jsonrpc":"2.0","method":"session/cancel","params":{"sessionId":5}}',
        b'{"jsonrpc":"2.0","method":"session/list","params":{}}',
        b'{"jsonrpc":"2.0","method":"$/cancel_request","params":{"requestId":"no such"}}',
        b'{"jsonrpc":"2.0","id":99,"result":{}}',
        b'{"jsonrpc":"2.0","id":"99","error":{"code":1,"message":"no"}}',
        b'{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"no"}}',
    ],
)
async def test_line_that_is_not_a_request_gets_no_answer(line: bytes, caplog: pytest.LogCaptureFixture):
    async def cancel(params: CancelNotification) -> None: ...

    async with serving({"session/list": list_nothing, "session/cancel": cancel}) as (_, wire):
        await wire.send(line)
        await wire.request(1, "session/list", {})
        assert await wire.receive_until(1) == []


@pytest.mark.parametrize("half", [rb"\ud83d", rb"\uDE00", rb"\ud83d\ud83d\ude00"])
async def test_message_with_half_an_emoji_is_read(half: bytes):
    """A client may cut a text in the middle of an emoji and must get its answer, too."""
    received: list[str] = []

    async def prompt(params: PromptRequest) -> PromptResponse:
        received.extend(block.text for block in params.prompt if isinstance(block, TextBlock))
        return PromptResponse(stop_reason="end_turn")

    line = (
        b'{"jsonrpc":"2.0","id":1,"method":"session/prompt","params":{"sessionId":"s","prompt":'
        b'[{"type":"text","text":"a' + half + b'b"}],"_meta":{"' + half + b'":1}}}'
    )
    async with serving({"session/prompt": prompt}) as (_, wire):
        await wire.send(line)
        assert await wire.receive() == {"id": 1, "result": {"stopReason": "end_turn"}}
    assert received[0].startswith("a?")
    assert received[0].endswith("b")


async def test_invalid_params_are_refused_with_their_path():
    async with serving({"session/prompt": wait_forever}) as (_, wire):
        await wire.request(1, "session/prompt", {"sessionId": "s", "prompt": [{"type": "text", "text": 5}]})
        error = (await wire.receive())["error"]
        assert error == {"code": INVALID_PARAMS, "message": "Invalid params: prompt[0].text: expected str, got int"}


async def test_error_that_a_handler_raises_is_sent_with_its_details_in_the_message():
    async def prompt(params: PromptRequest) -> None:
        raise RpcError(AUTH_REQUIRED, "Authentication required", {"hint": 1}, details="Run crow auth.")

    async with connected({"session/prompt": prompt}, {}) as (_, client):
        with pytest.raises(RpcError) as raised:
            await client.request("session/prompt", PROMPT)
        assert (raised.value.code, raised.value.message) == (
            AUTH_REQUIRED,
            "Authentication required: Run crow auth.",
        )
        assert raised.value.data == {"hint": 1, "details": "Run crow auth."}


async def test_failing_handler_is_answered_with_an_error_and_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    log = logging.getLogger("crow_core.acp.connection")
    monkeypatch.setattr(log, "propagate", False)  # a report cannot be written with this log record
    monkeypatch.setattr(log, "handlers", [caplog.handler])

    async def prompt(params: PromptRequest) -> None:
        raise RuntimeError("the disk is full\nand \udcff more")

    async with serving({"session/prompt": prompt}) as (_, wire):
        await wire.request(1, "session/prompt", {"sessionId": "s", "prompt": []})
        assert await wire.receive() == {
            "id": 1,
            "error": {
                "code": INTERNAL_ERROR,
                "message": "Internal error: the disk is full and ? more",
                "data": {"details": "the disk is full\nand ? more"},
            },
        }
    assert "Traceback" in caplog.text


async def test_closed_connection_is_not_logged_as_a_failure(caplog: pytest.LogCaptureFixture):
    async def prompt(params: PromptRequest) -> None:
        raise ConnectionClosed("the other side is gone")

    async with serving({"session/prompt": prompt}) as (_, wire):
        await wire.request(1, "session/prompt", {"sessionId": "s", "prompt": []})
        assert (await wire.receive())["error"]["code"] == INTERNAL_ERROR
    assert caplog.text == ""


@pytest.mark.parametrize(
    "error", [RpcError(1, "no\njson\udcff", {"path": object()}), RpcError(1, "no json ?", "\udcff")]
)
async def test_error_with_data_that_is_not_json_is_sent_without_data(error: RpcError):
    async def prompt(params: PromptRequest) -> None:
        raise error

    async with serving({"session/prompt": prompt}) as (_, wire):
        await wire.request(1, "session/prompt", {"sessionId": "s", "prompt": []})
        answer = await wire.receive()
        assert answer["error"]["code"] == 1
        assert "data" not in answer["error"]


async def test_result_that_is_not_json_is_an_internal_error(caplog: pytest.LogCaptureFixture):
    async def list_objects(params: ListSessionsRequest) -> object:
        return object()

    async with serving({"session/list": list_objects}) as (_, wire):
        await wire.request(1, "session/list", {})
        assert (await wire.receive())["error"]["code"] == INTERNAL_ERROR


async def test_answer_is_written_before_callbacks_that_the_handler_scheduled():
    async def new(params: NewSessionRequest) -> NewSessionResponse:
        asyncio.get_running_loop().call_soon(ours.write, b'{"jsonrpc":"2.0","method":"next"}\n')
        return NewSessionResponse(session_id="s")

    ours, theirs = memory_pair()
    connection, wire = Connection(ours, AGENT_METHODS, CLIENT_METHODS, {"session/new": new}), Wire(theirs)
    async with asyncio.TaskGroup() as group:
        group.create_task(connection.serve())
        await wire.request(1, "session/new", {"cwd": "/", "mcpServers": []})
        assert await wire.receive() == {"id": 1, "result": {"sessionId": "s"}}
        assert await wire.receive() == {"method": "next"}
        await connection.close()


async def test_cancel_directly_after_its_prompt_finds_it_running():
    running: dict[str, asyncio.Task[Any]] = {}

    async def prompt(params: PromptRequest) -> PromptResponse:
        task = running[params.session_id] = asyncio.current_task()  # type: ignore[assignment]
        assert task is not None
        try:
            await wait_forever(params)
        except asyncio.CancelledError:
            return PromptResponse(stop_reason="cancelled")
        raise AssertionError

    async def cancel(params: CancelNotification) -> None:
        running[params.session_id].cancel()

    async with serving({"session/prompt": prompt, "session/cancel": cancel}) as (_, wire):
        for id in range(100):
            await wire.request(id, "session/prompt", {"sessionId": "s", "prompt": []})
            await wire.notify("session/cancel", {"sessionId": "s"})
            assert await wire.receive() == {"id": id, "result": {"stopReason": "cancelled"}}


async def test_request_returns_after_the_updates_before_its_answer_are_handled():
    async def prompt(params: PromptRequest) -> PromptResponse:
        for number in range(3000):
            await agent.notify("session/update", update(str(number)))
        return PromptResponse(stop_reason="end_turn")

    async def show(params: SessionNotification) -> None:
        texts.append(get_text(params))
        await asyncio.sleep(0)

    texts: list[str] = []
    async with connected({"session/prompt": prompt}, {"session/update": show}) as (agent, client):
        await client.request("session/prompt", PROMPT)
        assert texts == [str(number) for number in range(3000)]


async def test_requests_run_in_parallel():
    async def prompt(params: PromptRequest) -> PromptResponse:
        await released.wait()
        return PromptResponse(stop_reason="end_turn")

    released = asyncio.Event()
    async with serving({"session/prompt": prompt, "session/list": list_nothing}) as (_, wire):
        await wire.request(1, "session/prompt", {"sessionId": "s", "prompt": []})
        await wire.request(2, "session/list", {})
        assert (await wire.receive())["id"] == 2
        released.set()
        assert (await wire.receive())["id"] == 1


async def test_cancelled_request_is_answered_with_the_cancelled_error():
    async with serving({"session/prompt": wait_forever}) as (_, wire):
        await wire.request("a", "session/prompt", {"sessionId": "s", "prompt": []})
        await wire.notify("$/cancel_request", {"requestId": "a"})
        assert await wire.receive() == {"id": "a", "error": {"code": REQUEST_CANCELLED, "message": "Request cancelled"}}


async def test_request_that_ignores_its_cancellation_is_answered_with_its_result():
    async def prompt(params: PromptRequest) -> PromptResponse:
        try:
            await wait_forever(params)
        except asyncio.CancelledError:
            await agent.notify("session/update", update("the last words"))
        return PromptResponse(stop_reason="cancelled")

    async with serving({"session/prompt": prompt}) as (agent, wire):
        await wire.request(1, "session/prompt", {"sessionId": "s", "prompt": []})
        await wire.notify("$/cancel_request", {"requestId": 1})
        assert (await wire.receive())["method"] == "session/update"
        assert await wire.receive() == {"id": 1, "result": {"stopReason": "cancelled"}}


async def test_cancelled_caller_cancels_its_request_on_the_other_side():
    async def read(params: ReadTextFileRequest) -> None:
        started.set()
        try:
            await wait_forever(params)
        finally:
            cancelled.set()

    started, cancelled = asyncio.Event(), asyncio.Event()
    async with connected({}, {"fs/read_text_file": read}) as (agent, _):
        asking = asyncio.create_task(
            agent.request("fs/read_text_file", ReadTextFileRequest(session_id="s", path="/never"))
        )
        await started.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await cancelled.wait()


async def test_late_answer_to_a_cancelled_request_is_ignored():
    async with serving({"session/list": list_nothing}) as (connection, wire):
        asking = asyncio.create_task(
            connection.request("fs/read_text_file", ReadTextFileRequest(session_id="s", path="/"))
        )
        id = (await wire.receive())["id"]
        asking.cancel()
        assert await wire.receive() == {"method": "$/cancel_request", "params": {"requestId": id}}
        await wire.send({"jsonrpc": "2.0", "id": id, "result": {"content": "late"}})
        await wire.request(1, "session/list", {})
        assert await wire.receive_until(1) == []
        assert asking.cancelled()


async def test_id_of_a_running_request_is_refused_and_can_be_used_again_later():
    async def prompt(params: PromptRequest) -> PromptResponse:
        await released.wait()
        return PromptResponse(stop_reason="end_turn")

    released = asyncio.Event()
    async with serving({"session/prompt": prompt, "session/list": list_nothing}) as (_, wire):
        await wire.request(1, "session/prompt", {"sessionId": "s", "prompt": []})
        await wire.request(1, "session/list", {})
        assert (await wire.receive())["error"]["code"] == INVALID_REQUEST
        await wire.request("1", "session/list", {})
        assert (await wire.receive())["id"] == "1"
        released.set()
        assert await wire.receive() == {"id": 1, "result": {"stopReason": "end_turn"}}
        await wire.request(1, "session/list", {})
        assert await wire.receive() == {"id": 1, "result": {"sessions": []}}


@pytest.mark.parametrize(
    "answer",
    [
        '"result":{"content":5}',
        '"result":[]',
        '"error":5',
        '"error":null',
        '"error":{"code":"x","message":5}',
        '"result":{"content":"x"},"jsonrpc":"1.0"',
    ],
)
async def test_unreadable_answer_fails_its_request(answer: str):
    async with serving({}) as (connection, wire):
        asking = asyncio.create_task(
            connection.request("fs/read_text_file", ReadTextFileRequest(session_id="s", path="/"))
        )
        id = (await wire.receive())["id"]
        await wire.send(b'{"jsonrpc":"2.0","id":%d,%b}' % (id, answer.encode()))
        with pytest.raises(RpcError) as raised:
            await asking
        assert raised.value.code == INTERNAL_ERROR
        assert raised.value.data["details"]


async def test_null_is_a_result_without_required_fields():
    async with serving({}) as (connection, wire):
        asking = asyncio.create_task(connection.request("fs/write_text_file", {"sessionId": "s"}))
        await wire.send({"jsonrpc": "2.0", "id": (await wire.receive())["id"], "result": None})
        assert type(await asking) is CLIENT_METHODS["fs/write_text_file"].result


async def test_extension_methods_take_and_return_plain_json():
    async def count(params: dict[str, Any]) -> dict[str, Any]:
        return {"n": params["n"] + 1}

    async def note(params: dict[str, Any]) -> None:
        noted.append(params)

    noted: list[Any] = []
    async with connected({"_crow/count": count, "_crow/note": note}, {}) as (_, client):
        await client.notify("_crow/note", {"a": 1})
        assert await client.request("_crow/count", {"n": 1}) == {"n": 2}
        assert noted == [{"a": 1}]


async def test_handler_for_an_unknown_method_is_refused():
    with pytest.raises(KeyError, match="session/pormpt"):
        Connection(memory_pair()[0], AGENT_METHODS, CLIENT_METHODS, {"session/pormpt": wait_forever})


async def test_failing_notification_is_logged_and_the_connection_continues(caplog: pytest.LogCaptureFixture):
    async def cancel(params: CancelNotification) -> None:
        raise RuntimeError("boom")

    async with serving({"session/cancel": cancel, "session/list": list_nothing}) as (_, wire):
        await wire.notify("session/cancel", {"sessionId": "s"})
        await wire.request(1, "session/list", {})
        assert await wire.receive_until(1) == []
    assert "boom" in caplog.text


async def test_end_of_input_cancels_running_requests_fails_waiting_ones_and_ends_serve():
    async def prompt(params: PromptRequest) -> None:
        try:
            await wait_forever(params)
        finally:
            ended.append(params.session_id)

    ended: list[str] = []
    read = ReadTextFileRequest(session_id="s", path="/")
    ours, theirs = memory_pair()
    connection, wire = Connection(ours, AGENT_METHODS, CLIENT_METHODS, {"session/prompt": prompt}), Wire(theirs)
    asking = asyncio.create_task(connection.request("fs/read_text_file", read))
    assert (await wire.receive())["method"] == "fs/read_text_file"
    await wire.request(1, "session/prompt", {"sessionId": "s", "prompt": []})
    await theirs.close()
    await connection.serve()
    assert ended == ["s"]
    with pytest.raises(ConnectionClosed):
        await asking
    with pytest.raises(ConnectionClosed):
        await connection.request("fs/read_text_file", read)
    with pytest.raises(ConnectionClosed):
        await connection.notify("session/update", update("too late"))


async def test_updates_before_the_end_of_the_connection_are_handled_in_full():
    async def show(params: SessionNotification) -> None:
        await asyncio.sleep(0)
        texts.append(get_text(params))

    texts: list[str] = []
    one, other = memory_pair()
    agent, client = (
        Connection(one, AGENT_METHODS, {}, {}),
        Connection(other, CLIENT_METHODS, {}, {"session/update": show}),
    )
    await agent.notify("session/update", update("the last words"))
    await agent.close()
    await client.serve()
    assert texts == ["the last words"]


async def test_notification_that_never_ends_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acp_connection, "NOTIFICATION_TIMEOUT", 0.1)
    async with serving({"session/cancel": wait_forever}) as (_, wire):
        await wire.notify("session/cancel", {"sessionId": "s"})
        await wire.transport.close()
        assert await wire.transport.readline() == b""


async def test_error_for_a_cancelled_waiter_is_not_reported(caplog: pytest.LogCaptureFixture):
    read = ReadTextFileRequest(session_id="s", path="x" * 2 * HIGH_WATER_BYTES)
    async with serving({}) as (connection, wire):
        asking = asyncio.create_task(connection.request("fs/read_text_file", read))  # waits until the peer reads
        await wait_all_tasks_blocked()
        await wire.send({"jsonrpc": "2.0", "id": 1, "error": {"code": 1, "message": "no"}})
        await wait_all_tasks_blocked()
        await wire.transport.close()
        with pytest.raises(ConnectionClosed):
            await asking
    del asking
    gc.collect()
    assert caplog.text == ""


async def test_handler_may_close_the_connection():
    async def logout(params: Any) -> None:
        await connection.close()
        closed.append(True)

    closed: list[bool] = []
    async with serving({"logout": logout}) as (connection, wire):
        await wire.request(1, "logout", {})
        assert await wire.transport.readline() == b""
    assert closed == [True]


async def test_handler_that_ignores_its_cancellation_does_not_delay_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    async def prompt(params: PromptRequest) -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    monkeypatch.setattr(acp_connection, "CANCEL_TIMEOUT", 0.1)
    released = asyncio.Event()
    async with serving({"session/prompt": prompt}) as (connection, wire):
        await wire.request(1, "session/prompt", {"sessionId": "s", "prompt": []})
        await wait_all_tasks_blocked()
        await connection.close()
    assert "did not end" in caplog.text
    released.set()
    await wait_all_tasks_blocked()


async def test_sender_waits_for_a_peer_that_does_not_read():
    async def talk() -> None:
        nonlocal sent
        while True:
            await connection.notify("session/update", update("x" * 1000))
            sent += 1000

    sent = 0
    async with serving({}) as (connection, wire):
        talking = asyncio.create_task(talk())
        await wait_all_tasks_blocked()
        assert HIGH_WATER_BYTES / 2 < sent < HIGH_WATER_BYTES * 2
        await wire.receive()
        before = sent
        for _ in range(10):
            await wire.receive()
        await wait_all_tasks_blocked()
        assert sent > before
        talking.cancel()


async def test_waiting_sender_gets_an_error_when_the_peer_is_gone():
    async def talk() -> None:
        while True:
            await connection.notify("session/update", update("x" * 1000))

    ours, theirs = memory_pair()
    connection = Connection(ours, AGENT_METHODS, CLIENT_METHODS, {})
    talking = asyncio.create_task(talk())
    await wait_all_tasks_blocked()
    await theirs.close()
    with pytest.raises(ConnectionClosed):
        await talking
    await connection.close()


async def test_peer_that_sends_malformed_lines_without_reading_has_to_wait():
    async def babble() -> None:
        nonlocal sent
        while True:
            await wire.send(b"[]")
            sent += 1

    sent = 0
    async with serving({}) as (_, wire):
        babbling = asyncio.create_task(babble())
        await wait_all_tasks_blocked()
        assert 0 < sent < 2 * HIGH_WATER_BYTES
        babbling.cancel()


async def test_peer_that_sends_requests_without_reading_has_to_wait():
    async def list_many(params: ListSessionsRequest) -> dict[str, Any]:
        return {"sessions": [{"sessionId": "x" * 1000, "cwd": "/"}]}

    async def send_requests() -> None:
        nonlocal asked
        while True:
            asked += 1
            await wire.request(asked, "session/list", {})

    asked = 0
    async with serving({"session/list": list_many}) as (_, wire):
        asking = asyncio.create_task(send_requests())
        await wait_all_tasks_blocked()
        before = asked
        assert before * 1000 < HIGH_WATER_BYTES * 100
        await wire.receive_until(before // 2)
        await wait_all_tasks_blocked()
        assert asked > before
        asking.cancel()


async def test_too_many_running_requests_are_refused_and_can_be_cancelled():
    async with serving({"session/prompt": wait_forever, "session/list": list_nothing}) as (_, wire):
        for id in range(MAX_RUNNING):
            await wire.request(id, "session/prompt", {"sessionId": "s", "prompt": []})
        await wire.request("one more", "session/list", {})
        refusal = await wire.receive()
        assert (refusal["id"], refusal["error"]["code"]) == ("one more", INVALID_REQUEST)
        assert refusal["error"]["data"]["details"] == "1000 requests are running. Wait for some of their answers."
        await wire.notify("$/cancel_request", {"requestId": 7})
        assert (await wire.receive())["id"] == 7
        await wire.request("again", "session/list", {})
        assert (await wire.receive())["result"] == {"sessions": []}


async def test_running_requests_are_limited_in_their_total_size():
    text = "x" * (MAX_RUNNING_BYTES // 4)
    async with serving({"session/prompt": wait_forever}) as (_, wire):
        for id in range(3):
            await wire.request(id, "session/prompt", {"sessionId": "s", "prompt": [{"type": "text", "text": text}]})
        await wire.request(3, "session/prompt", {"sessionId": "s", "prompt": [{"type": "text", "text": text}]})
        assert (await wire.receive())["id"] == 3
        await wire.notify("$/cancel_request", {"requestId": 0})
        assert (await wire.receive())["id"] == 0
        await wire.request(4, "session/prompt", {"sessionId": "s", "prompt": [{"type": "text", "text": text}]})
        await wire.notify("$/cancel_request", {"requestId": 4})
        assert (await wire.receive())["error"]["code"] == REQUEST_CANCELLED


async def test_twenty_mebibytes_are_sent_both_ways():
    async def read(params: ReadTextFileRequest) -> ReadTextFileResponse:
        return ReadTextFileResponse(content=params.path)

    text = "\u00e9x" * (10 * 1024 * 1024)
    async with connected({}, {"fs/read_text_file": read}) as (agent, _):
        answer = await agent.request("fs/read_text_file", ReadTextFileRequest(session_id="s", path=text))
        assert answer.content == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
METHODS = st.sampled_from(["session/list", "session/prompt", "session/new", "session/cancel", "$/cancel_request", "_x"])
KEYS = {
    "jsonrpc": st.sampled_from(["2.0", "2.0", "2.0", "1.0", 2]) | JSON,
    "id": st.integers() | st.text() | st.none() | JSON,
    "method": METHODS | METHODS | JSON,
    "params": st.fixed_dictionaries({"sessionId": st.text(), "cwd": st.text(), "requestId": st.text()}) | JSON,
    "result": JSON,
    "error": st.fixed_dictionaries({"code": st.integers(), "message": st.text()}) | JSON,
}
FIELDS = st.lists(st.sampled_from(list(KEYS)).flatmap(lambda key: st.tuples(st.just(key), KEYS[key])), max_size=7)
REQUEST = st.fixed_dictionaries({key: KEYS[key] for key in ("id", "method", "params")}).map(
    lambda fields: {"jsonrpc": "2.0", **fields}
)
LINES = st.one_of(
    st.binary(max_size=200),
    JSON.map(json.dumps).map(str.encode),
    REQUEST.map(json.dumps).map(str.encode),
    REQUEST.map(lambda fields: json.dumps(fields, ensure_ascii=False).encode(errors="surrogatepass")),
    FIELDS.map(lambda pairs: ("{" + ",".join(f'"{k}":{json.dumps(v)}' for k, v in pairs) + "}").encode()),
    st.tuples(REQUEST.map(json.dumps).map(str.encode), st.integers(0, 400), st.binary(max_size=3)).map(
        lambda cut: cut[0][: cut[1]] + cut[2] + cut[0][cut[1] :]
    ),
    st.tuples(st.sampled_from([b"[", b'{"a":', b'"', b"9"]), st.integers(1, 100_000)).map(lambda run: run[0] * run[1]),
).map(lambda line: line.replace(b"\n", b" "))


def is_request(line: bytes) -> bool:
    """Return whether a line is certainly a request."""
    try:
        pairs = json.loads(line.decode(), object_pairs_hook=list, parse_constant=float)
    except (ValueError, RecursionError):
        return False
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        return False
    fields = dict(pairs)
    return (
        len(fields) == len(pairs)
        and fields.get("jsonrpc") == "2.0"
        and isinstance(fields.get("method"), str)
        and "id" in fields
        and type(fields["id"]) in (int, str, type(None))
        and not {"result", "error"} & set(fields)
        and "NaN" not in (text := line.decode())
        and "Infinity" not in text
        and "\\ud" not in text.lower()
    )


@settings(max_examples=5 * settings.default.max_examples, deadline=None)
@given(st.lists(LINES, max_size=8))
def test_no_line_ends_the_connection_and_each_request_gets_one_answer(lines: list[bytes]):
    async def run() -> None:
        async def prompt(params: PromptRequest) -> PromptResponse:
            return PromptResponse(stop_reason="end_turn")

        async def echo(params: dict[str, Any]) -> dict[str, Any]:
            return params

        handlers: dict[str, Handler] = {"session/list": list_nothing, "session/prompt": prompt, "_x": echo}
        async with serving(handlers) as (_, wire):
            for number, line in enumerate(lines):
                await wire.send(line)
                await wire.request(f"probe {number}", "session/list", {})
                received = await wire.receive_until(f"probe {number}")
                assert all(("result" in answer) != ("error" in answer) for answer in received)
                if is_request(line):
                    assert [answer["id"] for answer in received] == [json.loads(line)["id"]]
                else:
                    assert len(received) <= 1

    logging.disable(logging.CRITICAL)
    try:
        asyncio.run(run())
    finally:
        logging.disable(logging.NOTSET)
