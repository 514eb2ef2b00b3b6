"""Turns with a key: what is counted in a turn goes on with it, and no client of another process has keys."""

import asyncio
from typing import Any

import pytest
from crow_core.acp.schema import (
    ClientCapabilities,
    LoadSessionRequest,
    NewSessionRequest,
    PromptRequest,
    RequestPermissionResponse,
    SelectedOutcome,
    TextBlock,
)
from crow_core.app import Crow
from crow_core.errors import ModelError, PromptError
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import INTERRUPTED, Message, find_prompts, marker_kind
from crow_core.session.session import Session
from crow_core.session.store import Record
from crow_core.testing import MemoryStore, Reply, ScriptedCall, ScriptedModel, connect
from crow_extensions.budgets import budgets
from crow_extensions.goal import goal
from crow_extensions.loop_guard import REMARK, loop_guard
from fastmcp import FastMCP

pytestmark = pytest.mark.anyio

DEMO = FastMCP("demo")
DOWN = Reply(error=ModelError("The model is down."))
LOOK = Reply(tool_calls=[{"name": "demo_look", "arguments": {}}])


@DEMO.tool
def look() -> str:
    return "nothing new"


WORK = FastMCP("work")
USE_WORK: ScriptedCall = {"name": "work", "arguments": {}}


@WORK.tool
def work() -> str:
    return "worked"


class Nobody:
    """A client that shows nothing, and whose user says no."""

    capabilities = ClientCapabilities()

    async def request(self, method: str, params: Any) -> Any:
        return RequestPermissionResponse(outcome=SelectedOutcome(option_id="no"))

    async def notify(self, method: str, params: Any) -> None: ...


def prompt(text: str = "Go.", key: str = "1") -> Message:
    return {"role": "user", "content": text, "crow": {"key": key}}


def app(*replies: Reply, max_requests: int = 200) -> Crow:
    crow = Crow(ScriptedModel(replies), servers=[Server("demo", lambda: DEMO, shared=True)], max_requests=max_requests)
    crow.servers_wait = 60
    return crow


async def go_on(crow: Crow, log: list[Message], *, key: str = "1") -> tuple[str, Session]:
    """Prompt an app to which nothing but the log of a session is known; return the stop reason and the session."""
    session = await crow.open(Nobody(), "/", record=Record("work", [*log]))
    stop_reason = await crow.prompt(session, prompt(key=key))
    await crow.shut_down()
    return stop_reason, session


async def interrupt(crow: Crow) -> list[Message]:
    """Run a turn in which the model fails at last; return the session's log."""
    opened: list[Session] = []
    crow.session_start(opened.append)
    with pytest.raises(ModelError, match="The model is down"):
        await go_on(crow, [])
    await crow.shut_down()
    return opened[0].log.entries


def find_texts(session: Session, role: str) -> list[str]:
    return [str(entry.get("content")) for entry in session.log if entry.get("role") == role]


async def test_limit_of_requests_counts_those_before_the_interruption():
    log = await interrupt(app(LOOK, LOOK, DOWN, max_requests=3))
    stop_reason, session = await go_on(app(LOOK, LOOK, max_requests=3), log)
    assert stop_reason == "max_turn_requests"
    assert len(find_texts(session, "assistant")) == 3
    assert (await go_on(app(), session.log.entries))[0] == "max_turn_requests", "it is final"


@pytest.mark.parametrize(("reply", "stop_reason"), [("length", "max_tokens"), ("content_filter", "refusal")])
async def test_cut_and_refused_turns_are_final(reply: str, stop_reason: str):
    ended, session = await go_on(app(Reply("Well", finish_reason=reply)), [])
    assert ended == stop_reason
    assert (await go_on(app(), session.log.entries))[0] == stop_reason


@pytest.mark.parametrize("is_decided", [True, False])
async def test_server_is_connected_before_a_call_is_marked_as_started(is_decided: bool):
    """A process that is killed between the two loses the call: it is marked, so it never runs again."""
    work = {"name": "work", "inputSchema": {"type": "object"}}
    server = Server("tools", lambda: WORK, definitions=[work], built_in=True)
    crow = Crow(
        ScriptedModel([Reply(tool_calls=[{"name": "work", "arguments": {}}]), Reply("Done.")]), servers=[server]
    )
    connected: list[bool] = []

    @crow.before_announcement
    def decide(session: Session, tool_call: ToolCall) -> None:
        if is_decided:
            session.log.append({"crow": {"kind": "decision", "call": tool_call.id, "is": "allow"}})

    @crow.message
    def watch(session: Session, entry: Message) -> None:
        if marker_kind(entry) == "started":
            connected.append(server.connected)

    _, session = await go_on(crow, [])
    assert (connected, find_texts(session, "tool")) == ([True], ["worked"])


async def test_server_that_does_not_connect_fails_the_call_and_not_the_turn():
    def refuse() -> FastMCP:
        raise ConnectionError("no such program")

    work = {"name": "work", "inputSchema": {"type": "object"}}
    server = Server("tools", refuse, definitions=[work], built_in=True)
    crow = Crow(
        ScriptedModel([Reply(tool_calls=[{"name": "work", "arguments": {}}]), Reply("Done.")]), servers=[server]
    )
    stop_reason, session = await go_on(crow, [])
    assert stop_reason == "end_turn"
    assert find_texts(session, "tool") == ["The tool failed: no such program."]


async def test_loop_guard_counts_the_calls_before_the_interruption():
    log = await interrupt(app(LOOK, LOOK, LOOK, DOWN).use(loop_guard, tell=3, answer=9))
    _, session = await go_on(app(LOOK, Reply("Well.")).use(loop_guard, tell=3, answer=9), log)
    told = [text.startswith(REMARK.partition("{")[0]) for text in find_texts(session, "tool")]
    assert told == [False, False, True, True]
    assert "this very call 4 times" in find_texts(session, "tool")[3]


async def test_goal_counts_the_requests_before_the_interruption():
    options: dict[str, Any] = {"until": "false", "every_turn": True, "requests": 3}
    log = await interrupt(app(LOOK, Reply("Well."), Reply("So."), DOWN).use(goal, **options))
    stop_reason, session = await go_on(app(Reply("Hm.")).use(goal, **options), log)
    assert stop_reason == "max_turn_requests"
    assert ["`false` failed" in text for text in find_texts(session, "user")] == [False, True, True]


async def test_budget_counts_the_requests_before_the_interruption():
    log = await interrupt(app(LOOK, LOOK, DOWN))
    log = [entry for entry in log if marker_kind(entry) != "budget"]  # the process was killed
    stop_reason, session = await go_on(app(LOOK, Reply("Never.")).use(budgets, requests=3), log)
    assert stop_reason == "max_turn_requests"
    assert len(find_texts(session, "assistant")) == 3


async def test_reply_that_was_stored_before_the_end_is_not_asked_for_again():
    _, session = await go_on(app(Reply("Well.")), [])
    log = [entry for entry in session.log if marker_kind(entry) != "ended"]
    stop_reason, session = await go_on(app(), log)
    assert (stop_reason, marker_kind(session.log[-1])) == ("end_turn", "ended")


async def test_prompt_without_a_key_after_an_interrupted_turn_gives_it_up():
    log = await interrupt(app(LOOK, DOWN))
    _, session = await go_on(app(Reply("Well.")), log, key="")
    assert [marker_kind(entry) for entry in session.log if marker_kind(entry) == "ended"] == ["ended"]
    assert (await go_on(app(), session.log.entries))[0] == "cancelled"


async def test_rewound_turn_is_run_anew():
    _, session = await go_on(app(Reply("Well.")), [])
    session.rewind("")
    _, session = await go_on(app(Reply("Again.")), session.log.entries)
    assert find_texts(session, "assistant")[-1] == "Again."


async def test_key_of_another_prompt_is_refused_before_anything_runs():
    _, session = await go_on(app(Reply("Well.")), [])
    crow = app()
    session = await crow.open(Nobody(), "/", record=Record("work", session.log.entries))
    with pytest.raises(PromptError, match="belongs to another prompt"):
        await crow.prompt(session, prompt("Stop."))
    assert not session.turns.tasks
    await crow.shut_down()


async def test_client_of_another_process_chooses_no_id_and_has_no_keys():
    crow = app(Reply("Hello."), Reply("Hello."))
    async with connect(crow) as editor:
        params = NewSessionRequest(cwd="/", mcp_servers=[], meta={"crow": {"sessionId": "work"}})
        opened = await editor.request("session/new", params)
        assert opened.session_id != "work"
        for _ in range(2):
            meta = {"crow": {"key": "1"}}
            await editor.request(
                "session/prompt",
                PromptRequest(session_id=opened.session_id, prompt=[TextBlock(text="Go.")], meta=meta),
            )
        log = crow.sessions[opened.session_id].log
        assert len(find_prompts(log)) == 2
        assert "key" not in str([entry.get("crow") for entry in log if entry.get("role") == "user"])


async def test_interrupted_call_of_a_handler_runs_once():
    began, ran = asyncio.Event(), list[str]()
    definition: dict[str, Any] = {"name": "work", "inputSchema": {"type": "object", "properties": {}}}

    async def work(session: Session, tool_call: ToolCall) -> ToolResult:
        ran.append(tool_call.id)
        began.set()
        await asyncio.Event().wait()
        raise AssertionError  # it is cancelled

    def own(*replies: Reply) -> Crow:
        server = Server("own", definitions=[definition], handlers={"work": work}, built_in=True)
        return Crow(ScriptedModel(replies), servers=[server])

    crow = own(Reply(tool_calls=[{"name": "work", "arguments": {}}]))
    session = await crow.open(Nobody(), "/", record=Record("work", []))
    turn = asyncio.ensure_future(crow.prompt(session, prompt()))
    await began.wait()
    await crow.close(session)
    assert await turn == "cancelled"
    _, session = await go_on(own(Reply("Well.")), session.log.entries)
    assert (find_texts(session, "tool"), len(ran)) == ([INTERRUPTED], 1)
    await crow.shut_down()


async def test_interrupted_call_is_shown_when_its_session_is_loaded_and_answered_when_the_next_turn_begins():
    use: Any = {"id": "call_1", "type": "function", "function": {"name": "demo_look", "arguments": "{}"}}
    stored: list[Message] = [prompt("Look.", key=""), {"role": "assistant", "content": None, "tool_calls": [use]}]
    crow = app(Reply("Well."))
    crow.store = MemoryStore(Record("work", [*stored]))
    async with connect(crow) as editor:
        await editor.request("session/load", LoadSessionRequest(session_id="work", cwd="/", mcp_servers=[]))
        log = crow.sessions["work"].log
        assert (log.entries, editor.calls()["call_1"][-1]) == (stored, "failed")
        await editor.prompt("work", "Go on.")
        roles = [entry["role"] for entry in log if "role" in entry]
        assert roles == ["user", "assistant", "tool", "user", "assistant"]
        assert log[2].get("content") == INTERRUPTED
