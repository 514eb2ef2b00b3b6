"""Tool calls under names that no provider accepts: the tool is found, and the next request has a legal name."""

import re
from itertools import pairwise
from typing import Any

import pytest
from crow_core.acp import schema
from crow_core.acp.schema import LoadSessionRequest
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.messages.message import Message
from crow_core.messages.passes import view
from crow_core.messages.view import View
from crow_core.models.chat_model import ChatModel
from crow_core.session.store import Record
from crow_core.testing import Failure, MemoryStore, Reply, ScriptedModel, ScriptedServer, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.tool_search import tool_search
from crow_permissions.extension import permissions
from fastmcp import FastMCP
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.anyio

LEGAL = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def make_server(*names: str, server: str = "birds") -> Server:
    """Make a server whose tools answer with their names."""
    mcp = FastMCP(server)
    for name in names:
        mcp.tool(lambda name=name: f"I am {name}", name=name)
    return Server(server, lambda: mcp, shared=True)


async def call(name: str, *servers: Server) -> tuple[str, str, str]:
    """Let a model call `name`; return the result, the name in the next request, and the name in the log."""
    model = ScriptedModel([Reply(tool_calls=[Use(name=name, arguments={})]), Reply("Done.")])
    crow = Crow(model, servers=servers)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "go")
        assert answer.stop_reason == "end_turn"
        (open_session,) = crow.sessions.values()
        logged = next(entry for entry in open_session.log if entry.get("tool_calls"))
        assert view(open_session.log) == View(open_session.log).messages()
    reply, result = model.requests[1]["messages"][-2:]
    (sent,) = reply["tool_calls"]
    assert sent["id"] == result["tool_call_id"]
    (kept,) = logged.get("tool_calls", [])
    return result["content"], sent["function"]["name"], kept["function"]["name"]


@pytest.mark.parametrize(
    "name",
    [
        "birds_caw<|channel|>commentary",
        "functions.birds_caw<|channel|>commentary",
        "birds_caw<|constrain|>json",
        "assistant<|channel|>commentary to=functions.birds_caw",
        "birds_caw commentary",
        "functions.birds_caw:0",
        "default_api.birds_caw",
        "default_api:birds_caw",
        "tools.birds_caw",
        "functions/birds_caw",
        "Functions::birds_caw",
        "birds_caw()",
        "print(default_api.birds_caw())",
        "<tool_call>birds_caw",
        "<tool_call>\nbirds_caw\n</tool_call>",
        "<function=birds_caw>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>birds_caw",
        "[TOOL_CALLS]birds_caw",
        'birds_caw{"why": "birds_sing"}',
        " birds_caw\n",
        '"birds_caw"',
        "`birds_caw`",
        "birds.caw",
        "birds/caw",
        "functions.birds.caw<|channel|>commentary",
        "birds_caw…",
        "birds_caw\x00",
    ],
)
async def test_tool_is_called_if_its_name_is_inside_an_illegal_one(name: str) -> None:
    result, sent, kept = await call(name, make_server("caw", "sing", "channel", server="birds"))
    assert (result, sent, kept) == ("I am caw", "birds_caw", name)


@pytest.mark.parametrize(
    "name",
    [
        *("fly.away", "x" * 65, "x" * 100_000, "поиск", "\N{BIRD}", " ", ".", "<|channel|>"),
        *("functions.", "functions.fly", "git.birds_caw", "birds_cawing<|channel|>", "birds_cawé"),
    ],
)
async def test_illegal_name_of_no_tool_is_answered_and_sent_as_a_legal_one(name: str) -> None:
    result, sent, kept = await call(name, make_server("caw"))
    assert result.startswith("There is no tool ")
    assert result.endswith(". The tools are: birds_caw.")
    assert len(result) < 500
    assert LEGAL.fullmatch(sent)
    assert (sent != "birds_caw", kept) == (True, name)


async def test_call_without_a_name_is_answered() -> None:
    result, sent, kept = await call("", make_server("caw"))
    assert result.startswith("There is no tool ''.")
    assert LEGAL.fullmatch(sent)
    assert kept == ""


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("birds_a.b", "a.b"),
        ("birds_a/b", "a/b"),
        ("birds.a/b", "a/b"),
        ("a/b", "a/b"),
        ("functions.a/b<|channel|>commentary", "a/b"),
        ("birds_поиск", "поиск"),
        ("functions.поиск", "поиск"),
        ("birds_café<|channel|>", "café"),
        ("birds_cafè", "cafè"),
    ],
)
async def test_name_that_a_server_gives_to_its_tool_means_that_tool(name: str, tool: str) -> None:
    result, sent, _ = await call(name, make_server("a.b", "a/b", "a", "поиск", "слово", "café", "cafè"))
    assert result == f"I am {tool}"
    assert LEGAL.fullmatch(sent)


@pytest.mark.parametrize("name", ["birds_a:b", "birds a b", "birds_cafê", "a.c"])
async def test_illegal_name_that_fits_two_tools_calls_neither(name: str) -> None:
    servers = make_server("a.b", "a/b", "café", "cafè", "a.c"), make_server("a.c", server="bats")
    result, sent, _ = await call(name, *servers)
    assert result.startswith(f"There is no tool {name!r}.")
    assert LEGAL.fullmatch(sent)


async def test_endpoint_that_checks_names_accepts_every_later_request() -> None:
    name = "functions.birds_caw<|channel|>commentary"

    def answer(request: dict[str, Any]) -> Reply | Failure:
        uses = [use for message in request["messages"] for use in message.get("tool_calls", ())]
        if not all(LEGAL.fullmatch(use["function"]["name"]) for use in uses):
            return Failure(400, {"error": {"message": "Invalid 'messages[2].tool_calls[0].function.name'"}})
        if request["messages"][-1]["role"] == "tool":
            return Reply("Done.")
        return Reply(tool_calls=[Use(name=name, arguments={}), Use(name="fly.away", arguments={})])

    async with (
        ScriptedServer(answer) as server,
        connect(Crow(ChatModel(name="strict", base_url=server.url), servers=[make_server("caw")])) as editor,
    ):
        session = await editor.new_session("/")
        for _ in range(3):
            assert (await editor.prompt(session.session_id, "go")).stop_reason == "end_turn"
        requests = server.requests
    assert len(requests) == 6
    for before, after in pairwise(requests):
        assert after["messages"][: len(before["messages"])] == before["messages"]


async def test_rules_are_applied_to_the_tool_that_is_called() -> None:
    names = ["functions.birds_caw<|channel|>commentary", "birds.caw", "birds_sing()"]
    model = ScriptedModel([Reply(tool_calls=[Use(name=name, arguments={}) for name in names]), Reply("Done.")])
    crow = Crow(model, servers=[make_server("caw", "sing")])
    crow.use(permissions, mode="yolo", deny=["birds_caw"])
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    results = [message["content"] for message in model.requests[1]["messages"] if message["role"] == "tool"]
    assert ["the rule 'birds_caw' says deny" in result for result in results] == [True, True, False]
    assert [call.name for call in editor.of(schema.ToolCall)] == ["birds_caw", "birds_caw", "birds_sing"]


async def test_name_inside_a_call_of_the_proxy_tool_may_be_illegal_too() -> None:
    arguments: dict[str, Any] = {"name": "functions.birds_caw<|channel|>commentary", "arguments": {}}
    calls = [Use(name=name, arguments=arguments) for name in ("call_tool", "functions.call_tool<|channel|>commentary")]
    model = ScriptedModel([Reply(tool_calls=calls), Reply("Done.")])
    crow = Crow(model, servers=[make_server("caw", "sing")])
    crow.use(tool_search, above=1)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    reply, *results = model.requests[1]["messages"][-3:]
    assert [result["content"] for result in results] == ["I am caw"] * 2
    assert [use["function"]["name"] for use in reply["tool_calls"]] == ["call_tool"] * 2


async def test_loaded_session_shows_and_sends_the_same_names_as_before() -> None:
    names = ["functions.birds_caw<|channel|>commentary", "fly.away", "birds_caw"]
    model = ScriptedModel(
        [Reply(tool_calls=[Use(name=name, arguments={}) for name in names]), Reply("Done."), Reply("Again.")]
    )
    crow = Crow(model, servers=[make_server("caw")])
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        (open_session,) = crow.sessions.values()
        log = open_session.log
        live = [call.name for call in editor.of(schema.ToolCall)]
    later = Crow(model, servers=[make_server("caw")])
    later.store = MemoryStore(Record("stored", [*log]))
    async with connect(later) as editor:
        await editor.request("session/load", LoadSessionRequest(session_id="stored", cwd="/", mcp_servers=[]))
        assert [call.name for call in editor.of(schema.ToolCall)] == live == ["birds_caw", "fly.away", "birds_caw"]
        await editor.prompt("stored", "again")
    assert model.requests[2]["messages"][1 : len(model.requests[1]["messages"])] == model.requests[1]["messages"][1:]


@settings(deadline=None)
@given(st.lists(st.text(max_size=80) | st.text("ab_.<", max_size=5), max_size=5, unique=True))
def test_request_made_from_any_names_has_legal_ones_and_different_names_stay_different(names: list[str]) -> None:
    uses: list[Any] = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for n, name in enumerate(names)
    ]
    log: list[Message] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "So:", "tool_calls": uses},
    ]
    _, reply, *results = view(log)
    sent = [use["function"]["name"] for use in reply.get("tool_calls", [])]
    assert all(LEGAL.fullmatch(name) for name in sent)
    assert len(set(sent)) == len(names)
    assert [result.get("tool_call_id") for result in results] == [use["id"] for use in uses]
    assert view(log) == View(log).messages()
    assert all(name in sent for name in names if LEGAL.fullmatch(name))
