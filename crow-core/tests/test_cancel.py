"""Cancelling a turn: the prompt and all tool calls are answered, and the next prompt works."""

import asyncio
import gzip
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from anyio import CancelScope, sleep_forever, wait_all_tasks_blocked
from crow_core.acp import schema
from crow_core.acp.schema import (
    AgentMessageChunk,
    CancelRequestNotification,
    ClientCapabilities,
    CloseSessionRequest,
    PromptResponse,
    SessionNotification,
    TextBlock,
)
from crow_core.acp.transports import HIGH_WATER_BYTES, MemoryTransport, memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.content import replay
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import INTERRUPTED, NOT_RUN, Delta, Message
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import ModelRequest
from crow_core.session.session import Session
from crow_core.testing import Editor, Raw, Reply, ScriptedModel, ScriptedServer, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_core.testing.wire import connect_raw
from crow_permissions.extension import permissions
from crow_testing.chaos import to_chunk, to_event
from fastmcp import FastMCP
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.anyio


class Waiting:
    """A tool that waits for an event, or until it is cancelled."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.go_on = asyncio.Event()
        self.cancelled = asyncio.Event()
        server = FastMCP("demo")

        @server.tool
        async def wait() -> str:
            self.started.set()
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            return "waited"

        @server.tool
        def quick() -> str:
            return "quick"

        self.server = Server("demo", lambda: server, shared=True)


def calling(*names: str) -> Reply:
    return Reply("Calling.", tool_calls=[{"name": f"demo_{name}", "arguments": {}} for name in names])


def after_tools(first: Reply, then: Reply | None = None) -> Callable[[dict[str, Any]], Reply]:
    """Make a script that answers the prompt "go" with `first` and everything else with `then`."""
    return lambda request: first if request["messages"][-1]["content"].endswith("go") else then or Reply("Done.")


def assert_valid(request: dict[str, Any]) -> None:
    """Each tool call has exactly one answer directly behind it, and roles alternate."""
    open_calls: list[str] = []
    before = ""
    for message in request["messages"]:
        if message["role"] == "tool":
            assert message["tool_call_id"] == open_calls.pop(0)
        else:
            assert not open_calls
            assert message["role"] != before
            assert message["content"] or message.get("tool_calls")
            open_calls = [call["id"] for call in message.get("tool_calls", [])]
        before = message["role"]
    assert not open_calls


def log_of(crow: Crow) -> list[Message]:
    (session,) = crow.sessions.values()
    return [entry for entry in session.log if "role" in entry]


async def assert_usable(editor: Editor, model: ScriptedModel, session_id: str) -> None:
    """All calls of the cancelled turn have ended, and the next prompt works."""
    assert all(states[-1] in ("completed", "failed") for states in editor.calls().values())
    answer = await editor.prompt(session_id, "and now?")
    assert answer.stop_reason == "end_turn"
    for request in model.requests:
        assert_valid(request)


@asynccontextmanager
async def start_turn(editor: Editor, session_id: str) -> AsyncGenerator["asyncio.Task[PromptResponse]"]:
    """Start a turn, and check that it ends as cancelled."""
    turn = asyncio.ensure_future(editor.prompt(session_id, "go"))
    yield turn
    assert (await turn).stop_reason == "cancelled"


async def test_a_cancelled_reply_is_replayed_with_its_end_marked():
    crow = Crow(ScriptedModel([Reply("Once upon a time", hang=True)]))
    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        async with start_turn(editor, id):
            await editor.until(lambda editor: editor.text == "Once upon a time")
            await editor.cancel(id)
        *_, reply, end = (update.content.text for update in replay(log_of(crow), "/"))
    assert (reply, end) == ("Once upon a time", "Interrupted here.\n")


async def test_cancelling_while_text_streams_keeps_the_text_that_was_shown():
    model = ScriptedModel(after_tools(Reply("Once upon a time", hang=True)))
    crow = Crow(model)
    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        async with start_turn(editor, id):
            await editor.until(lambda editor: editor.text == "Once upon a time")
            await editor.cancel(id)
        assert [m.get("content") for m in log_of(crow)] == ["go", "Once upon a time"]
        await assert_usable(editor, model, id)


async def test_a_cancel_while_a_cancel_scope_ends_inside_of_the_turn_is_not_lost():
    """An HTTP client ends such a scope as soon as one of its attempts to connect succeeds."""
    inside, go_on = asyncio.Event(), asyncio.Event()
    model = ScriptedModel(after_tools(Reply("Not cancelled.")))
    crow = Crow(model)

    @crow.before_model
    async def connect_somewhere(request: ModelRequest, session: Session) -> ModelRequest:
        if request["messages"][-1]["content"] == "go":
            with CancelScope() as scope:
                scope.cancel()
                try:
                    await sleep_forever()
                finally:
                    with CancelScope(shield=True):
                        inside.set()
                        await go_on.wait()
        return request

    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        async with start_turn(editor, id):
            await inside.wait()
            await editor.cancel(id)
            await wait_all_tasks_blocked()
            go_on.set()
        assert len(model.requests) == 0
        await assert_usable(editor, model, id)


class FloodingModel:
    """Streams the same delta without end, and never waits."""

    name, window = "flooding", None

    def __init__(self, delta: Delta) -> None:
        self.delta = delta
        self.yielded = 0

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        if request["messages"][-1]["content"] != "go":
            yield {"content": "Done."}
            return
        while True:
            self.yielded += 1
            yield self.delta


FLOODS: dict[str, Delta] = {
    "text": {"content": "a"},
    "reasoning": {"reasoning_content": "a"},
    "arguments": {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"a": "'}}]},
    "arguments of a call that is complete": {"tool_calls": [{"index": 0, "function": {"arguments": " "}}]},
    "nothing": {},
    "usage": {"usage": {"completion_tokens": 1}},
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_cancel_is_answered_in_the_middle_of_a_flood_that_never_waits(flood: str):
    model = FloodingModel(FLOODS[flood])
    crow = Crow(model)
    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        async with start_turn(editor, id):
            while model.yielded < 1000:
                await asyncio.sleep(0)
            await editor.cancel(id)
        assert "".join(str(entry.get("content") or "") for entry in log_of(crow)[1:]) == editor.text
        assert (await editor.prompt(id, "and now?")).stop_reason == "end_turn"


COMMENTS = b": still here\n" * 1_000_000
WORDS = to_event(to_chunk({"content": "a"})) * 100_000


@pytest.mark.parametrize("flood", [COMMENTS, WORDS, b"data: " + b"x" * 10_000_000], ids=["comments", "words", "a line"])
async def test_cancel_is_answered_while_one_compressed_chunk_is_read(flood: bytes):
    """A chunk of some kilobytes holds more than a minute's work. It is left where the cancel arrives."""
    begins = to_event(to_chunk({"content": "Once"}))
    body = gzip.compress(begins + flood + begins, 1)
    raw = Raw([body], {"content-encoding": "gzip"}, hang=True)
    async with ScriptedServer(lambda request: raw) as server:
        crow = Crow(ChatModel(name="m", base_url=server.url))
        async with connect(crow) as editor:
            id = (await editor.new_session("/")).session_id
            async with start_turn(editor, id):
                await editor.until(lambda editor: editor.text)
                await editor.cancel(id)
            assert "OnceOnce" not in editor.text
            assert not editor.text.endswith("aOnce")
            assert log_of(crow)[-1].get("content") == editor.text


async def test_cancelling_while_a_tool_call_streams_drops_the_call():
    """The client has not seen it, and an incomplete call cannot be answered."""
    half = Reply("I will", tool_calls=[{"name": "demo_quick", "arguments": "{"}], hang=True)
    model = ScriptedModel(after_tools(half))
    crow = Crow(model, servers=[Waiting().server])
    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        async with start_turn(editor, id):
            await editor.until(lambda editor: editor.text == "I will")
            await editor.cancel(id)
        assert editor.of(schema.ToolCall) == []
        assert "tool_calls" not in log_of(crow)[-1]
        await assert_usable(editor, model, id)


async def test_cancelling_before_tools_run_leaves_every_call_answered():
    asked = asyncio.Event()
    model = ScriptedModel(after_tools(calling("quick", "quick")))
    crow = Crow(model, servers=[Waiting().server])

    @crow.before_tool
    async def think(session: Session, tool_call: ToolCall) -> ToolResult | None:
        asked.set()
        if log_of(crow)[0].get("content") == "go" and len(model.requests) == 1:
            await asyncio.Event().wait()
        return None

    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        async with start_turn(editor, id):
            await asked.wait()
            await editor.cancel(id)
        assert list(editor.calls().values()) == [["pending", "failed"]] * 2
        assert [m.get("content") for m in log_of(crow)[-2:]] == [NOT_RUN, NOT_RUN]
        assert [m.get("crow", {}).get("failed") for m in log_of(crow)[-2:]] == [True, True]
        await assert_usable(editor, model, id)


async def test_cancelling_before_an_early_shown_call_runs_fails_the_call():
    """A call with long arguments is shown while they arrive. The user cancels while the reply is written."""
    long: Use = {"name": "demo_quick", "arguments": {"text": "word " * 100}}
    model = ScriptedModel(after_tools(Reply(tool_calls=[long])))
    crow = Crow(model, servers=[Waiting().server])
    writing, release = asyncio.Event(), asyncio.Event()

    @crow.message
    async def write(session: Session, entry: Message) -> None:
        if entry.get("tool_calls"):
            writing.set()
            await release.wait()

    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        async with start_turn(editor, id):
            await writing.wait()
            assert list(editor.calls().values()) == [["pending"]]
            await editor.cancel(id)
            await wait_all_tasks_blocked()
            release.set()
        assert list(editor.calls().values()) == [["pending", "failed"]]
        await assert_usable(editor, model, id)


async def test_cancelling_during_a_tool_call_notifies_the_mcp_server():
    tool = Waiting()
    model = ScriptedModel(after_tools(calling("quick", "wait")))
    crow = Crow(model, servers=[tool.server])
    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        async with start_turn(editor, id):
            await tool.started.wait()
            await editor.until(lambda editor: "completed" in repr(editor.calls()))
            await editor.cancel(id)
        await tool.cancelled.wait()
        # The result of the other call is kept.
        assert [m.get("content") for m in log_of(crow)[-2:]] == ["quick", INTERRUPTED]
        assert [states[-1] for states in editor.calls().values()] == ["completed", "failed"]
        await assert_usable(editor, model, id)


async def test_cancelling_during_a_permission_question_withdraws_it():
    model = ScriptedModel(after_tools(calling("quick", "quick")))
    crow = Crow(model, servers=[Waiting().server]).use(permissions)
    async with connect(crow, permit=None) as editor:
        id = (await editor.new_session("/")).session_id
        async with start_turn(editor, id):
            await editor.until(lambda editor: editor.questions)
            await editor.cancel(id)
        assert editor.cancelled_questions == len(editor.questions) == 1
        assert list(editor.calls().values()) == [["pending", "failed"]] * 2
        await assert_usable(editor, model, id)


async def test_cancelling_while_the_client_does_not_read_ends_every_call_that_it_will_see():
    long = {"name": "demo_quick", "arguments": {"text": "a" * HIGH_WATER_BYTES}, "id": "one"}
    calls = Reply(tool_calls=[long, long])  # type: ignore[list-item] - of one id, so that none is shown before it is whole
    crow, called = Crow(ScriptedModel([calls]), servers=[Waiting().server]), asyncio.Event()

    @crow.message
    def note(session: Session, entry: Message) -> None:
        if "tool_calls" in entry:
            called.set()

    async with connect_raw(crow) as wire:
        id = (await wire.ask("session/new", {"cwd": "/", "mcpServers": []}))["result"]["sessionId"]
        wire.send("turn", "session/prompt", {"sessionId": id, "prompt": [{"type": "text", "text": "go"}]})
        await called.wait()
        await wait_all_tasks_blocked()  # the updates wait, since the client does not read
        wire.notify("session/cancel", {"sessionId": id})
        await wait_all_tasks_blocked()
        while (message := await wire.receive()).get("id") != "turn":
            pass
    assert message["result"]["stopReason"] == "cancelled"
    updates = [message["params"]["update"] for message in wire.received if message.get("method") == "session/update"]
    states = {update["toolCallId"]: update["status"] for update in updates if "toolCallId" in update}
    assert states == {"one": "failed", "one_2": "failed"}


async def test_cancelling_between_two_requests_keeps_the_answers():
    between = asyncio.Event()
    model = ScriptedModel(after_tools(calling("quick")))
    crow = Crow(model, servers=[Waiting().server])

    @crow.after_model
    async def pause(session: Session, call: object) -> None:
        if not between.is_set():
            between.set()
            await asyncio.Event().wait()

    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        async with start_turn(editor, id):
            await between.wait()
            await editor.cancel(id)
        assert log_of(crow)[-1].get("content") == "quick"
        await assert_usable(editor, model, id)


async def test_cancelling_several_times_does_not_interrupt_the_clean_up():
    """With session/cancel, with the cancellation of the request, and again."""
    tool = Waiting()
    model = ScriptedModel(after_tools(calling("wait")))
    crow = Crow(model, servers=[tool.server])
    cleaning, clean = asyncio.Event(), asyncio.Event()
    outcomes: list[object] = []

    @crow.message
    async def slow(session: Session, entry: Message) -> None:
        if entry.get("content") == INTERRUPTED:
            cleaning.set()
            await clean.wait()

    @crow.turn_end
    def ended(session: Session, outcome: object) -> None:
        outcomes.append(outcome)

    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        async with start_turn(editor, id):
            await tool.started.wait()
            for happened in (tool.cancelled, cleaning):
                await editor.cancel(id)
                await editor.connection.notify("$/cancel_request", CancelRequestNotification(request_id=3))
                await editor.cancel(id)
                await happened.wait()
            await editor.set_option(id, "model", model.name)  # once it is answered, everything before has arrived
            clean.set()
        assert outcomes == ["cancelled"]
        assert list(editor.calls().values()) == [["pending", "in_progress", "failed"]]
        await assert_usable(editor, model, id)


async def test_a_turn_that_is_ending_cannot_be_cancelled():
    """All functions of `turn_end` run to their end."""
    crow = Crow(ScriptedModel([Reply("Done.")]))
    ending, end = asyncio.Event(), asyncio.Event()
    told: list[str] = []

    @crow.turn_end
    def last(session: Session, outcome: object) -> None:
        told.append("last")

    @crow.turn_end
    async def first(session: Session, outcome: object) -> None:
        ending.set()
        await end.wait()
        told.append("first")

    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "go"))
        await ending.wait()
        await editor.cancel(id)
        await editor.connection.notify("$/cancel_request", CancelRequestNotification(request_id=3))
        await editor.set_option(id, "model", "scripted")
        end.set()
        # The error says that the request was cancelled; the turn had ended.
        assert (await turn).stop_reason in ("end_turn", "cancelled")
    assert told == ["first", "last"]


async def test_cancelling_right_after_the_prompt_cancels_the_turn():
    model = ScriptedModel([Reply("Hello.")])
    async with connect(Crow(model)) as editor:
        id = (await editor.new_session("/")).session_id
        async with start_turn(editor, id):
            await asyncio.sleep(0)  # the prompt is written, and nothing more
            await editor.cancel(id)
        await assert_usable(editor, model, id)


async def test_cancelling_with_no_turn_running_does_not_affect_the_next_prompt():
    model = ScriptedModel([Reply("Hello."), Reply("Hello again.")])
    async with connect(Crow(model)) as editor:
        id = (await editor.new_session("/")).session_id
        await editor.cancel(id)
        assert (await editor.prompt(id, "hi")).stop_reason == "end_turn"
        await editor.cancel(id)
        await editor.cancel("no such session")
        assert (await editor.prompt(id, "hi")).stop_reason == "end_turn"


async def test_cancelling_the_prompt_request_cancels_the_turn():
    model = ScriptedModel(after_tools(Reply("Once", hang=True)))
    async with connect(Crow(model)) as editor:
        id = (await editor.new_session("/")).session_id
        async with start_turn(editor, id):
            await editor.until(lambda editor: editor.text == "Once")
            await editor.connection.notify("$/cancel_request", CancelRequestNotification(request_id=3))
        await assert_usable(editor, model, id)


async def test_cancelling_a_queued_prompt_does_not_affect_the_running_turn():
    tool = Waiting()
    model = ScriptedModel(after_tools(calling("wait")))
    async with connect(Crow(model, servers=[tool.server])) as editor:
        id = (await editor.new_session("/")).session_id
        running = asyncio.ensure_future(editor.prompt(id, "go"))
        await tool.started.wait()
        queued = asyncio.ensure_future(editor.prompt(id, "and then"))
        await asyncio.sleep(0)
        await editor.connection.notify("$/cancel_request", CancelRequestNotification(request_id=4))
        assert (await queued).stop_reason == "cancelled"
        tool.go_on.set()
        assert (await running).stop_reason == "end_turn"
    assert len(model.requests) == 2


async def test_cancelling_a_session_cancels_its_queued_prompts():
    tool = Waiting()
    model = ScriptedModel(after_tools(calling("wait")))
    async with connect(Crow(model, servers=[tool.server])) as editor:
        id = (await editor.new_session("/")).session_id
        turns = [asyncio.ensure_future(editor.prompt(id, words)) for words in ("go", "one", "two")]
        await tool.started.wait()
        await editor.cancel(id)
        assert [answer.stop_reason for answer in await asyncio.gather(*turns)] == ["cancelled"] * 3
        assert len(model.requests) == 1
        await assert_usable(editor, model, id)


async def test_closing_a_session_cancels_its_turns():
    tool = Waiting()
    crow = Crow(ScriptedModel(after_tools(calling("wait"))), servers=[tool.server])
    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        turns = [asyncio.ensure_future(editor.prompt(id, words)) for words in ("go", "one")]
        await tool.started.wait()
        await editor.request("session/close", CloseSessionRequest(session_id=id))
        assert [answer.stop_reason for answer in await asyncio.gather(*turns)] == ["cancelled"] * 2
        await tool.cancelled.wait()
        assert crow.sessions == {}


async def test_a_client_that_disconnects_cancels_its_turns():
    tool = Waiting()
    crow = Crow(ScriptedModel(after_tools(calling("wait"))), servers=[tool.server])
    logs: list[Sequence[Message]] = []
    crow.turn_end(lambda session, outcome: logs.append(session.log))
    ours, theirs = memory_pair()
    agent = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
    editor = Editor(ours)
    async with editor.serving():
        await editor.initialize("editor", ClientCapabilities())
        id = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "go"))
        await tool.started.wait()
    await asyncio.wait([turn])
    assert turn.exception() is not None
    await agent
    assert tool.cancelled.is_set()
    assert crow.sessions == {}
    assert [log[-1].get("content") for log in logs] == [INTERRUPTED]
    await crow.shut_down()


async def test_cancelling_a_task_that_awaits_prompt_ends_the_turn():
    """A task that awaits `Crow.prompt` and is cancelled gets CancelledError when the turn has ended."""
    tool = Waiting()
    crow = Crow(ScriptedModel(after_tools(calling("wait"))), servers=[tool.server])
    async with connect(crow) as editor:
        await editor.new_session("/")
        (session,) = crow.sessions.values()
        waiting = asyncio.ensure_future(crow.prompt(session, {"role": "user", "content": "go"}))
        await tool.started.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert log_of(crow)[-1].get("content") == INTERRUPTED
        assert session.turns.tasks == []


class RecordingTransport:
    """A transport that records the messages it receives."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.write, self.drain, self.close = transport.write, transport.drain, transport.close
        self._transport = transport
        self.lines: list[dict[str, Any]] = []

    async def readline(self) -> bytes:
        line = await self._transport.readline()
        if line:
            self.lines.append(msgspec.json.decode(line))
        return line


def play(request: dict[str, Any]) -> Reply:
    """Reply with the name of the session, and do what the last prompt asks: answer, call, wait in a tool, or hang."""
    words: list[str] = [m["content"] for m in request["messages"] if m["role"] == "user"][-1].split()
    name, want = words[-2:]
    if request["messages"][-1]["role"] == "tool":
        return Reply(f"{name} done")
    match want:
        case "hang":
            return Reply(f"{name} hangs", hang=True)
        case "call" | "wait":
            tools = ["quick", "quick"] if want == "call" else ["quick", "wait"]
            return Reply(f"{name} calls", tool_calls=[{"name": f"demo_{tool}", "arguments": {}} for tool in tools])
        case _:
            return Reply(f"{name} says")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("prompt"), st.integers(0, 2), st.sampled_from(["say", "call", "wait", "hang"])),
        st.tuples(st.just("cancel"), st.integers(0, 2), st.just("")),
        st.tuples(st.just("withdraw"), st.integers(0, 20), st.just("")),
        st.tuples(st.just("let run"), st.integers(1, 30), st.just("")),
    ),
    max_size=25,
)


@settings(max_examples=settings.default.max_examples * 4 // 10, deadline=None)
@given(STEPS)
async def test_each_prompt_has_one_answer_in_any_order_of_prompts_and_cancels(
    steps: list[tuple[str, int, str]],
):
    model = ScriptedModel(play)
    crow = Crow(model, servers=[Waiting().server])
    ours, theirs = memory_pair()
    tapped = RecordingTransport(ours)
    agent = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
    editor = Editor(tapped)
    async with editor.serving():
        await editor.initialize("editor", ClientCapabilities())
        ids = [(await editor.new_session("/")).session_id for _ in range(3)]
        turns: list[asyncio.Task[PromptResponse]] = []
        disturbed: set[int] = set()
        whose: list[int] = []
        for what, number, want in steps:
            match what:
                case "prompt":
                    turns.append(asyncio.ensure_future(editor.prompt(ids[number], f"session{number} {want}")))
                    whose.append(number)
                    disturbed |= {number} if want in ("wait", "hang") else set()
                    await asyncio.sleep(0)  # so that requests are numbered in this order
                case "cancel":
                    disturbed.add(number)
                    await editor.cancel(ids[number])
                case "withdraw" if number < len(turns):
                    disturbed.add(whose[number])
                    first = 1 + 1 + len(ids)  # requests are numbered from 1: initialize, the sessions, the prompts
                    await editor.connection.notify(
                        "$/cancel_request", CancelRequestNotification(request_id=first + number)
                    )
                case _:
                    for _ in range(number):
                        await asyncio.sleep(0)
        for number in disturbed:
            await editor.cancel(ids[number])
        answers = await asyncio.gather(*turns)
        for number, answer in zip(whose, answers, strict=True):
            assert answer.stop_reason in (("end_turn", "cancelled") if number in disturbed else ("end_turn",))
        for number, id in enumerate(ids):
            assert (await editor.prompt(id, f"session{number} call")).stop_reason == "end_turn"
        assert all(session.turns.tasks == [] for session in crow.sessions.values())
    await agent
    await crow.shut_down()
    assert all(states[-1] in ("completed", "failed") for states in editor.calls().values())
    for request in model.requests:
        assert_valid(request)
        assert len({word for word in repr(request["messages"][1:]).replace("'", " ").split() if "session" in word}) == 1
    answered = [line["id"] for line in tapped.lines if "result" in line or "error" in line]
    assert sorted(answered) == list(range(1, len(answered) + 1))
    for line in tapped.lines:
        if line.get("method") == "session/update":
            note = msgspec.convert(line["params"], SessionNotification)
            if isinstance(note.update, AgentMessageChunk) and isinstance(note.update.content, TextBlock):
                spoken = note.update.content.text
                assert "session" not in spoken or f"session{ids.index(note.session_id)}" in spoken
