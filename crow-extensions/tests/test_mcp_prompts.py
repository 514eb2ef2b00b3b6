"""Tests of the slash commands for prompts of MCP servers, and of `/mcp`."""

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any, Literal

import mcp_types
import pytest
from crow_core.acp.schema import (
    AvailableCommandsUpdate,
    ClientCapabilities,
    CreateElicitationResponse,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
    McpServer,
    ResourceBlock,
    ResourceContents,
    TextBlock,
    UserMessageChunk,
)
from crow_core.app import Crow
from crow_core.content import replay
from crow_core.mcp.server import Server
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_extensions.commands import commands
from crow_extensions.mcp import PROMPTS, mcp, parse_prompt_arguments
from fastmcp import Context, FastMCP
from fastmcp.prompts import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcp_types import EmbeddedResource, ImageContent, TextResourceContents

pytestmark = pytest.mark.anyio

FORMS = ClientCapabilities(elicitation=ElicitationCapabilities(form=ElicitationFormCapabilities()))


def review(code: str, style: str = "short") -> str:
    """Review some code."""
    return f"Please review: {code} ({style})"


def app(model: ScriptedModel, *servers: FastMCP, name: str = "demo") -> Crow:
    crow = Crow(model, servers=[Server(name, lambda server=server: server, shared=True) for server in servers])
    return crow.use(commands).use(mcp)


def hello() -> ScriptedModel:
    return ScriptedModel(lambda request: Reply("Hello."))


def with_prompts(*functions: Any) -> FastMCP:
    server = FastMCP("demo")
    for function in functions:
        server.prompt(function)
    return server


def offered(editor: Editor) -> dict[str, Any]:
    """Return the commands of MCP servers in the client's last update, with their input."""
    updates = editor.of(AvailableCommandsUpdate)
    commands = updates[-1].available_commands if updates else []
    return {command.name: command.input and command.input.hint for command in commands if ":" in command.name}


async def until_offered(editor: Editor, *names: str) -> None:
    await editor.until(lambda editor: set(names) <= offered(editor).keys())


def asked(model: ScriptedModel) -> Any:
    """Return the last user message of the last request."""
    return model.requests[-1]["messages"][-1]["content"]


async def test_prompt_is_a_command_with_arguments():
    model = hello()
    async with connect(app(model, with_prompts(review))) as editor:
        session = await editor.new_session("/")
        await until_offered(editor, "demo:review")
        assert offered(editor) == {"demo:review": "<code> [style]"}
        await editor.prompt(session.session_id, "/demo:review 'x = 1' style=long")
    assert asked(model) == "Please review: x = 1 (long)"


async def test_replay_shows_the_typed_command():
    crow = app(hello(), with_prompts(review))
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await until_offered(editor, "demo:review")
        await editor.prompt(session.session_id, "/demo:review x")
        (opened,) = crow.sessions.values()
        messages = [update for update in replay(opened.log, "/") if isinstance(update, UserMessageChunk)]
    assert [update.content for update in messages] == [TextBlock(text="/demo:review x")]


async def test_missing_arguments_are_asked_for_with_a_form():
    model = hello()
    async with connect(app(model, with_prompts(review)), capabilities=FORMS) as editor:
        editor.answer = CreateElicitationResponse(action="accept", content={"code": "y = 2"})
        session = await editor.new_session("/")
        await until_offered(editor, "demo:review")
        await editor.prompt(session.session_id, "/demo:review style=long")
    (form,) = editor.forms
    assert form.requested_schema
    assert list(form.requested_schema.properties) == ["code"]
    assert asked(model) == "Please review: y = 2 (long)"


async def test_declined_form_ends_the_turn_without_a_model_call():
    model = hello()
    async with connect(app(model, with_prompts(review)), capabilities=FORMS) as editor:
        editor.answer = CreateElicitationResponse(action="decline")
        session = await editor.new_session("/")
        await until_offered(editor, "demo:review")
        await editor.prompt(session.session_id, "/demo:review")
    assert editor.text == "/demo:review was not used."
    assert model.requests == []


async def test_missing_arguments_show_the_usage_without_client_forms():
    model = hello()
    async with connect(app(model, with_prompts(review))) as editor:
        session = await editor.new_session("/")
        await until_offered(editor, "demo:review")
        await editor.prompt(session.session_id, "/demo:review")
    assert editor.text == (
        "/demo:review needs code. Type: /demo:review <code> [style] (in this order, or as name=value)."
    )
    assert model.requests == []


async def test_prompt_keeps_images_and_resources_and_names_roles():
    def rich() -> list[Message]:
        contents = TextResourceContents(uri="note://1", text="a note", mime_type="text/plain")
        return [
            Message("Look."),
            Message("I looked.", role="assistant"),
            Message(EmbeddedResource(type="resource", resource=contents)),
            Message(ImageContent(type="image", data="iVBORw0KGgppbWc=", mime_type="image/png")),
        ]

    model = hello()
    async with connect(app(model, with_prompts(rich))) as editor:
        session = await editor.new_session("/")
        await until_offered(editor, "demo:rich")
        await editor.prompt(session.session_id, "/demo:rich")
    texts = [part["text"] for part in asked(model) if part["type"] == "text"]
    assert texts == [
        *("User:", "Look.", "Assistant:", "I looked.", "User:", '<resource uri="note://1">\na note\n</resource>'),
        "User:",
    ]
    assert asked(model)[-1]["image_url"]["url"] == "data:image/png;base64,iVBORw0KGgppbWc="


async def test_attachments_of_a_command_are_kept():
    model = hello()
    async with connect(app(model, with_prompts(review))) as editor:
        session = await editor.new_session("/")
        await until_offered(editor, "demo:review")
        attachment = ResourceBlock(resource=ResourceContents(uri="file:///a.py", text="x = 1"))
        await editor.prompt(session.session_id, [TextBlock(text="/demo:review this"), attachment])
    assert asked(model) == 'Please review: this (short)\n\n<resource uri="/a.py">\nx = 1\n</resource>'


async def test_failed_prompt_is_a_message_and_the_session_goes_on():
    def broken() -> str:
        """Fails."""
        raise ValueError("no more ink")

    model = hello()
    async with connect(app(model, with_prompts(broken))) as editor:
        session = await editor.new_session("/")
        await until_offered(editor, "demo:broken")
        await editor.prompt(session.session_id, "/demo:broken")
        assert editor.text.startswith("/demo:broken could not be used: ")
        assert (await editor.prompt(session.session_id, "hi")).stop_reason == "end_turn"
    assert "Traceback" not in editor.text


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_new_prompts_become_commands_at_once(mode: Literal["auto", "legacy"]):
    server = with_prompts(review)

    @server.tool
    async def learn(ctx: Context) -> str:
        server.prompt(lambda: "Later.", name="later")
        await ctx.send_notification(mcp_types.PromptListChangedNotification())
        return "learnt"

    model = ScriptedModel([Reply(tool_calls=[{"name": "demo_learn", "arguments": {}}]), Reply("Done."), Reply("Hi.")])
    crow = app(model, server)
    crow.servers[0].mode = mode
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await until_offered(editor, "demo:review")
        await editor.prompt(session.session_id, "go")
        await until_offered(editor, "demo:later")
        await editor.prompt(session.session_id, "/demo:later")
    assert asked(model) == "Later."


async def test_prompt_may_ask_the_user():
    server = FastMCP("demo")

    @server.prompt
    async def greet(ctx: Context) -> str | mcp_types.InputRequiredResult:
        """Greets somebody."""
        answer = await ctx.elicit("Whom?", str)
        return f"Greet {getattr(answer, 'data', 'nobody')}."

    model = hello()
    crow = app(model, server)
    crow.servers[0].mode = "legacy"
    async with connect(crow, capabilities=FORMS) as editor:
        editor.answer = CreateElicitationResponse(action="accept", content={"value": "Ann"})
        session = await editor.new_session("/")
        await until_offered(editor, "demo:greet")
        await editor.prompt(session.session_id, "/demo:greet")
    assert asked(model) == "Greet Ann."


FRAIL = """
import json, os, sys
with open(sys.argv[1], "a+") as log:
    log.write("started ")
    log.seek(0)
    again = log.read() != "started "
for line in sys.stdin:
    message = json.loads(line)
    match message["method"]:
        case "initialize":
            result = {
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {}, "prompts": {}},
                "serverInfo": {"name": "frail", "version": "1"},
            }
        case "notifications/initialized" if again:
            os._exit(1)
        case "tools/list":
            result = {"tools": [{"name": "poke", "inputSchema": {"type": "object"}}]}
        case "prompts/list":
            result = {"prompts": []}
        case "tools/call":
            os._exit(1)
        case _:
            result = None
    if "id" in message:
        answer = {"result": result} if result else {"error": {"code": -32601, "message": "Method not found"}}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}), flush=True)
"""


async def test_dying_server_is_not_restarted_for_its_prompts(tmp_path: Path):
    (tmp_path / "frail.py").write_text(FRAIL)
    command = [str(tmp_path / "frail.py"), str(tmp_path / "log")]
    poke = Reply(tool_calls=[{"name": "frail_poke", "arguments": {}}])
    crow = app(ScriptedModel([poke, poke, Reply("Done.")]))
    async with connect(crow) as editor:
        session = await editor.new_session("/", [McpServer(name="frail", command=sys.executable, args=command, env=[])])
        await editor.prompt(session.session_id, "go")
        (opened,) = crow.sessions.values()
        (prompts,) = opened.state[PROMPTS]
        for _ in range(5):
            await asyncio.wait([prompts.listing])
    assert (tmp_path / "log").read_text().split() == ["started"] * 2


async def test_command_names_are_typable_and_unique():
    server = FastMCP("demo")
    for name in ("a b", "a\nb", "\x1b[2J", "é" * 300):
        server.prompt(lambda: "x", name=name, description=f"about\x1b[2J {name}")
    async with connect(app(hello(), server, name="my server")) as editor:
        await editor.new_session("/")
        await until_offered(editor, "my_server:a_b", "my_server:a_b_2", "my_server:__2J")
        commands = editor.of(AvailableCommandsUpdate)[-1].available_commands
    assert all(len(command.name) <= 102 for command in commands)
    assert not any("\x1b" in command.description for command in commands)


async def test_server_without_prompts_announces_and_logs_nothing(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    async with connect(app(hello(), FastMCP("demo"))) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "/mcp")
    assert editor.text == "- **demo**: 0 tools"
    assert len(editor.of(AvailableCommandsUpdate)) == 1
    assert not caplog.records


async def test_mcp_command_shows_a_line_for_each_server():
    server = with_prompts(review)
    server.tool(lambda: "x", name="one")
    server.tool(lambda: "x", name="two")

    def dead() -> Any:
        raise OSError("no such place")

    crow = app(hello(), server)
    crow.servers.append(Server("dead", dead))
    crow.servers.append(Server("own", None, definitions=[], built_in=True))
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await until_offered(editor, "demo:review")
        await editor.prompt(session.session_id, "/mcp")
    assert editor.text == ("- **demo**: 2 tools, 1 prompt\n- **dead**: MCP server 'dead' did not start: no such place.")


async def test_mcp_command_without_servers_says_how_to_add_one():
    async with connect(app(hello())) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "/mcp")
    assert editor.text == "There are no MCP servers. Add one: crow mcp add NAME -- COMMAND"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("x y", {"a": "x", "b": "y"}),
        ("'x y' z", {"a": "x y", "b": "z"}),
        ("x y z", {"a": "x", "b": "y z"}),
        ("b=1 x", {"a": "x", "b": "1"}),
        ("c=1", {"a": "c=1"}),
        ("it's fine", {"a": "it's", "b": "fine"}),
        ("a=1=2", {"a": "1=2"}),
    ],
)
def test_arguments_are_parsed_by_name_and_position(words: str, expected: dict[str, str]):
    assert parse_prompt_arguments(words, ["a", "b"]) == expected


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(), st.lists(st.text(min_size=1), unique=True))
def test_parsed_arguments_have_known_names(words: str, names: list[str]):
    assert parse_prompt_arguments(words, names).keys() <= set(names)
