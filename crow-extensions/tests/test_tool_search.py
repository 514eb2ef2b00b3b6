"""The model searches for tools if there are very many; the list it is sent stays short and constant."""

import json
from typing import Any

import pytest
from crow_core.acp.schema import ResumeSessionRequest, ToolCall, ToolCallUpdate
from crow_core.app import Crow
from crow_core.content import replay
from crow_core.mcp.server import Server
from crow_core.mcp.tool import Tool
from crow_core.session.store import Record
from crow_core.testing import MemoryStore, Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.tool_search import rank_tools, tool_search
from crow_permissions.extension import permissions
from fastmcp import FastMCP
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.anyio


def many(count: int) -> FastMCP:
    server = FastMCP("shop")

    @server.tool
    def refund_order(order: int) -> str:
        """Give a customer the money back."""
        return f"refunded {order}"

    for number in range(count - 1):
        server.tool(lambda: "x", name=f"count_things_{number}", description=f"Counts things of kind {number}.")
    return server


def app(model: ScriptedModel, *servers: tuple[str, FastMCP], **options: Any) -> Crow:
    hung_up = [Server(name, lambda server=server: server, shared=True) for name, server in servers]
    return Crow(model, servers=hung_up).use(permissions).use(tool_search, **options)


def list_tools(request: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in request.get("tools", [])]


def result(request: dict[str, Any]) -> str:
    return request["messages"][-1]["content"]


def use(tool: str, /, **arguments: Any) -> Reply:
    return Reply(tool_calls=[Use(name=tool, arguments=arguments)])


async def test_a_short_list_of_tools_is_sent_whole():
    model = ScriptedModel([Reply("Hello.")])
    async with connect(app(model, ("shop", many(60)))) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
    assert len(list_tools(model.requests[0])) == 60
    assert "tool_search" not in list_tools(model.requests[0])


async def test_the_model_finds_and_calls_one_of_five_hundred_tools():
    model = ScriptedModel(
        [
            use("tool_search", query="customer wants money back"),
            use("call_tool", name="shop_refund_order", arguments={"order": 7}),
            Reply("Done."),
        ]
    )
    crow = app(model, ("shop", many(500)))
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "refund order 7")
        (opened,) = crow.sessions.values()
        replayed = [update for update in replay(opened.log, "/") if isinstance(update, ToolCall)]
    assert list_tools(model.requests[0]) == ["call_tool", "tool_search"]
    found = result(model.requests[1])
    assert found.startswith("shop_refund_order\nGive a customer the money back.\n{")
    assert json.loads(found.splitlines()[2])["properties"]["order"]["type"] == "integer"
    assert result(model.requests[2]) == "refunded 7"
    assert [request["tools"] for request in model.requests] == [model.requests[0]["tools"]] * 3
    assert [call.name for call in editor.of(ToolCall)] == ["tool_search", "shop_refund_order"]
    assert [call.name for call in replayed] == ["tool_search", "shop_refund_order"]


async def test_a_call_through_call_tool_asks_permission_for_the_called_tool():
    model = ScriptedModel([use("call_tool", name="shop_refund_order", arguments={"order": 7}), Reply("Done.")])
    async with connect(app(model, ("shop", many(100))), permit="reject_once") as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    (question,) = editor.questions
    assert question.tool_call.name == "shop_refund_order"
    assert question.tool_call.raw_input == {"order": 7}
    assert "refunded" not in result(model.requests[-1])


async def test_a_tool_that_is_not_listed_can_be_called_by_its_name():
    model = ScriptedModel([use("shop_refund_order", order=8), Reply("Done.")])
    async with connect(app(model, ("shop", many(100)))) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert result(model.requests[-1]) == "refunded 8"


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "shop_refund_order", "arguments": '{"order": 9}'},
        {"name": "shop_refund_order", "arguments": {"order": "9"}},
    ],
)
async def test_arguments_of_call_tool_as_json_text_are_parsed(arguments: dict[str, Any]):
    model = ScriptedModel([use("call_tool", **arguments), Reply("Done.")])
    async with connect(app(model, ("shop", many(100)))) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert result(model.requests[-1]) == "refunded 9"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (use("call_tool", arguments={}), "Nothing was called. The arguments are"),
        (use("call_tool", name="no_such"), "There is no tool 'no_such'."),
        (use("call_tool", name="call_tool", arguments={"name": "call_tool"}), "Nothing was called."),
        (use("tool_search"), "Nothing was searched: "),
        (use("tool_search", query="zebra"), "No tool has these words. Try others; the servers are: shop."),
        (use("tool_search", query='"; DROP TABLE tool; --'), "No tool has these words."),
        (use("tool_search", query=""), "No tool has these words."),
    ],
)
async def test_a_wrong_call_is_answered_with_what_to_do(call: Reply, says: str):
    model = ScriptedModel([call, Reply("Done.")])
    async with connect(app(model, ("shop", many(100)))) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert result(model.requests[-1]).startswith(says)
    assert editor.of(ToolCallUpdate)[-1].status in ("failed", "completed")


async def test_later_tools_do_not_change_the_list_once_the_model_searches():
    model = ScriptedModel(lambda request: Reply("Hello."))
    crow = app(model, ("shop", many(100)))
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
        (opened,) = crow.sessions.values()
        late = FastMCP("late")
        late.tool(lambda: "x", name="one")
        server = Server("late", lambda: late)
        opened.toolbox.add([server])
        await server.list()
        await editor.prompt(session.session_id, "hi again")
        assert "late_one" in opened.toolbox.tools
    assert model.requests[1]["tools"] == model.requests[0]["tools"]


async def test_tools_that_were_sent_stay_when_many_more_join():
    model = ScriptedModel(lambda request: Reply("Hello."))
    first = FastMCP("first")
    first.tool(lambda: "x", name="one")
    crow = app(model, ("first", first))
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
        (opened,) = crow.sessions.values()
        server = Server("shop", lambda: many(100))
        opened.toolbox.add([server])
        await server.list()
        await editor.prompt(session.session_id, "hi again")
    assert list_tools(model.requests[0]) == ["first_one"]
    assert list_tools(model.requests[1]) == ["first_one", "call_tool", "tool_search"]


async def test_a_loaded_session_sends_the_same_tool_list():
    model = ScriptedModel(
        [Reply("Hello."), use("call_tool", name="shop_refund_order", arguments={"order": 3}), Reply("Done.")]
    )
    first = app(model, ("shop", many(100)))
    async with connect(first) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
        (opened,) = first.sessions.values()
    record = Record(id=opened.id, log=opened.log, system=opened.prompts.system, tools=opened.toolbox.sent)
    second = app(model, ("shop", many(100)))
    second.store = MemoryStore(record)
    async with connect(second) as editor:
        await editor.request("session/resume", ResumeSessionRequest(session_id=opened.id, cwd="/"))
        await editor.prompt(opened.id, "go on")
    assert [request["tools"] for request in model.requests] == [model.requests[0]["tools"]] * 3
    assert result(model.requests[-1]) == "refunded 3"


async def test_tools_that_take_much_of_a_small_window_are_searched():
    model = ScriptedModel([Reply("Hello.")])
    model.window = 4000
    async with connect(app(model, ("shop", many(30)))) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
    assert list_tools(model.requests[0]) == ["call_tool", "tool_search"]


def tool(name: str, description: str = "", **properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties}
    return Tool(name, None, {"name": name, "description": description, "inputSchema": schema})


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text())
def test_any_query_is_read_as_words(query: str):
    assert len(rank_tools([tool("a", query), tool("b", "b", **{query: {}})], query)) <= 2


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("create issue", "github_createIssue"),
        ("creating issues", "github_createIssue"),
        ("commits since", "github_list_commits"),
        ("wetter", "weather_get"),
    ],
)
def test_the_best_match_is_first_in_any_spelling_of_names(query: str, best: str):
    tools = [
        tool("github_list_commits", "List commits.", since={"type": "string"}),
        tool("github_close", "Close an issue, or create chaos."),
        tool("github_createIssue", "Open a ticket."),
        tool("weather_get", "Das Wetter."),
        tool("odd", "", a={"type": ["x"]}),
    ]
    assert rank_tools(tools, query)[0].name == best
