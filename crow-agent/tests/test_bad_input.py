"""Wrong arguments of programs, and functions that misbehave: one sentence each, and nothing hangs."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import crow_agent
import pytest
from crow_agent import Agent, AgentClosed, AgentError, Budget, BudgetSpent, OutputError, tool
from crow_agent.result import to_result
from crow_core.acp.record import TurnRecord
from crow_core.acp.schema import ToolCall
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.testing import Failure, Reply, ScriptedServer

Make = Callable[..., Agent]
pytestmark = pytest.mark.anyio


@dataclass
class City:
    name: str
    people: int


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def terminal(command: str) -> str:
    """Run a command on the ship."""
    return f"ran {command}"


@tool(name="read_output")
def read(id: str) -> str:
    """Read what the ship printed."""
    return id


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": "builtin:read"}, r"tools is a list: \['builtin:read'\]"),
        ({"tools": [None]}, "None cannot be a tool. Give a Python function"),
        ({"tools": [partial(add, b=1)]}, "it has no name. Write a function"),
        ({"tools": [terminal, "builtin:terminal"]}, "crow has a tool 'terminal' of its own"),
        ({"tools": ["builtin", terminal]}, "crow has a tool 'terminal' of its own"),
        ({"permissions": "alow"}, "permissions is 'allow', 'deny' or a function, not 'alow'"),
        ({"mcp_servers": ["npx birds"]}, "mcp_servers is a dict"),
        ({"mcp_servers": {"birds": 3}}, "The MCP server 'birds' cannot be used: 3 is no command"),
        ({"mcp_servers": {"birds": {"comand": "birds"}}}, "neither command nor url"),
    ],
)
def test_wrong_argument_of_an_agent_is_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        Agent(**options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt": None}, "None cannot be part of a prompt. Give a text"),
        ({"prompt": ["Hi", 3]}, "3 cannot be part of a prompt"),
        (
            {"prompt": "Hi", "output": City("Rome", 1)},
            r"City\(.*\) cannot be the type of an output: it is no type\. Give a pydantic",
        ),
        ({"prompt": "Hi", "output": add}, "cannot be the type of an output"),
        ({"prompt": "Hi", "output": "City"}, "'City' cannot be the type of an output"),
        ({"prompt": "Hi", "output": City, "retries": -1}, "retries is -1"),
    ],
)
async def test_wrong_argument_of_a_prompt_is_a_sentence(make_agent: Make, arguments: Any, words: str) -> None:
    async with make_agent(Reply("Hello.")) as agent:
        with pytest.raises((TypeError, ValueError), match=words):
            await agent.prompt(**arguments)


@pytest.mark.parametrize("name", ["größe", "look up", "x" * 65])
def test_name_that_no_provider_takes_is_refused_at_the_definition(name: str) -> None:
    with pytest.raises(TypeError, match="cannot be the name of a tool"):
        tool(name=name)(add)


async def test_function_with_the_name_of_an_extensions_tool_is_refused(make_agent: Make) -> None:
    async with make_agent(Reply("Hello."), tools=[terminal]) as agent:  # without crow's own, the name is free
        assert (await agent.prompt("Hi")).text == "Hello."

    def add_server(crow: Crow) -> None:
        definition = {"name": "read_output", "inputSchema": {"type": "object"}}
        crow.servers.append(Server("ship", None, definitions=[definition], built_in=True))

    async with make_agent(Reply("Hello."), tools=[read], extensions=[add_server]) as agent:
        with pytest.raises(AgentError, match=r"Two tools have the name 'read_output' \(of functions and ship\)"):
            await agent.prompt("Hi")


async def test_other_wrong_arguments(make_agent: Make) -> None:
    with pytest.raises(AgentError, match=r"There is no mode 'yol'. Give one of: ask, accept-edits, plan, yolo"):
        await make_agent(mode="yol").prompt("Hi")
    with pytest.raises(ValueError, match="The limit of money is -1"):
        Budget(money=-1)
    with pytest.raises(ValueError, match=r"not the address of an agent. Give one with ws://"):
        Agent.connect("ftp://localhost:8000")
    async with make_agent() as agent:
        with pytest.raises(TypeError, match="map takes a list of prompts"):
            await agent.map("abc")


async def test_budget_of_nothing_is_spent_before_the_first_request(make_agent: Make) -> None:
    async with make_agent(budget=Budget(money=0)) as agent:
        with pytest.raises(BudgetSpent, match="0 of 0 money"):
            await agent.prompt("Hi")


async def test_error_of_a_result_that_never_fits_is_for_a_person(make_agent: Make) -> None:
    given = Reply(tool_calls=[{"name": "give_result", "arguments": {"name": "Rome"}}])
    async with make_agent(lambda request: given) as agent:
        with pytest.raises(OutputError) as caught:
            await agent.prompt("Hi", output=City)
    assert str(caught.value) == (
        "The answer did not fit City in 3 attempts: the result: 'people' is a required property"
    )


async def test_closed_session_says_so_whatever_it_is_asked_for(make_agent: Make) -> None:
    async with make_agent() as agent:
        session = await agent.session()
        await session.close()
        for attempt in (session.prompt("Hi"), session.fork(), session.set_mode("plan"), session.set_option("a", "b")):
            with pytest.raises(AgentClosed, match=r"is closed. Open it again"):
                await attempt


async def test_sessions_that_are_not_stored_cannot_be_opened_again(make_agent: Make) -> None:
    async with make_agent(store=False) as agent:
        with pytest.raises(AgentError, match=r"it stores none \(store=False\)"):
            await agent.session("some-id")


def leave() -> int:
    """Leave."""
    raise SystemExit(3)


async def leave_later() -> int:
    """Leave."""
    raise SystemExit("bye")


async def give_up() -> int:
    """Give up."""
    raise asyncio.CancelledError


def give_up_at_once() -> int:
    """Give up."""
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (leave, "it wanted to exit with 3"),
        (leave_later, "it wanted to exit with 'bye'"),
        (give_up, "what it waited for was cancelled"),
        (give_up_at_once, "what it waited for was cancelled"),
    ],
)
async def test_function_that_would_end_the_program_is_an_error_for_the_model(
    make_agent: Make, function: Any, words: str
) -> None:
    def act(request: Any) -> Reply:
        last = request["messages"][-1]
        use = {"name": "act", "arguments": {}}
        return Reply(last["content"]) if last["role"] == "tool" else Reply(tool_calls=[use])  # pyright: ignore

    async with make_agent(act, tools=[tool(name="act")(function)]) as agent:
        assert words in (await agent.prompt("Go.")).text


async def test_warning_is_logged_once_for_all_sessions(make_agent: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "crow_agent")
    async with make_agent(Reply("One."), Reply("Two."), mcp_servers={"birds": "no-such-birds"}) as agent:
        await agent.map(["1", "2"])
    (record,) = [record for record in caplog.records if record.name == "crow_agent"]
    assert "MCP server 'birds' did not start: the command 'no-such-birds' was not found" in record.message


def test_public_names_are_listed_and_imported_by_a_star() -> None:
    names: dict[str, Any] = {}
    exec("from crow_agent import *", names)
    assert {"Agent", "Budget", "tool", "sync", "OutputError"} <= names.keys() & {*dir(crow_agent)}


NOISE = """
import asyncio, sys
from crow_agent import Agent, tool
from crow_core.models.chat_model import ChatModel
from fastmcp import FastMCP

birds = FastMCP("birds")

@birds.tool
def find(name: str) -> str:
    raise LookupError(name)

@tool
def fail(city: str) -> str:
    "Fail."
    raise KeyError(city)

@tool
async def hang(city: str) -> str:
    "Hang, and fail when cancelled."
    begun.set()
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise RuntimeError("stopped") from None

async def main():
    agent = Agent(ChatModel(name="m", base_url=sys.argv[1]), tools=[fail, hang], mcp_servers={"birds": birds})
    async with agent:
        print([call.status for call in (await agent.prompt("Go.")).tool_calls])
        turn = asyncio.ensure_future(agent.prompt("Hang."))
        await begun.wait()
        turn.cancel()
        await asyncio.wait([turn])

begun = asyncio.Event()

asyncio.run(main())
"""


async def test_failing_tools_and_retries_leave_no_log_lines_of_libraries(home: Path) -> None:
    """A tool's error is for the model, and crow itself warns of a retry."""
    calls: Any = [
        {"name": "fail", "arguments": {"city": "Rome"}},
        {"name": "birds_find", "arguments": {"name": "Kea"}},
    ]
    hang: Any = [{"name": "hang", "arguments": {"city": "Rome"}}]
    busy = Failure(429, {"error": {"message": "Slow down."}}, {"Retry-After": "0"})
    script = [busy, Reply(tool_calls=calls), Reply("Done."), Reply(tool_calls=hang)]
    async with ScriptedServer(script) as server:
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "CROW_HOME": str(home / "crow"), "OPENAI_API_KEY": "k"}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", NOISE, server.url), env=env, cwd=home, stdout=-1, stderr=-1
        )
        out, errors = await process.communicate()
    assert out.decode().splitlines() == ["['failed', 'failed']"]
    (warning,) = errors.decode().splitlines()
    assert warning.endswith(
        "is limiting requests (429): Slow down. Wait a little, or choose another model. Asking again now."
    )


class Connection:
    """A class that no model can write."""


def ask_database(connection: Connection) -> str:
    """Ask."""
    return ""


def ask_databases(connections: list[Connection]) -> str:
    """Ask."""
    return ""


@pytest.mark.parametrize(("function", "kind"), [(ask_database, "Connection"), (ask_databases, "list")])
def test_parameter_of_an_unknown_class_is_one_sentence(function: Any, kind: str) -> None:
    with pytest.raises(TypeError) as raised:
        tool(function)
    assert f"{function.__name__} cannot be a tool: a model cannot write its parameter 'connection" in str(raised.value)
    assert kind in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__


def test_tool_calls_of_other_agents_have_a_name_that_is_text() -> None:
    record = TurnRecord()
    record.add(ToolCall(tool_call_id="1", title="Reading"))
    (call,) = to_result(record, "s", cost_before=None).tool_calls
    assert (call.name, call.title) == ("", "Reading")
