"""MCP Apps: what the page of a server gets, and what it may ask for."""

from typing import Any

import pytest
from crow_core.acp.client import OPTION_NAMES
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import ClientCapabilities, LoadSessionRequest, ToolCall
from crow_core.acp.shared_methods import APP_METHOD, APP_REQUEST_METHOD
from crow_core.app import Crow
from crow_core.content import replay
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.session.session import Session
from crow_core.testing import Editor, MemoryStore, Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.mcp_apps import MAX_REQUESTS, mcp_apps
from crow_permissions.extension import permissions
from fastmcp import Context, FastMCP
from fastmcp.tools import ToolResult as Answer

pytestmark = pytest.mark.anyio

PAGE = "ui://birds/page"
HTML = "text/html;profile=mcp-app"


def birds(seen: list[Any] | None = None) -> FastMCP:
    """Make a server whose tool has a page."""
    server = FastMCP("birds")
    server.resource(PAGE, mime_type=HTML)(lambda: "<p>birds</p>")
    server.resource("bird://all", mime_type="text/plain")(lambda: "heron, wren")

    @server.tool(meta={"ui": {"resourceUri": PAGE}})
    async def show(context: Context) -> Answer:
        if seen is not None:
            seen.append(context.client_extension_settings("io.modelcontextprotocol/ui"))
        return Answer(content="two birds", structured_content={"birds": ["heron", "wren"]}, meta={"page": 1})

    @server.tool(meta={"ui": {"resourceUri": PAGE, "visibility": ["app"]}})
    def count(kind: str = "all") -> Answer:
        return Answer(content=f"2 of {kind}", structured_content={"count": 2})

    @server.tool(meta={"ui": {"visibility": ["model"]}})
    def remove() -> str:
        return "removed"

    return server


def other() -> FastMCP:
    server = FastMCP("other")
    server.tool(lambda: "secret plans", name="plans")
    return server


def app(*, mode: Any = "yolo", seen: list[Any] | None = None, store: MemoryStore | None = None) -> Crow:
    model = ScriptedModel([Reply(tool_calls=[Use(name="birds_show", arguments={})]), Reply("There.")] * 2)
    servers = [Server("birds", lambda: birds(seen), shared=True), Server("other", other, shared=True)]
    crow = Crow(model, servers=servers)
    crow.store = store
    crow.servers_wait = 60.0
    return crow.use(permissions, mode=mode).use(mcp_apps)


async def show(editor: Editor) -> tuple[str, str]:
    """Let the model call the tool with the page; return the ids of the session and the call."""
    id = (await editor.new_session("/")).session_id
    await editor.prompt(id, "Show the birds")
    return id, next(each.tool_call_id for each in editor.updates if isinstance(each, ToolCall))


async def ask(editor: Editor, app: tuple[str, str], method: str, **params: Any) -> dict[str, Any]:
    own = {"sessionId": app[0], "toolCallId": app[1], "method": method, "params": params}
    return await editor.request(APP_REQUEST_METHOD, own)


async def test_a_page_gets_the_call_with_its_structured_result():
    async with connect(app()) as editor:
        session, call = await show(editor)
        page = await editor.request(APP_METHOD, {"sessionId": session, "toolCallId": call})
        assert page["html"] == "<p>birds</p>"
        assert page["result"]["structuredContent"] == {"birds": ["heron", "wren"]}
        assert page["result"]["_meta"]["page"] == 1
        assert await editor.request(APP_METHOD, {"sessionId": session, "toolCallId": "x"}) == {}


async def test_a_page_calls_the_tools_of_its_server_and_the_log_keeps_it():
    crow = app()
    sessions: list[Session] = []
    crow.session_start(sessions.append)
    async with connect(crow) as editor:
        shown = await show(editor)
        answer = await ask(editor, shown, "tools/call", name="count", arguments={"kind": "heron"})
        assert answer["structuredContent"] == {"count": 2}
        assert answer["content"][0]["text"] == "2 of heron"
        assert not answer["isError"]
        seen = [each for each in editor.updates if isinstance(each, ToolCall)]
        assert seen[-1].title == "The page of birds: birds_count(kind=heron)"
        assert seen[-1].tool_call_id.startswith(f"{shown[1]}/")
        again = [each for each in replay(sessions[0].log, "/") if isinstance(each, ToolCall)]
        assert [each.name for each in again] == ["birds_show", "birds_count"]
        await editor.prompt(shown[0], "Go on")
    assert "birds_count" not in str(crow.models["scripted"].requests), "the model is not told"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("name", "reason"), [("remove", "no tool 'remove' for apps"), ("plans", "no tool 'plans'"), ("x" * 999, "no tool")]
)
async def test_a_page_cannot_call_a_tool_of_the_model_or_of_another_server(name: str, reason: str):
    async with connect(app()) as editor:
        shown = await show(editor)
        with pytest.raises(RpcError, match=reason):
            await ask(editor, shown, "tools/call", name=name)


async def test_the_rules_decide_what_a_page_may_call():
    async with connect(app(mode="ask"), permit="allow_once") as editor:
        shown = await show(editor)
        editor.permit = "reject_once"
        answer = await ask(editor, shown, "tools/call", name="count")
        assert answer["isError"]
        asked = editor.questions[-1].tool_call
        assert asked.title == "The page of birds: birds_count()"
        with pytest.raises(RpcError, match="the user rejected it"):
            await ask(editor, shown, "resources/read", uri="bird://all")
        asked = editor.questions[-1].tool_call
        assert "bird://all" in str(asked.title)


async def test_a_page_reads_the_resources_of_its_server():
    async with connect(app(mode="ask"), permit="allow_once") as editor:
        shown = await show(editor)
        before = len(editor.questions)
        own = await ask(editor, shown, "resources/read", uri=PAGE)
        assert len(editor.questions) == before, "a page of the server needs no question"
        answer = await ask(editor, shown, "resources/read", uri="bird://all")
        assert len(editor.questions) == before + 1
    assert own["contents"][0]["text"] == "<p>birds</p>"
    assert answer["contents"][0]["text"] == "heron, wren"


async def test_another_method_and_a_call_without_an_app_are_refused():
    async with connect(app()) as editor:
        shown = await show(editor)
        with pytest.raises(RpcError, match="tools/call and resources/read"):
            await ask(editor, shown, "prompts/get", name="x")
        with pytest.raises(RpcError, match="no such app"):
            await ask(editor, (shown[0], "nothing"), "tools/call", name="count")


async def test_a_page_that_never_ends_to_ask_is_stopped():
    async with connect(app()) as editor:
        shown = await show(editor)
        for _ in range(MAX_REQUESTS):
            await ask(editor, shown, "resources/read", uri=PAGE)
        with pytest.raises(RpcError, match="answers no more"):
            await ask(editor, shown, "resources/read", uri=PAGE)


async def test_the_hooks_change_what_the_model_reads_and_not_what_the_page_gets():
    crow = app()

    @crow.after_tool
    def shorten(result: ToolResult, session: Session, tool_call: Any) -> ToolResult:
        return ToolResult.text("short")

    async with connect(crow) as editor:
        session, call = await show(editor)
        page = await editor.request(APP_METHOD, {"sessionId": session, "toolCallId": call})
    assert page["result"]["content"][0]["text"] == "two birds"


async def test_a_session_that_is_opened_again_shows_its_page():
    store = MemoryStore()
    async with connect(app(store=store)) as editor:
        shown = await show(editor)
    async with connect(app(store=store)) as editor:
        await editor.request("session/load", LoadSessionRequest(session_id=shown[0], cwd="/"))
        page = await editor.request(APP_METHOD, {"sessionId": shown[0], "toolCallId": shown[1]})
        answer = await ask(editor, shown, "tools/call", name="count")
    assert page["result"]["structuredContent"] == {"birds": ["heron", "wren"]}
    assert answer["structuredContent"] == {"count": 2}


@pytest.mark.parametrize("apps", [True, False])
async def test_servers_are_told_that_the_client_shows_pages(apps: bool):
    seen: list[Any] = []
    meta = {"crow": {**OPTION_NAMES["crow"], "apps": apps}}
    async with connect(app(seen=seen), capabilities=ClientCapabilities(meta=meta)) as editor:
        await show(editor)
    assert seen == [{"mimeTypes": [HTML]} if apps else None]
