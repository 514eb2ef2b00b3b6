"""MCP servers that sessions and agents of one process share, and those that they do not."""

import asyncio
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crow_agent import Agent, Result
from crow_core.acp.schema import CreateElicitationRequest
from crow_core.mcp.shared_servers import SHARED
from crow_core.testing import Reply
from crow_testing.process_states import is_alive
from fastmcp import FastMCP

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc"),
]
RAW = Path(__file__).parent / "raw_server.py"


class Servers:
    """The processes of the server that agents are given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    @property
    def command(self) -> dict[str, Any]:
        return {"command": sys.executable, "args": [str(RAW), str(self.folder)]}

    @property
    def started(self) -> list[str]:
        return [path.stem for path in self.folder.glob("*.pid")]

    @property
    def alive(self) -> list[str]:
        return [pid for pid in self.started if is_alive(int(pid))]

    async def until(self, name: str) -> None:
        async with asyncio.timeout(60):
            while not (self.folder / name).exists():
                await asyncio.sleep(0.01)


@pytest.fixture
def raw(tmp_path: Path) -> Servers:
    return Servers(tmp_path / "servers")


def act(request: Any) -> Reply:
    """Call the tools that the prompt names, one in each reply: `pid`, `ask {"message": "?"}`."""
    prompt = next(entry["content"] for entry in reversed(request["messages"]) if entry["role"] == "user")
    at = max(n for n, entry in enumerate(request["messages"]) if entry["role"] == "user")
    results = [entry["content"] for entry in request["messages"][at:] if entry["role"] == "tool"]
    lines = prompt.splitlines()
    if len(results) == len(lines):
        return Reply("\n".join(results))
    name, _, arguments = lines[len(results)].partition(" ")
    return Reply(tool_calls=[{"name": f"raw_{name}", "arguments": json.loads(arguments or "{}")}])


Make = Callable[..., Agent]


@pytest.fixture
def make(make_agent: Make, raw: Servers) -> Make:
    def make(**options: Any) -> Agent:
        return make_agent(act, **{"mcp_servers": {"raw": raw.command}, "permissions": "allow", "tools": [], **options})

    return make


async def test_sessions_of_an_agent_and_equal_agents_share_a_server_until_the_last_has_closed(
    make: Make, raw: Servers
) -> None:
    async with make() as one, make() as two:
        first, second, third = await one.session(), await one.session(), await two.session()
        pids = {(await session.prompt("pid")).text for session in (first, second, third)}
        assert pids == {*raw.alive}
        assert len(pids) == 1
        await first.close()
        await one.close()
        assert {(await third.prompt("pid")).text} == pids
    assert not raw.alive
    assert len(raw.started) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"mcp_servers": {"raw": {"env": {"COLOUR": "red"}}}},
        {"mcp_servers": {"raw": {"trust": True}}},
        {"mcp_servers": {"raw": {"shared": False}}},
        {"cwd": "elsewhere"},
    ],
)
async def test_agents_whose_servers_differ_do_not_share_them(
    make: Make, raw: Servers, tmp_path: Path, other: dict[str, Any]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    if "cwd" in other:
        options: dict[str, Any] = {"cwd": tmp_path / "elsewhere"}
    else:
        options = {"mcp_servers": {"raw": {**raw.command, **other["mcp_servers"]["raw"]}}}
    async with make() as one, make(**options) as two, await one.session() as first, await two.session() as second:
        assert (await first.prompt("pid")).text != (await second.prompt("pid")).text


async def test_configured_server_is_shared_by_prompts_at_once(make_agent: Make, raw: Servers, home: Path) -> None:
    (home / "crow").mkdir()
    command, (script, folder) = raw.command["command"], raw.command["args"]
    table = f'[mcp.servers.raw]\ncommand = "{command}"\nargs = ["{script}", "{folder}"]\n'
    (home / "crow" / "config.toml").write_text(table)
    async with make_agent(act, permissions="allow", store=False) as agent, await agent.session():
        results = await agent.map(["pid"] * 20, at_once=20)
    assert {result.text for result in results} == {*raw.started}
    assert len(raw.started) == 1


async def test_server_that_dies_is_started_once_for_all_its_sessions(make: Make, raw: Servers) -> None:
    async with make() as agent:
        sessions = [await agent.session() for _ in range(3)]
        calls = [asyncio.ensure_future(session.prompt("hold\npid")) for session in sessions[:2]]
        await raw.until("held-2")
        killer = await sessions[2].prompt("die\npid")
        results = [await call for call in calls] + [killer]
    assert all("the connection to its server broke" in result.text.splitlines()[0] for result in results)
    assert len({result.text.splitlines()[1] for result in results}) == 1
    assert len(raw.started) == 2


async def test_cancelled_call_of_one_session_does_not_end_the_call_of_another(make: Make, raw: Servers) -> None:
    async with make() as agent:
        one, two = await agent.session(), await agent.session()
        calls = [asyncio.ensure_future(session.prompt("hold")) for session in (one, two)]
        await raw.until("held-2")
        await one.cancel()
        assert (await calls[0]).stop_reason == "cancelled"
        await (await agent.session()).prompt("release")
        assert (await calls[1]).text == "released"


async def test_changed_tools_reach_all_sessions(make: Make) -> None:
    async with make() as agent:
        one, two = await agent.session(), await agent.session()
        assert "no tool" in (await two.prompt("new")).text
        await one.prompt("change")
        for session in (one, two):
            assert "no tool" not in (await session.prompt("new")).text


async def test_roots_are_known_while_calls_of_several_sessions_run(make: Make, raw: Servers, tmp_path: Path) -> None:
    async with make() as agent:
        one, two = await agent.session(), await agent.session()
        call = asyncio.ensure_future(one.prompt("hold"))
        await raw.until("held-1")
        assert tmp_path.as_uri() in (await two.prompt("roots")).text
        await two.prompt("release")
        await call


def paint(colours: dict[str, str]) -> Callable[[CreateElicitationRequest], dict[str, str]]:
    """Answer with the colour of the session."""
    return lambda request: {"colour": colours[str(request.session_id)]}


async def test_forms_of_calls_at_once_reach_their_own_sessions(make: Make, raw: Servers) -> None:
    colours: dict[str, str] = {}
    async with make(elicit=paint(colours)) as agent:
        sessions = [await agent.session() for _ in range(4)]
        names = ["red", "green", "blue", "black"]
        colours |= {session.id: name for session, name in zip(sessions, names, strict=True)}
        results = await asyncio.gather(*(session.prompt('ask {"message": "Which?"}') for session in sessions))
    assert [json.loads(result.text)["content"]["colour"] for result in results] == [*colours.values()]


def choose(questions: list[str]) -> Callable[[Any], bool]:
    def permit(question: Any) -> bool:
        questions.append(question.session_id)
        return True

    return permit


async def test_server_of_2026_is_shared_where_users_fill_in_forms(make: Make, tmp_path: Path) -> None:
    """Its questions come with the calls that they belong to."""
    (tmp_path / "painter.py").write_text(PAINTER)
    colours: dict[str, str] = {}
    server = {"command": sys.executable, "args": [str(tmp_path / "painter.py")]}
    async with make(elicit=paint(colours), mcp_servers={"raw": server}) as agent, await agent.session() as first:
        pid = (await first.prompt("pid")).text
        sessions = [await agent.session() for _ in range(3)]
        colours |= {session.id: f"colour-{n}" for n, session in enumerate(sessions)}
        results = await asyncio.gather(*(session.prompt("ask\npid") for session in sessions))
    assert [result.text.splitlines() for result in results] == [[colour, pid] for colour in colours.values()]


PAINTER = """
import os
import mcp_types as mcp
from fastmcp import Context, FastMCP

server = FastMCP("painter")
FORM = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}


@server.tool
async def ask(context: Context):
    if not context.input_responses:
        params = {"mode": "form", "message": "Which?", "requestedSchema": FORM}
        request = mcp.ElicitRequest.model_validate({"method": "elicitation/create", "params": params})
        return mcp.InputRequiredResult(input_requests={"one": request})
    return context.input_responses["one"].content["colour"]


@server.tool
def pid() -> str:
    return str(os.getpid())


server.run(show_banner=False)
"""


async def test_question_waits_until_it_is_clear_which_session_it_is_for(make: Make, raw: Servers) -> None:
    """Sessions of a client without forms share a server whose questions do not name their call."""
    asked: list[str] = []
    async with make(permissions=choose(asked)) as agent:
        one, two, three = [await agent.session() for _ in range(3)]
        holding = asyncio.ensure_future(one.prompt("hold"))
        await raw.until("held-1")
        asking = asyncio.ensure_future(two.prompt('ask {"message": "Which?"}'))
        async with asyncio.timeout(60):
            while not any(server.calls.asks for servers in SHARED.values() for server in servers.values()):
                await asyncio.sleep(0.01)
        asked.clear()
        later = asyncio.ensure_future(three.prompt("pid"))
        async with await agent.session() as other:
            pid = (await other.prompt("pid")).text
            assert len(raw.alive) == 2, "it has a server of its own"
        async with await agent.session() as another:
            assert (await another.prompt("pid")).text not in ("", pid), "and so has each further session"
        asked[:] = [id for id in asked if id not in (other.id, another.id)]
        assert two.id not in asked
        await one.cancel()
        assert json.loads((await asking).text)["content"] == {"colour": "red"}
        assert sorted(asked) == sorted([two.id, three.id])
        assert (await later).text not in ("", pid)
        await holding


async def test_long_answer_is_in_the_folder_of_its_session(make: Make) -> None:
    async with make() as agent:
        one, two = await agent.session(), await agent.session()
        await two.prompt("pid")
        assert "bytes left out; the whole is in" in (await one.prompt("long")).text


async def test_object_of_fastmcp_is_a_server(make_agent: Make) -> None:
    server = FastMCP("birds")
    server.tool(lambda: "caw", name="sing")

    def sing(request: Any) -> Reply:
        last = request["messages"][-1]
        return (
            Reply(last["content"])
            if last["role"] == "tool"
            else Reply(tool_calls=[{"name": "raw_sing", "arguments": {}}])
        )

    async with make_agent(sing, mcp_servers={"raw": server}, permissions="allow") as agent:
        assert (await agent.prompt("Sing.")).text == "caw"


@pytest.mark.parametrize(("server", "words"), [("", "the command is empty"), ({"command": 3}, "Expected `str`")])
def test_server_that_cannot_be_used_is_named(server: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"The MCP server 'birds' cannot be used: {words}"):
        Agent(mcp_servers={"birds": server})


def find_servers() -> list[FastMCP]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, FastMCP)]


async def test_built_in_tools_and_functions_of_equal_agents_share_a_server(make_agent: Make, tmp_path: Path) -> None:
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    def work(request: Any) -> Reply:
        _, *rest = [entry["content"] for entry in request["messages"][1:]]
        uses = [
            {"name": "terminal", "arguments": {"command": "pwd; cat a.txt"}},
            {"name": "add", "arguments": {"a": 1, "b": 2}},
        ]
        answers = [entry for entry in rest if entry]
        return Reply(tool_calls=[uses[len(answers)]]) if len(answers) < 2 else Reply("\n".join(answers))

    agents: list[Agent] = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "a.txt").write_text(f"I am {name}")
        agents.append(make_agent(work, tools=[add, "builtin"], cwd=folder, permissions="allow"))
    one, two = agents
    before = {id(server) for server in find_servers()}
    async with two:
        async with one:
            results: list[Result[str]] = await asyncio.gather(*(agent.prompt("Go.") for agent in agents))
            texts = [result.text for result in results]
            assert sorted(server.name for server in find_servers() if id(server) not in before) == ["crow", "functions"]
        assert "I am two" in (await two.prompt("Go.")).text
    for name, text in zip(("one", "two"), texts, strict=True):
        assert f"I am {name}" in text
        assert str(tmp_path / name) in text
        assert text.endswith("3")
