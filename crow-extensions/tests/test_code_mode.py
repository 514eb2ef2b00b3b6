"""Tests of code mode: the model calls tools from a program, and each call is judged, shown and logged."""

import asyncio
import json
from typing import Any

import pytest
from crow_core.acp.schema import BlockContent, TextBlock, ToolCall, ToolCallUpdate
from crow_core.app import Crow
from crow_core.content import replay
from crow_core.errors import EndTurn
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.code_mode import code_mode
from crow_extensions.tool_search import tool_search
from crow_permissions.extension import permissions
from fastmcp import FastMCP

pytestmark = pytest.mark.anyio
pytest.importorskip("pydantic_monty")


def shop(*, more: int = 0) -> FastMCP:
    """Make a server whose tools are of every kind that a program may meet."""
    server = FastMCP("shop")

    @server.tool
    def orders(customer: str, limit: int = 3) -> list[dict[str, Any]]:
        """List the orders of a customer."""
        return [{"id": number, "price": number * 10, "by": customer} for number in range(1, limit + 1)]

    @server.tool
    def refund(order: int) -> str:
        """Give the money for an order back."""
        if order == 13:
            raise ValueError("order 13 was never paid")
        return f"refunded {order}"

    @server.tool
    def stock(item: str) -> int:
        return len(item)

    @server.tool(name="odd-name")
    def odd(text: str) -> str:
        return text[::-1]

    for number in range(more):
        server.tool(lambda: "x", name=f"count_things_{number}", description=f"Counts things of kind {number}.")
    return server


def program(code: str) -> ScriptedModel:
    return ScriptedModel([Reply(tool_calls=[Use(name="run_program", arguments={"code": code})]), Reply("Done.")])


def app(model: ScriptedModel, server: FastMCP | None = None, mode: Any = "yolo", **options: Any) -> Crow:
    crow = Crow(model, servers=[Server("shop", lambda: server or shop(), shared=True)])
    crow.servers_wait = 60.0
    return crow.use(permissions, mode=mode).use(tool_search).use(code_mode, **{"above": 0, **options})


async def go(crow: Crow, *, permit: str = "allow_once") -> Editor:
    async with connect(crow, permit=permit) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    return editor


async def result_of(code: str, **options: Any) -> str:
    """Return what the model is told of a program."""
    model = program(code)
    await go(app(model, **options))
    return model.requests[-1]["messages"][-1]["content"]


def list_tools(model: ScriptedModel) -> list[str]:
    return [tool["function"]["name"] for tool in model.requests[0].get("tools", [])]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sum(order['price'] for order in shop_orders(customer='Ada'))", "60"),
        ("print(shop_refund(order=1))\nshop_refund(order=2)", "refunded 1\nrefunded 2"),
        ("shop_orders('Ada', 1)", '[{"id": 1, "price": 10, "by": "Ada"}]'),
        ("shop_odd_name(text='abc')", "cba"),
        ("shop_stock(item='12') + 1", "3"),
        ("shop_odd_name(text='21') + '!'", "12!"),
        ("x = 1", "The program ended. It printed nothing."),
        (
            "import asyncio\nawait asyncio.gather(*[shop_refund(order=n) for n in (1, 2)])",
            '["refunded 1", "refunded 2"]',
        ),
        ("try:\n    shop_refund(order=13)\nexcept RuntimeError as error:\n    print('caught:', error)", "caught: "),
        ("'orders' in describe_tool('shop_orders') and 'limit' in describe_tool('shop_orders')", "true"),
    ],
)
async def test_program_calls_tools_as_functions(code: str, expected: str):
    result = await result_of(code)
    assert result == expected if not expected.startswith("caught") else "order 13 was never paid" in result


@pytest.mark.parametrize(
    ("code", "line", "reason"),
    [
        ("x = 1\ny = (", "line 2", "SyntaxError"),
        ("x = 1\nshop_refund(order=13)", "line 2", "order 13 was never paid"),
        ("x = 1\nshop_nothing(order=13)", "line 2", "name 'shop_nothing' is not defined"),
        ("\n\n1 / 0", "line 3", "ZeroDivisionError"),
        ("shop_refund(order='x' * 3)", "line 1", "input_value='xxx'"),
        ("describe_tool('no')", "line 1", "there is no function 'no'; the functions are: shop_odd_name"),
        ("open('/etc/passwd')", "line 1", "PermissionError"),
        ("import os\nos.environ['HOME']", "line 2", "Error"),
        ("import socket", "line 1", "ModuleNotFoundError"),
        ("run_program(code='1')", "line 1", "name 'run_program' is not defined"),
    ],
)
async def test_error_of_a_program_has_its_line_and_its_reason(code: str, line: str, reason: str):
    result = await result_of(code)
    assert line in result
    assert reason in result


async def test_error_keeps_what_was_printed_before():
    assert (await result_of("print('so far')\n1 / 0")).startswith("so far\nTraceback")


@pytest.mark.parametrize(
    ("code", "options", "reason"),
    [
        ("while True:\n    pass", {"seconds": 0.2}, "time limit exceeded"),
        ("x = [0] * 10**9", {}, "memory limit exceeded"),
        (
            "for n in range(9):\n    shop_refund(order=n)",
            {"calls": 5},
            "has made 5 calls, which is the limit",
        ),
        ("def f():\n    f()\nf()", {}, "RecursionError"),
        ("'x' * 2_000_000", {"memory": 1_000_000}, "memory limit exceeded"),
    ],
)
async def test_program_has_limits(code: str, options: dict[str, Any], reason: str):
    assert reason in await result_of(code, **options)


async def test_sleep_of_a_program_takes_no_time():
    assert await result_of("import time\ntime.sleep(100_000)\n'awake'") == "awake"


async def test_tools_of_servers_are_replaced_by_one_tool_with_their_signatures():
    model = program("1")
    await go(app(model, shop(more=90)))
    assert list_tools(model) == ["run_program"]
    about = model.requests[0]["tools"][0]["function"]["description"]
    assert "shop_orders(customer: str, limit: int = 3)  # List the orders of a customer." in about
    assert len(json.dumps(model.requests[0]["tools"])) < 10_000


async def test_few_tools_are_offered_as_ever():
    model = ScriptedModel([Reply("Hello.")])
    await go(app(model, above=20))
    assert list_tools(model) == ["shop_odd-name", "shop_orders", "shop_refund", "shop_stock"]


async def test_each_call_of_a_program_is_judged_by_the_rules():
    model = program("print(shop_refund(order=1))\nshop_orders(customer='Ada', limit=1)")
    crow = Crow(model, servers=[Server("shop", shop, shared=True)])
    await go(crow.use(permissions, mode="yolo", deny=["shop_orders"]).use(code_mode, above=0))
    result = model.requests[-1]["messages"][-1]["content"]
    assert result.startswith("refunded 1\nTraceback")
    assert "the rule 'shop_orders' says deny" in result


async def test_each_call_of_a_program_asks_for_its_permission():
    model = program("shop_refund(order=1)\nshop_refund(order=2)")
    editor = await go(app(model, mode="ask"))
    assert [(each.tool_call.name, each.tool_call.raw_input) for each in editor.questions] == [
        ("shop_refund", {"order": 1}),
        ("shop_refund", {"order": 2}),
    ]


async def test_denied_call_is_an_error_of_the_program():
    model = program("shop_refund(order=1)")
    await go(app(model, mode="ask"), permit="reject_once")
    assert "line 1" in model.requests[-1]["messages"][-1]["content"]


async def test_each_call_is_shown_with_its_result_and_again_in_a_replay():
    model = program("shop_refund(order=1)\n'done'")
    crow = app(model)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        log = [*crow.sessions[session.session_id].log]
    outer, inner = [call.tool_call_id for call in editor.of(ToolCall)]
    assert inner == f"{outer}/1"
    ends = {update.tool_call_id: update for update in editor.of(ToolCallUpdate) if update.status == "completed"}
    assert ends[inner].content == [BlockContent(content=TextBlock(text="refunded 1"))]
    shown = [*replay(log, "/")]
    assert [each.tool_call_id for each in shown if isinstance(each, ToolCall)] == [outer, inner]
    again = [each for each in shown if isinstance(each, ToolCallUpdate) and each.tool_call_id == inner]
    assert [each.content for each in again] == [ends[inner].content]


async def test_hooks_see_each_call_and_change_its_result():
    crow, seen = app(program("shop_refund(order=1)")), list[str]()

    @crow.after_tool
    def hide(result: ToolResult, session: Any, tool_call: Any) -> ToolResult | None:
        seen.append(tool_call.name)
        return ToolResult.text("[hidden]") if tool_call.name == "shop_refund" else None

    model = crow.models["scripted"]
    assert isinstance(model, ScriptedModel)
    await go(crow)
    assert seen == ["shop_refund", "run_program"]
    assert model.requests[-1]["messages"][-1]["content"] == "[hidden]"


async def test_hook_that_ends_the_turn_ends_the_program():
    crow = app(program("shop_refund(order=1)"))

    @crow.before_tool
    def end(session: Any, tool_call: Any) -> None:
        if tool_call.name == "shop_refund":
            raise EndTurn("end_turn", "That is enough.")

    editor = await go(crow)
    assert "That is enough." in editor.text


async def test_cancel_ends_the_program_and_its_calls():
    started, ended = asyncio.Event(), asyncio.Event()
    server = FastMCP("shop")

    @server.tool
    async def wait() -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    async with connect(app(program("shop_wait()"), server)) as editor:
        session = await editor.new_session("/")
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await started.wait()
        await editor.cancel(session.session_id)
        assert (await turn).stop_reason == "cancelled"
        await ended.wait()
    assert {update.status for update in editor.of(ToolCallUpdate) if update.tool_call_id.endswith("/1")} == {
        "in_progress",
        "failed",
    }


async def test_calls_that_a_program_does_not_await_are_ended():
    result = await result_of("shop_refund(order=1)\nawait shop_refund(order=2)")
    assert result == "refunded 2"
