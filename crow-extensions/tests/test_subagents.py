"""Sub-agents: a task in a session of its own, which the client sees through its parent."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import crow_mcp_server
import pytest
from crow_core.acp import schema
from crow_core.acp.schema import McpServer, ToolCallUpdate
from crow_core.app import Crow
from crow_core.content import replay
from crow_core.errors import ModelError
from crow_core.mcp.server import Server
from crow_core.models.model_call import ModelCall
from crow_core.session.session import Session
from crow_core.testing import Reply, ScriptedModel, connect
from crow_core.testing.script import play_in_order
from crow_extensions.budgets import budgets
from crow_extensions.commands import commands
from crow_extensions.loop_guard import loop_guard
from crow_extensions.plan import plan
from crow_extensions.shell_hooks import ShellHook, shell_hooks
from crow_extensions.sub_agent import REPORT
from crow_extensions.subagents import subagents
from crow_extensions.usage import usage
from crow_permissions.extension import permissions
from fastmcp import FastMCP
from msgspec import UNSET

pytestmark = pytest.mark.anyio

COUNT = """
from itertools import count
from fastmcp import FastMCP

server, numbers = FastMCP("mine"), count(1)
server.tool(lambda: next(numbers), name="count")
server.run(show_banner=False)
"""


def box() -> Server:
    server = FastMCP("box")

    @server.tool
    def look(at: str) -> str:
        return f"empty: {at}"

    return Server("box", lambda: server, shared=True)


def call(tool: str, id: str = "", /, **arguments: Any) -> Reply:
    return Reply(tool_calls=[{"name": tool, "arguments": arguments, **({"id": id} if id else {})}])


def task(id: str = "one", **more: Any) -> Reply:
    return call("agent", id, **{"description": "Look", "prompt": "Look into a.", **more})


def is_child(request: dict[str, Any]) -> bool:
    return request["messages"][1]["content"].endswith(REPORT)


def make_model(parent: Sequence[Reply], child: Sequence[Reply], name: str = "scripted") -> ScriptedModel:
    """Make a model that plays a script for the parent and another for the sub-agent."""
    ours, theirs = play_in_order(parent), play_in_order(child)
    return ScriptedModel(lambda request: theirs(request) if is_child(request) else ours(request), name)


def requests(model: ScriptedModel, *, child: bool) -> list[dict[str, Any]]:
    return [request for request in model.requests if is_child(request) == child]


def tools(request: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in request.get("tools", [])]


async def test_a_sub_agent_works_in_its_own_session_and_returns_a_report():
    model = make_model(
        [task(), Reply("It is empty.")],
        [Reply("Hm.", tool_calls=call("box_look", "one", at="a").tool_calls), Reply("Empty!")],
    )
    crow = Crow(model, servers=[box()]).use(permissions).use(plan).use(subagents)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "What is in a?")
        assert list(crow.sessions) == [session.session_id]
    first, *_ = requests(model, child=True)
    assert [message["content"] for message in first["messages"][1:]] == ["Look into a." + REPORT]
    (before, _) = requests(model, child=False)
    assert tools(before) == ["plan", "agent", "box_look"]
    assert first["tools"] == before["tools"], "a server has its beginning in the cache"
    assert first["messages"][0] == before["messages"][0]
    assert model.requests[-1]["messages"][-1]["content"] == "Empty!"
    assert editor.text == "It is empty."


async def test_a_sub_agent_has_the_beginning_of_its_parents_requests_although_the_files_have_changed():
    model = make_model([task(), Reply("Done.")], [Reply("Empty.")])
    texts = iter(["Be brief.", "Be long."])
    crow = Crow(model, servers=[box()]).use(subagents)
    crow.instructions(lambda session: next(texts))
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    parent, child, _ = model.requests
    assert "Be brief." in parent["messages"][0]["content"]
    assert (child["tools"], child["messages"][0]) == (parent["tools"], parent["messages"][0])


async def test_a_sub_agent_is_refused_what_is_its_parents():
    steps = {"entries": [{"content": "Look", "status": "pending"}]}
    model = make_model([task(), Reply("Done.")], [call("agent", prompt="x"), call("plan", **steps), Reply("Empty.")])
    crow = Crow(model, servers=[box()]).use(permissions).use(plan).use(subagents)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    told = [message["content"] for message in requests(model, child=True)[-1]["messages"] if message["role"] == "tool"]
    assert told == [
        "You are a sub-agent, which starts no other. Do it yourself.",
        "You are a sub-agent: the plan that the user sees is that of the agent which gave you the task. Go on without.",
    ]
    assert not editor.questions


async def test_a_tool_that_a_sub_agent_was_not_given_is_refused_without_asking_the_user():
    two = FastMCP("box")
    two.tool(lambda: "x", name="look")
    two.tool(lambda: "x", name="open")
    model = make_model(
        [task(tools=["box_l*", "terminal"]), Reply("Done.")], [call("box_open"), call("box_look"), Reply("Empty.")]
    )
    crow = Crow(model, servers=[Server("box", lambda: two, shared=True)]).use(permissions).use(subagents)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    first, *_, last = requests(model, child=True)
    assert first["tools"] == model.requests[0]["tools"]
    assert "Use only these of your tools: box_l*, terminal." in first["messages"][1]["content"]
    told = [message["content"] for message in last["messages"] if message["role"] == "tool"]
    assert told == ["You were not given the tool 'box_open'. Do without it.", "x"]
    assert len(editor.questions) == 1


async def test_the_title_of_a_sub_agents_task_is_shown_again_by_a_load():
    crow = Crow(make_model([task(), Reply("It is empty.")], [Reply("Empty!")])).use(subagents)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "What is in a?")
        shown = [u for u in replay(crow.sessions[session.session_id].log, "/") if isinstance(u, ToolCallUpdate)]
    assert [update.title for update in shown] == ["Look"]


async def test_its_tool_calls_appear_below_the_call_and_its_questions_come_from_the_parent():
    model = make_model([task(), Reply("Done.")], [call("box_look", "one", at="a"), Reply("x" * 900)])
    async with connect(Crow(model, servers=[box()]).use(permissions).use(subagents)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert [start.tool_call_id for start in editor.of(schema.ToolCall)] == ["one", "one/one"]
    assert [update.title for update in editor.of(ToolCallUpdate)[:2]] == [UNSET, "Look"]
    assert {id: states[-1] for id, states in editor.calls().items()} == {"one": "completed", "one/one": "completed"}
    (question,) = editor.questions
    assert (question.session_id, question.tool_call.tool_call_id) == (session.session_id, "one/one")
    progress = [update for update in editor.of(ToolCallUpdate) if update.tool_call_id == "one" and update.content]
    assert len(progress) >= 3


async def test_an_answer_for_the_session_holds_for_parent_and_sub_agent():
    model = make_model([task(), call("box_look", at="b"), Reply("Done.")], [call("box_look", at="a"), Reply("Empty.")])
    crow = Crow(model, servers=[box()]).use(permissions).use(subagents)
    async with connect(crow, permit="allow_always") as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert len(editor.questions) == 1


async def test_cancelling_the_turn_ends_the_sub_agent():
    started = asyncio.Event()

    def script(request: dict[str, Any]) -> Reply:
        if is_child(request):
            started.set()
            return Reply("Wait", hang=True)
        return task() if request["messages"][-1]["content"] == "go" else Reply("Next.")

    crow = Crow(ScriptedModel(script)).use(subagents)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await started.wait()
        await editor.cancel(session.session_id)
        assert (await turn).stop_reason == "cancelled"
        assert list(crow.sessions) == [session.session_id]
        await editor.prompt(session.session_id, "go on")
    assert editor.text == "Next."
    assert editor.calls()["one"][-1] == "failed"


async def test_several_sub_agents_run_in_parallel():
    both = Reply(tool_calls=[*task("one").tool_calls, *task("two", prompt="Look into b.").tool_calls])
    here = asyncio.Barrier(2)

    async def script(request: dict[str, Any]) -> Reply:
        if is_child(request):
            await here.wait()
            return Reply(request["messages"][1]["content"].removesuffix(REPORT))
        return both if request["messages"][-1]["role"] == "user" else Reply("Done.")

    model = ScriptedModel(script)
    async with connect(Crow(model).use(subagents)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    told = [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    assert told == ["Look into a.", "Look into b."]


async def test_a_sub_agent_can_have_another_model_and_fewer_tools():
    large = make_model([task(model="small", tools=["box_l*", "terminal"]), Reply("Done.")], [], "large-70b")
    small = make_model([], [call("agent"), call("box_open"), Reply("No.")], "small-1b")
    two = FastMCP("box")
    two.tool(lambda: "x", name="look")
    two.tool(lambda: "x", name="open")
    crow = Crow({"large": large, "small": small}, servers=[Server("box", lambda: two, shared=True)]).use(subagents)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert tools(small.requests[0]) == ["box_look"]
    told = [message["content"] for message in small.requests[-1]["messages"] if message["role"] == "tool"]
    assert told[0] == "You were not given the tool 'agent'. Do without it."
    assert told[1] == "You were not given the tool 'box_open'. Do without it."


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (
            call("agent", description="x"),
            "No agent was started: give a prompt, or the name of an agent that there is (none yet).",
        ),
        (task(model="huge"), "There is no model 'huge'. Choose one of: scripted."),
        (
            task(sandbox="read-only"),
            "No agent was started: there are no permissions here, so nothing would keep it from changing files.",
        ),
    ],
)
async def test_a_wrong_call_is_answered_with_what_to_do(reply: Reply, says: str):
    model = make_model([reply, Reply("Done.")], [])
    async with connect(Crow(model).use(subagents)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert model.requests[-1]["messages"][-1]["content"] == says


async def test_a_sub_agent_that_fails_is_a_failed_tool_call():
    model = make_model([task(), Reply("Done.")], [Reply(error=ModelError("The endpoint is gone."))])
    async with connect(Crow(model).use(subagents)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert model.requests[-1]["messages"][-1]["content"].startswith("The agent failed: The endpoint is gone.")
    assert editor.calls()["one"][-1] == "failed"


async def test_a_sub_agent_that_reaches_the_request_limit_returns_its_last_text():
    model = make_model([task(), Reply("Done.")], [Reply("Again.", tool_calls=call("box_look", at="a").tool_calls)] * 5)
    async with connect(Crow(model, servers=[box()], max_requests=5).use(subagents)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    told = model.requests[-1]["messages"][-1]["content"]
    assert told == "The agent did not come to its end (max_turn_requests). Its last words:\n\n" + "Again." * 5


async def test_a_sub_agent_that_the_user_stops_reports_it():
    model = make_model([task(), Reply("Done.")], [call("box_look", at="a")] * 5)
    async with connect(Crow(model, servers=[box()]).use(subagents).use(loop_guard), permit="reject_once") as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    told = model.requests[-1]["messages"][-1]["content"]
    assert told.startswith("crow ended the turn. The model called box_look 3 times")
    assert editor.calls()["one"][-1] == "failed"


async def test_a_task_that_begins_with_a_slash_is_no_command():
    model = make_model([task(prompt="/help"), Reply("Done.")], [Reply("Helped.")])
    async with connect(Crow(model).use(commands).use(subagents)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert model.requests[-1]["messages"][-1]["content"] == "Helped."


async def test_notices_of_a_sub_agent_are_shown_by_its_parent():
    crow = Crow(make_model([task(), Reply("Done.")], [Reply("Empty.")])).use(subagents)

    @crow.after_model
    async def warn(session: Session, model_call: ModelCall) -> None:
        if len(crow.sessions) > 1:
            await session.notice("It is late.", "warning")

    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert editor.thoughts == "It is late.\n"


async def test_a_sub_agent_uses_the_servers_of_the_client_and_leaves_them_running(tmp_path: Path):
    file = tmp_path / "count.py"
    file.write_text(COUNT)
    model = make_model(
        [call("mine_count", "a"), task(), call("mine_count", "b"), Reply("Done.")], [call("mine_count"), Reply("Two.")]
    )
    brought = McpServer(name="mine", command=sys.executable, args=[str(file)], env=[])
    crow = Crow(model).use(subagents)
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path), [brought])
        await asyncio.gather(*(server.list() for server in crow.sessions[session.session_id].toolbox.client_servers))
        await editor.prompt(session.session_id, "go")
    told = [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    assert (told[0], told[-1]) == ("1", "3")


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_commands_of_a_sub_agent_start_in_the_current_folder_of_its_parent(tmp_path: Path):
    (tmp_path / "below").mkdir()
    tools = Server("crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True)
    model = make_model(
        [call("terminal", "a", command="cd below"), task(), Reply("Done.")],
        [call("terminal", "b", command="pwd"), Reply("There.")],
    )
    async with connect(Crow(model, servers=[tools]).use(permissions, mode="yolo").use(subagents)) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    pwd = requests(model, child=True)[-1]["messages"][-1]["content"]
    assert str(tmp_path / "below") in pwd


async def test_a_sub_agent_shares_the_budget_of_its_parent():
    model = make_model([task(), Reply("Done.")], [call("box_look", at="a")] * 5)
    crow = Crow(model, servers=[box()]).use(subagents).use(budgets, requests=3)
    async with connect(crow, permit="reject_once") as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "go")
    assert answer.stop_reason == "max_turn_requests"
    assert len(model.requests) == 3
    assert len(editor.questions) == 1


async def test_sub_agents_at_once_make_no_more_requests_than_the_budget_has():
    uses: Any = [
        {"name": "agent", "arguments": {"description": "Look", "prompt": "Look."}, "id": f"{n}"} for n in range(6)
    ]
    model = make_model([Reply(tool_calls=uses), Reply("Done.")], [call("box_look", at="a")] * 50)
    crow = Crow(model, servers=[box()]).use(subagents).use(budgets, requests=4)
    async with connect(crow, permit="reject_once") as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert len(model.requests) == 4
    assert len(editor.questions) == 1


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_shell_hooks_run_for_tool_calls_of_a_sub_agent_but_not_for_its_turn(tmp_path: Path):
    model = make_model([task(), Reply("Done.")], [call("box_look", at="a"), Reply("Empty.")])
    write = [ShellHook(command="cat >> log; echo >> log")]
    crow = Crow(model, servers=[box()]).use(shell_hooks, before_tool=write, turn_end=write).use(subagents)
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    lines = (tmp_path / "log").read_text().splitlines()
    assert ["agent" in line or "box_look" in line for line in lines] == [True, True, False]


async def test_usage_of_a_sub_agent_counts_for_its_parent():
    model = make_model([task(), Reply("Done.")], [Reply("Empty.")])
    async with connect(Crow(model).use(commands).use(usage).use(subagents)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        await editor.prompt(session.session_id, "/usage")
    assert "3 model calls" in editor.text
