"""Stored sessions over the protocol: load, resume, fork, list and delete."""

import asyncio
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import crow_mcp_server
import pytest
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    NOT_FOUND,
    AgentMessageChunk,
    AgentThoughtChunk,
    CloseSessionRequest,
    ContentBlock,
    DeleteSessionRequest,
    DiffContent,
    ForkSessionRequest,
    ImageBlock,
    ListSessionsRequest,
    ListSessionsResponse,
    LoadSessionRequest,
    LoadSessionResponse,
    ResourceBlock,
    ResourceContents,
    ResourceLinkBlock,
    ResumeSessionRequest,
    SessionInfoUpdate,
    TextBlock,
    ToolCall,
    ToolCallUpdate,
    UserMessageChunk,
)
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall as ToolCallValue
from crow_core.session.session import Session
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_extensions.steering import STEERING, steering
from crow_extensions.titles import titles
from crow_permissions.extension import IN_YOLO, permissions
from crow_persistence.database import Database
from crow_persistence.extension import persistence

pytestmark = pytest.mark.anyio

SAID: list[ContentBlock] = [
    TextBlock(text="Look at these."),
    ResourceLinkBlock(uri="file:///project/notes.md", name="notes.md"),
    ImageBlock(data="iVBORw0KGgo=", mime_type="image/png"),
    ResourceBlock(resource=ResourceContents(uri="file:///project/a.py", text="a = 1\n", mime_type="text/x-python")),
    TextBlock(text="And tell me."),
]
"""A prompt with every kind of attachment."""


def app(database: Database, *replies: Reply) -> Crow:
    """Return an app as in another process, with the built-in tools."""
    model = ScriptedModel(replies or (lambda request: Reply("Well.")))
    tools = Server(
        "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
    )
    url = database.url.render_as_string(hide_password=False)
    crow = Crow(model, servers=[tools]).use(permissions, mode="yolo").use(titles)
    return crow.use(persistence, url=url, folder=database.folder)


def model_of(crow: Crow) -> ScriptedModel:
    (model,) = crow.models.values()
    assert isinstance(model, ScriptedModel)
    return model


async def load(editor: Editor, id: str, cwd: Path) -> LoadSessionResponse:
    return await editor.request("session/load", LoadSessionRequest(session_id=id, cwd=str(cwd), mcp_servers=[]))


async def listed(editor: Editor, **filters: Any) -> ListSessionsResponse:
    return await editor.request("session/list", ListSessionsRequest(**filters))


def seen(editor: Editor) -> list[Any]:
    """Return what a client shows at the end: messages joined from their chunks, tool calls in their last state."""
    found: dict[Any, Any] = {}
    for update in editor.updates:
        match update:
            case AgentMessageChunk(content=TextBlock(text=text)) | AgentThoughtChunk(content=TextBlock(text=text)):
                key = (type(update), update.message_id)
                found[key] = found.get(key, "") + text
            case ToolCall():
                found[update.tool_call_id] = [update.title, update.kind, update.name, update.raw_input, update.status]
            case ToolCallUpdate(status="completed" | "failed"):
                what = [update.status, update.content, update.locations, update.raw_output]
                found[update.tool_call_id] = found[update.tool_call_id][:4] + what
            case _:
                pass
    return list(found.values())


WORK = (
    Reply(
        "I make a file and look at it.",
        reasoning="First a file.",
        tool_calls=[
            {"name": "file_editor", "arguments": {"command": "create", "path": "a.txt", "file_text": "eins\nzwei\n"}},
            {"name": "terminal", "arguments": {"command": "echo ```; exit 3"}},
        ],
    ),
    Reply(tool_calls=[{"name": "nonsense", "arguments": {}}, {"name": "terminal", "arguments": "{broken"}]),
    Reply(
        tool_calls=[
            {
                "name": "file_editor",
                "arguments": {"command": "str_replace", "path": "a.txt", "old_str": "zwei", "new_str": "drei"},
            }
        ]
    ),
    Reply("All is done."),
)


async def test_loaded_session_replays_its_updates(database: Database, tmp_path: Path):
    """Thoughts, texts and tool calls with diffs and locations are replayed in order, before the answer to the load."""
    async with connect(app(database, *WORK)) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, SAID)
        before = seen(editor)
    crow = app(database)
    async with connect(crow) as editor:
        await load(editor, id, tmp_path)
        after = seen(editor)
        said = [update.content for update in editor.of(UserMessageChunk)]
    assert IN_YOLO in before[0]
    assert after == before[1:]
    assert any(isinstance(part, DiffContent) for part in after[-2][5])
    assert said == SAID
    (command,) = (shown for shown in after if shown[2] == "terminal" and shown[3] != "{broken")
    assert command[4] == "failed"
    assert command[7]["exitStatus"] == {"exitCode": 2}  # the shell's own, for the unclosed quote
    assert "\n[exit code 2]" in command[5][0].content.text  # so `rawOutput` does not repeat it


async def test_cancelled_tool_call_is_of_the_same_kind_after_a_load(database: Database, tmp_path: Path):
    wait = Reply(tool_calls=[{"name": "terminal", "arguments": {"command": "sleep 1000"}}])
    async with connect(app(database, wait)) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "Wait."))
        await editor.until(lambda editor: "in_progress" in str(editor.calls()))
        await editor.cancel(id)
        assert (await turn).stop_reason == "cancelled"
    async with connect(app(database)) as editor:
        await load(editor, id, tmp_path)
        assert [(call.kind, call.title) for call in editor.of(ToolCall)] == [("execute", "sleep 1000")]
        assert list(editor.calls().values()) == [["pending", "failed"]]


async def test_tool_call_of_a_killed_process_is_of_the_same_kind_after_a_load(database: Database, tmp_path: Path):
    """The process is killed in the middle of the call: nothing of it is stored but the call."""
    stuck, url = asyncio.Event(), database.url.render_as_string(hide_password=False)
    first = app(database, Reply(tool_calls=[{"name": "terminal", "arguments": {"command": "true"}}]), Reply("Done."))

    @first.before_tool
    async def hang(session: Session, tool_call: ToolCallValue) -> None:
        await stuck.wait()

    async with connect(first) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "Go."))
        await editor.until(lambda editor: editor.of(ToolCall))
        copy = Database(url.replace("crow.db", "copy.db"), tmp_path) if database.file else None
        if copy is None or database.file is None:
            stuck.set()
            await turn
            pytest.skip("a copy of the database stands for the killed process")
        with closing(sqlite3.connect(database.file)) as source, closing(sqlite3.connect(tmp_path / "copy.db")) as to:
            source.backup(to)
            to.execute("UPDATE sessions SET owner = NULL")
            to.commit()
        stuck.set()
        await turn
    async with connect(app(copy)) as editor:
        await load(editor, id, tmp_path)
        assert [call.kind for call in editor.of(ToolCall)] == ["execute"]
    copy.close()


async def test_requests_after_a_load_begin_like_those_before(database: Database, tmp_path: Path):
    """Requests begin with the bytes of the last one before the load."""
    first = app(database, *WORK)
    async with connect(first) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, SAID)
    second = app(database)
    async with connect(second) as editor:
        await load(editor, id, tmp_path)
        await editor.prompt(id, "And now?")
    (last, request) = model_of(first).requests[-1], model_of(second).requests[0]
    assert request["messages"][: len(last["messages"])] == last["messages"]
    assert request["tools"] == last["tools"]
    assert request["messages"][-1] == {"role": "user", "content": "And now?"}


async def test_resumed_session_replays_nothing(database: Database, tmp_path: Path):
    async with connect(app(database, Reply("Hello."))) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "hi")
    crow = app(database)
    async with connect(crow) as editor:
        await editor.request("session/resume", ResumeSessionRequest(session_id=id, cwd=str(tmp_path)))
        assert not editor.of(UserMessageChunk)
        assert not editor.of(AgentMessageChunk)
        await editor.prompt(id, "again")
    assert [m["content"] for m in model_of(crow).requests[0]["messages"][1:]] == ["hi", "Hello.", "again"]


async def test_list_shows_the_sessions_of_each_folder(database: Database, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    async with connect(app(database)) as editor:
        for cwd in (tmp_path, tmp_path, other):
            id = (await editor.new_session(str(cwd))).session_id
            await editor.prompt(id, f"What is in {cwd.name}?")
        await editor.new_session(str(other))  # without a message
        assert len((await listed(editor)).sessions) == 3
        (info,) = (await listed(editor, cwd=str(other))).sessions
        assert (info.session_id, info.cwd, info.title) == (id, str(other), "What is in other?")
        assert isinstance(info.updated_at, str)
        assert info.updated_at.endswith("+00:00")
        assert (await listed(editor, cwd="/nowhere")).sessions == []


async def test_client_receives_the_list_in_pages(database: Database, tmp_path: Path):
    async with connect(app(database)) as editor:
        ids: list[str] = []
        for _ in range(55):
            ids.append((await editor.new_session(str(tmp_path))).session_id)
            await editor.prompt(ids[-1], "hi")
        page = await listed(editor)
        assert len(page.sessions) == 50
        rest = await listed(editor, cursor=page.next_cursor)
        assert not rest.next_cursor
        assert [info.session_id for info in [*page.sessions, *rest.sessions]] == ids[::-1]
        with pytest.raises(RpcError) as caught:
            await listed(editor, cursor="nonsense")
    assert caught.value.code == INVALID_PARAMS


async def test_deleted_session_is_gone_and_may_be_deleted_again(database: Database, tmp_path: Path):
    async with connect(app(database)) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "hi")
        for _ in range(2):
            await editor.request("session/delete", DeleteSessionRequest(session_id=id))
        assert (await listed(editor)).sessions == []
        with pytest.raises(RpcError) as caught:
            await load(editor, id, tmp_path)
        assert caught.value.code == NOT_FOUND
        assert isinstance(caught.value.data, dict)
        assert caught.value.data["sessionId"] == id


async def test_fork_is_independent_of_its_origin(database: Database, tmp_path: Path):
    """The first session stays open; prompts in one session do not appear in the other."""
    crow = app(database)
    async with connect(crow) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "one")
        fork = await editor.request("session/fork", ForkSessionRequest(session_id=id, cwd=str(tmp_path)))
        await editor.prompt(fork.session_id, "two")
        await editor.prompt(id, "three")
        assert {info.session_id for info in (await listed(editor)).sessions} == {id, fork.session_id}
    heard = [[m["content"] for m in r["messages"] if m["role"] == "user"] for r in model_of(crow).requests]
    assert heard == [["one"], ["one", "two"], ["one", "three"]]
    async with connect(app(database)) as editor:
        await load(editor, fork.session_id, tmp_path)
        assert [u.content for u in editor.of(UserMessageChunk)] == [TextBlock(text="one"), TextBlock(text="two")]


async def test_session_open_in_another_process_can_only_be_forked(database: Database, tmp_path: Path):
    async with connect(app(database)) as first, connect(app(database)) as second:
        id = (await first.new_session(str(tmp_path))).session_id
        await first.prompt(id, "mine")
        with pytest.raises(RpcError) as caught:
            await load(second, id, tmp_path)
        assert caught.value.code == INVALID_REQUEST
        assert isinstance(caught.value.data, dict)
        assert caught.value.data["canFork"] is True
        assert "fork" in caught.value.data["details"]
        fork = await second.request("session/fork", ForkSessionRequest(session_id=id, cwd=str(tmp_path)))
        await second.prompt(fork.session_id, "yours")
        await first.request("session/close", CloseSessionRequest(session_id=id))
        await load(second, id, tmp_path)


async def test_session_open_in_this_process_is_reopened_by_a_load(database: Database, tmp_path: Path):
    async with connect(app(database)) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "hi")
        editor.updates.clear()
        await load(editor, id, tmp_path)
        assert [u.content for u in editor.of(UserMessageChunk)] == [TextBlock(text="hi")]
        assert (await editor.prompt(id, "again")).stop_reason == "end_turn"


async def test_loaded_session_has_its_title_mode_and_options(database: Database, tmp_path: Path):
    async with connect(app(database)) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.set_mode(id, "plan")
        await editor.prompt(id, "What a day")
    async with connect(app(database)) as editor:
        answer = await load(editor, id, tmp_path)
        assert answer.modes
        assert answer.modes.current_mode_id == "plan"
        await editor.until(lambda editor: editor.of(SessionInfoUpdate))
    assert editor.of(SessionInfoUpdate)[0].title == "What a day"


async def test_mode_that_allows_everything_is_not_restored(database: Database, tmp_path: Path):
    crow = app(database)
    async with connect(crow) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.set_mode(id, "ask")
        await editor.set_mode(id, "yolo")
        await editor.prompt(id, "hi")
    strict = Crow(ScriptedModel([])).use(permissions, mode="ask")
    strict.use(persistence, url=database.url.render_as_string(hide_password=False), folder=database.folder)
    async with connect(strict) as editor:
        answer = await load(editor, id, tmp_path)
        await editor.until(lambda editor: editor.thoughts)
    assert answer.modes
    assert answer.modes.current_mode_id == "ask"
    assert editor.thoughts == "This session was in mode Yolo, which is not restored. It is in mode Ask now.\n"


async def test_mode_that_is_restored_is_said_if_it_is_not_the_default(database: Database, tmp_path: Path):
    async with connect(app(database)) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.set_mode(id, "accept-edits")
        await editor.prompt(id, "hi")
    async with connect(app(database)) as editor:
        await load(editor, id, tmp_path)
        await editor.until(lambda editor: editor.thoughts)
        assert editor.thoughts == "This session is still in mode Accept edits.\n"


async def test_mode_that_is_the_default_is_restored_without_a_notice(database: Database, tmp_path: Path):
    async with connect(app(database)) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.set_mode(id, "ask")
        await editor.set_mode(id, "yolo")
        await editor.prompt(id, "hi")
    async with connect(app(database)) as editor:
        await load(editor, id, tmp_path)
        await editor.prompt(id, "hi")
        assert editor.thoughts == f"{IN_YOLO}\n"


async def test_disconnected_tool_stays_in_the_list_and_fails(database: Database, tmp_path: Path):
    first = app(database)
    async with connect(first) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "hi")
    model = ScriptedModel([Reply(tool_calls=[{"name": "terminal", "arguments": {"command": "true"}}]), Reply("Oh.")])
    second = Crow(model).use(persistence, url=database.url.render_as_string(False), folder=database.folder)
    async with connect(second) as editor:
        await load(editor, id, tmp_path)
        await editor.prompt(id, "run it")
    assert model.requests[0]["tools"] == model_of(first).requests[0]["tools"]
    assert "not connected" in model.requests[1]["messages"][-1]["content"]


async def test_hidden_messages_are_not_replayed(database: Database, tmp_path: Path):
    crow = app(database, Reply("One."), Reply("Two."))
    more = iter(["Go on."])

    @crow.before_end
    def go_on(session: Any, stop_reason: Any) -> Any:
        words = next(more, None)
        return words and {"role": "user", "content": words, "crow": {"hidden": True}}

    async with connect(crow) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "hi")
    async with connect(app(database)) as editor:
        await load(editor, id, tmp_path)
    assert [u.content for u in editor.of(UserMessageChunk)] == [TextBlock(text="hi")]
    assert editor.text == "One.Two."


async def test_without_a_store_its_capabilities_and_methods_are_absent():
    async with connect(Crow(ScriptedModel([]))) as editor:
        for method, params in (
            ("session/load", LoadSessionRequest(session_id="x", cwd="/", mcp_servers=[])),
            ("session/list", ListSessionsRequest()),
            ("session/fork", ForkSessionRequest(session_id="x", cwd="/")),
        ):
            with pytest.raises(RpcError) as caught:
                await editor.request(method, params)
            assert caught.value.code == METHOD_NOT_FOUND


async def test_client_can_search_one_folder_or_all(database: Database, tmp_path: Path):
    async with connect(app(database, Reply("It is teal."))) as editor:
        old = await editor.new_session(str(tmp_path))
        await editor.prompt(old.session_id, "Which colour has the heron?")
    async with connect(app(database)) as editor:
        here, elsewhere = [(await editor.new_session(cwd)).session_id for cwd in (str(tmp_path), "/")]
        asked = {"sessionId": here, "words": "heron"}
        (hit,) = (await editor.request("_crow/search", asked))["hits"]
        assert datetime.fromisoformat(hit.pop("at")) <= datetime.now(UTC)
        assert hit == {
            "sessionId": old.session_id,
            "title": "Which colour has the heron?",
            "cwd": str(tmp_path),
            "role": "user",
            "tool": "",
            "snippet": "Which colour has the ⟦heron⟧?",
        }
        asked = {"sessionId": elsewhere, "words": "teal OR (heron"}
        assert (await editor.request("_crow/search", asked))["hits"] == []
        asked = {"sessionId": elsewhere, "words": "teal"}
        assert (await editor.request("_crow/search", asked))["hits"] == []
        assert len((await editor.request("_crow/search", {**asked, "everywhere": True}))["hits"]) == 1
        assert (await editor.request("_crow/search", {**asked, "everywhere": True, "limit": 0}))["hits"] == []


@pytest.mark.parametrize("wrong", [{}, {"words": ["a"]}, {"words": "a", "everywhere": 1}, {"words": "a", "limit": "9"}])
async def test_invalid_search_is_refused(database: Database, wrong: dict[str, Any]):
    async with connect(app(database)) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError) as refused:
            await editor.request("_crow/search", {"sessionId": session.session_id, **wrong})
        assert refused.value.code == INVALID_PARAMS


async def test_words_that_joined_a_running_turn_are_shown_again_where_they_were(database: Database):
    streaming, finish = asyncio.Event(), asyncio.Event()

    async def answer(request: dict[str, Any]) -> Reply:
        if streaming.is_set():
            return Reply("In blue.")
        streaming.set()
        await finish.wait()
        return Reply("Done.")

    url = database.url.render_as_string(hide_password=False)
    crow = Crow(ScriptedModel(answer)).use(persistence, url=url, folder=database.folder).use(steering)
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(session, "go"))
        await streaming.wait()
        words = {"sessionId": session, "prompt": [{"type": "text", "text": "rather"}]}
        steer = asyncio.ensure_future(editor.request("_session/steering", words))
        while not any(one.state[STEERING].waiting for one in crow.sessions.values()):
            await asyncio.sleep(0)
        finish.set()
        await turn
        assert (await steer)["outcome"] == "injected"
        await editor.request("session/close", CloseSessionRequest(session_id=session))
        shown = len(editor.updates)
        await editor.request("session/load", LoadSessionRequest(session_id=session, cwd="/", mcp_servers=[]))
        texts = [
            each.content.text
            for each in editor.updates[shown:]
            if isinstance(each, UserMessageChunk | AgentMessageChunk) and isinstance(each.content, TextBlock)
        ]
    assert texts == ["go", "Done.", "rather", "In blue."]
