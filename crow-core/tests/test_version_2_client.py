"""A client that is written for version 1 of ACP speaks version 2 with an agent that offers it."""

import asyncio
from pathlib import Path
from typing import Any

import crow_mcp_server
import pytest
from crow_core.acp import schema_v2
from crow_core.acp.client import AcpClient
from crow_core.acp.connection import Connection, ConnectionClosed, RpcError
from crow_core.acp.connection_v2 import ConnectionV2
from crow_core.acp.schema import (
    AgentMessageChunk,
    AgentThoughtChunk,
    AuthenticateRequest,
    BlockContent,
    ClientCapabilities,
    ListSessionsRequest,
    LoadSessionRequest,
    McpServer,
    Method,
    NewSessionRequest,
    PlanUpdate,
    ResumeSessionRequest,
    SessionInfoUpdate,
    SessionNotification,
    SessionUpdate,
    TerminalContent,
    TextBlock,
    ToolCall,
    ToolCallUpdate,
    UserMessageChunk,
)
from crow_core.acp.shared_methods import BACKGROUND_METHOD, STEERING_METHOD, can_steer, is_taken, make_steering_params
from crow_core.acp.to_v1 import SessionObjects
from crow_core.acp.transports import memory_pair
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.mcp.server import Server
from crow_core.testing import Editor, MemoryStore, Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.commands import commands
from crow_extensions.plan import plan
from crow_extensions.steering import STEERING, steering
from crow_permissions.extension import permissions

pytestmark = pytest.mark.anyio

BUILT_IN = Server(
    "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
)


def run(line: str) -> Use:
    return Use(name="terminal", arguments={"command": line})


def show(update: ToolCall | ToolCallUpdate) -> str:
    parts = [part.content for part in update.content or [] if isinstance(part, BlockContent)]
    return "\n".join(part.text for part in parts if isinstance(part, TextBlock))


async def test_prompt_ends_with_the_turn_and_its_message_is_not_echoed():
    async with connect(Crow(ScriptedModel([Reply("Hello.", reasoning="Hm.")])), version=2) as editor:
        assert isinstance(editor.connection, ConnectionV2)
        session = (await editor.new_session("/")).session_id
        assert (await editor.prompt(session, "go")).stop_reason == "end_turn"
        assert (editor.text, editor.thoughts) == ("Hello.", "Hm.")
        assert editor.of(UserMessageChunk) == []


async def test_a_command_is_asked_about_and_shown_with_its_output(tmp_path: Path):
    model = ScriptedModel([Reply(tool_calls=[run("echo $((6 * 7))")]), Reply("It is 42.")])
    async with connect(Crow(model, servers=[BUILT_IN]).use(permissions), version=2) as editor:
        session = (await editor.new_session(str(tmp_path))).session_id
        assert (await editor.prompt(session, "go")).stop_reason == "end_turn"
        (question,) = editor.questions
        assert question.tool_call.raw_input == {"command": "echo $((6 * 7))"}
        assert question.tool_call.kind == "execute"
        ((_, states),) = editor.calls().items()
        assert [states[0], states[-1]] == ["pending", "completed"]
        assert "42" in show(editor.of(ToolCallUpdate)[-1])


async def test_a_session_is_loaded_and_resumed_and_its_mode_is_set(tmp_path: Path):
    crow = Crow(ScriptedModel([Reply("Hello.")])).use(permissions)
    crow.store = MemoryStore()
    async with connect(crow, version=2) as editor:
        opened = await editor.new_session(str(tmp_path))
        id = opened.session_id
        assert opened.modes
        await editor.set_mode(id, "plan")
        await editor.prompt(id, "go")
        loaded = await editor.request("session/load", LoadSessionRequest(session_id=id, cwd="/", mcp_servers=[]))
        assert loaded.modes.current_mode_id == "plan"
        shown = [each.content.text for each in editor.of(UserMessageChunk) if isinstance(each.content, TextBlock)]
        assert shown == ["go"]
        resumed = await editor.request("session/resume", ResumeSessionRequest(session_id=id, cwd="/"))
        assert [one.id for one in resumed.config_options] == [one.id for one in loaded.config_options]
        found = await editor.request("session/list", ListSessionsRequest())
        assert [one.session_id for one in found.sessions] == [id]


async def test_cancel_ends_the_prompt_and_those_that_wait():
    crow = Crow(ScriptedModel([Reply("Well", hang=True)]))
    async with connect(crow, version=2) as editor:
        session = (await editor.new_session("/")).session_id
        turns = [asyncio.ensure_future(editor.prompt(session, text)) for text in ("one", "two")]
        await editor.until(lambda editor: editor.text)
        await editor.cancel(session)
        assert [(await turn).stop_reason for turn in turns] == ["cancelled"] * 2


async def test_words_join_the_running_turn():
    asked, finish = asyncio.Event(), asyncio.Event()

    async def answer(request: Any) -> Reply:
        asked.set()
        await finish.wait()
        return Reply("Done.")

    crow = Crow(ScriptedModel(answer)).use(steering)
    async with connect(crow, version=2) as editor:
        assert can_steer(editor.initialized.meta)
        session = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(session, "go"))
        await asked.wait()
        params = make_steering_params(session, [TextBlock(text="rather")])
        joining = asyncio.ensure_future(editor.request(STEERING_METHOD, params))
        while not crow.sessions[session].state[STEERING].waiting:
            await asyncio.sleep(0)
        finish.set()
        assert is_taken(await joining)
        assert (await turn).stop_reason == "end_turn"
        assert [each.content for each in editor.of(UserMessageChunk)] == [TextBlock(text="rather")]


async def test_a_turn_that_fails_raises_its_error():
    crow = Crow(ScriptedModel([Reply(error=ModelError("The model is asleep."))]))
    async with connect(crow, version=2) as editor:
        session = (await editor.new_session("/")).session_id
        with pytest.raises(RpcError, match="The model is asleep"):
            await editor.prompt(session, "go")
        with pytest.raises(RpcError, match="no method session/fork"):
            await editor.request("session/fork", {})


async def test_plans_commands_and_log_in():
    steps = [{"step": "Look", "status": "in_progress"}]
    model = ScriptedModel([Reply(tool_calls=[Use(name="plan", arguments={"steps": steps})]), Reply("Done.")])
    async with connect(Crow(model).use(plan).use(commands), version=2) as editor:
        await editor.request("authenticate", AuthenticateRequest(method_id="configured"))
        session = (await editor.new_session("/")).session_id
        await editor.prompt(session, "go")
        assert [[entry.content for entry in each.entries] for each in editor.of(PlanUpdate)] == [["Look"]]


async def test_a_prompt_fails_when_the_agent_leaves():
    ours, theirs = memory_pair()
    editor = Editor(ours)
    crow = Crow(ScriptedModel([Reply("Well", hang=True)]))
    from crow_core.agent.acp_agent import AcpAgent  # the agent ends before its client

    agent = AcpAgent(theirs, crow)
    serving = asyncio.ensure_future(agent.serve())
    async with editor.serving():
        await editor.initialize("editor", ClientCapabilities(), version=2)
        session = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(session, "go"))
        await editor.until(lambda editor: editor.text)
        await theirs.close()
        with pytest.raises(ConnectionClosed):
            await turn
    await agent.connection.close()
    await serving
    await crow.shut_down()


@pytest.mark.parametrize(
    "answer",
    [
        {"protocolVersion": 1, "agentCapabilities": {"loadSession": True}},
        {"protocolVersion": 2, "agentCapabilities": {}},
        {"protocolVersion": 2, "info": 7},
        {"protocolVersion": 7},
        {},
        [],
    ],
)
async def test_an_agent_of_the_first_version_is_spoken_to_in_that(answer: Any):
    """One that repeats the number without speaking the version is told apart."""
    ours, theirs = memory_pair()
    asked: list[dict[str, Any]] = []

    async def initialize(params: dict[str, Any]) -> Any:
        asked.append(params)
        return answer

    async def open_session(params: NewSessionRequest) -> Any:
        return {"sessionId": "s"}

    methods = {"initialize": Method(dict, schema_v2.InitializeResponse), "session/new": Method(NewSessionRequest, Any)}  # type: ignore[arg-type]
    agent = Connection(theirs, methods, {}, {"initialize": initialize, "session/new": open_session})
    serving = asyncio.ensure_future(agent.serve())
    client = AcpClient(ours, {})
    async with client.serving():
        if answer and "agentCapabilities" in answer:
            told = await client.initialize("editor", ClientCapabilities(), version=2)
            assert told.agent_capabilities.load_session == bool(answer["agentCapabilities"])
            assert isinstance(client.connection, Connection)
            assert (await client.new_session("/", [McpServer(name="a", command="b")])).session_id == "s"
        else:
            with pytest.raises(RpcError):
                await client.initialize("editor", ClientCapabilities(), version=2)
    assert {"info", "capabilities", "clientInfo", "clientCapabilities"} <= asked[0].keys()
    await serving


def convert(*updates: Any) -> list[SessionUpdate]:
    objects = SessionObjects()
    return [each for update in updates for each in objects.convert(update)]


def test_whole_messages_are_shown_once_and_unknown_updates_not_at_all():
    message = schema_v2.AgentMessage(message_id="m", content=[TextBlock(text="Hello.")])
    thought = schema_v2.AgentThought(message_id="t", content=[TextBlock(text="Hm.")])
    unknown = schema_v2.UnknownSessionUpdate({"sessionUpdate": "dance"})
    assert convert(message, message, thought, unknown, schema_v2.StateUpdate(state="sleeping")) == [
        AgentMessageChunk(content=TextBlock(text="Hello."), message_id="m"),
        AgentThoughtChunk(content=TextBlock(text="Hm."), message_id="t"),
    ]


def test_a_call_collects_its_content_and_the_bytes_of_its_terminal():
    terminal = TerminalContent(terminal_id="1")
    first, *_, last = convert(
        schema_v2.TerminalUpdate(terminal_id="1", command="make"),
        schema_v2.ToolCallUpdate(tool_call_id="c", title="make", kind="build", status="paused", content=[terminal]),
        schema_v2.TerminalOutputChunk(terminal_id="1", data="w6Q="),
        schema_v2.TerminalOutputChunk(terminal_id="1", data="!"),
        schema_v2.ToolCallContentChunk(tool_call_id="c", content=BlockContent(content=TextBlock(text="and a note"))),
    )
    assert isinstance(first, ToolCall)
    assert (first.kind, first.status) == ("other", "in_progress")
    assert isinstance(last, ToolCallUpdate)
    assert show(last) == "```\nä\n```\nand a note"


def test_a_diff_is_shown_as_its_patch_or_as_the_list_of_its_changes():
    change = schema_v2.DiffChange(operation="move", path="/b", old_path="/a")
    patch = schema_v2.DiffPatch(format="git_patch", text="+new\n")
    parts = [schema_v2.PatchContent(changes=[change]), schema_v2.PatchContent(changes=[change], patch=patch)]
    (call,) = convert(schema_v2.ToolCallUpdate(tool_call_id="c", status="cancelled", content=[*parts]))
    assert isinstance(call, ToolCall)
    assert (call.title, call.status) == ("A tool call", "failed")
    assert show(call) == "```diff\nmove /a → /b\n```\n```diff\n+new\n```"


async def test_the_background_of_another_agent_of_the_second_version_is_listed_and_stopped():
    ours, theirs = memory_pair()
    stopped: list[tuple[str, Any]] = []
    told: list[SessionUpdate] = []

    async def initialize(params: dict[str, Any]) -> dict[str, Any]:
        return {"protocolVersion": 2, "info": {"name": "x", "version": "1"}, "capabilities": {"session": {}}}

    async def cancel_terminal(params: schema_v2.CancelTerminalRequest) -> None:
        stopped.append(("terminal", params.terminal_id))

    async def cancel_call(params: schema_v2.CancelToolCallRequest) -> None:
        stopped.append(("call", params.tool_call_id))

    async def note(notification: SessionNotification) -> None:
        told.append(notification.update)

    handlers = {
        "initialize": initialize,
        "terminal/cancel": cancel_terminal,
        "tool_call/cancel": cancel_call,
    }
    methods = {**schema_v2.AGENT_METHODS, "initialize": Method(dict, schema_v2.InitializeResponse)}
    agent = Connection(theirs, methods, schema_v2.CLIENT_METHODS, handlers)
    serving = asyncio.ensure_future(agent.serve())
    client = AcpClient(ours, {"session/update": note})

    async def tell(update: Any) -> None:
        await agent.notify("session/update", schema_v2.UpdateSessionNotification(session_id="s", update=update))

    terminal = schema_v2.BackgroundWork(type="terminal", terminal_id="t")
    call = schema_v2.BackgroundWork(type="tool_call", tool_call_id="c")
    async with client.serving():
        await client.initialize("editor", ClientCapabilities(), version=2)
        await tell(schema_v2.TerminalUpdate(terminal_id="t", command="make"))
        await tell(schema_v2.TerminalOutputChunk(terminal_id="t", data="b25lCnR3bwo="))
        await tell(schema_v2.ToolCallUpdate(tool_call_id="c", title="Look"))
        await tell(schema_v2.StateUpdate(state="idle", background=[terminal, call]))
        ask = {"sessionId": "s", "action": "list"}
        while len((answer := await client.request(BACKGROUND_METHOD, ask))["work"]) < 2:
            await asyncio.sleep(0)
        one, two = answer["work"]
        assert (one["name"], one["title"], one["lastLine"]) == ("1", "make", "two")
        assert (two["name"], two["title"], two["kind"]) == ("2", "Look", "agent")
        for name in ("1", "2", "3"):
            answer = await client.request(BACKGROUND_METHOD, {"sessionId": "s", "action": "stop", "name": name})
        assert answer["said"] == "Nothing in the background has the name '3'. /background lists it."
        assert stopped == [("terminal", "t"), ("call", "c")]
        await tell(schema_v2.StateUpdate(state="running", background=[]))
        await tell(schema_v2.StateUpdate(state="idle", background=[], stop_reason="end_turn"))
        while not any("ended" in str(getattr(update, "meta", "")) for update in told):
            await asyncio.sleep(0)
    metas = [update.meta for update in told if isinstance(update, SessionInfoUpdate)]
    assert metas == [
        {"crow": {"background": ["make", "Look"]}},
        {"crow": {"background": []}},
        {"crow": {"turn": "began"}},
        {"crow": {"turn": "ended", "stopReason": "end_turn"}},
    ]
    await serving
