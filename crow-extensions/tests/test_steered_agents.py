"""Sub-agents by name: listed, told something, sent to the background, stopped, and asked again with all they know."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import CloseSessionRequest, LoadSessionRequest
from crow_core.acp.shared_methods import BACKGROUND_METHOD
from crow_core.app import Crow
from crow_core.testing import MemoryStore, Reply, ScriptedModel, connect
from crow_core.testing.editor import Editor
from crow_core.testing.script import ScriptedCall as Use
from crow_core.testing.script import play_in_order
from crow_extensions.background import background
from crow_extensions.commands import commands
from crow_extensions.steering import STEERING, steering
from crow_extensions.sub_agent import REPORT
from crow_extensions.subagents import subagents
from crow_testing.waiting_tool import WaitingTool

pytestmark = pytest.mark.anyio


def agent(name: str = "", prompt: str = "", **more: Any) -> Use:
    return Use(name="agent", arguments={"description": "Look", "name": name, "prompt": prompt, **more})


def calls(*uses: Use) -> Reply:
    return Reply(tool_calls=[*uses])


WORK = calls(Use(name="box_work", arguments={}))


def make_crow(
    parent: Sequence[Reply], child: Sequence[Reply], box: WaitingTool | None = None
) -> tuple[Crow, ScriptedModel]:
    """Make an app whose model plays a script for the parent and another for all sub-agents."""
    ours, theirs = play_in_order(parent), play_in_order(child)
    model = ScriptedModel(lambda request: theirs(request) if is_child(request) else ours(request))
    crow = Crow(model, servers=[box.server] if box else [])
    for extension in (commands, steering, background, subagents):
        crow.use(extension)
    return crow, model


def is_child(request: dict[str, Any]) -> bool:
    return str(request["messages"][1]["content"]).endswith(REPORT)


def told(model: ScriptedModel, *, child: bool = False) -> list[str]:
    """What the last request of the parent, or of a sub-agent, says after the system prompt."""
    last = [request for request in model.requests if is_child(request) == child][-1]
    return [str(message["content"]) for message in last["messages"][1:]]


async def ask(editor: Editor, session: str, **params: Any) -> dict[str, Any]:
    return await editor.request(BACKGROUND_METHOD, {"sessionId": session, **params})


@pytest.mark.parametrize("stored", [True, False])
async def test_the_model_goes_on_with_an_agent_that_keeps_its_context(stored: bool):
    parent = [calls(agent("looker", "Look into a.")), calls(agent("looker", "And b?")), Reply("Both.")]
    crow, model = make_crow(parent, [Reply("a is empty."), Reply("b too.")])
    crow.store = MemoryStore() if stored else None
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        await editor.prompt(session, "go")
        assert told(model, child=True) == ["Look into a." + REPORT, "a is empty.", "And b?"]
        assert told(model)[-1] == "b too."
        (about,) = (await ask(editor, session))["work"]
        assert (about["name"], about["kind"], about["state"], about["end"]) == ("looker", "agent", "ended", "finished")


async def test_an_agent_goes_on_after_the_session_was_closed_and_opened_again():
    parent = [calls(agent("looker", "Look into a.", tools=["box_*"])), Reply("a."), calls(agent("looker", "And b?"))]
    crow, model = make_crow([*parent, Reply("b.")], [Reply("a is empty."), Reply("b too.")])
    crow.store = MemoryStore()
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        await editor.prompt(session, "go")
        await editor.request("session/close", CloseSessionRequest(session_id=session))
        await editor.request("session/load", LoadSessionRequest(session_id=session, cwd="/"))
        await editor.prompt(session, "and b?")
        assert told(model, child=True)[-2:] == ["a is empty.", "And b?"]
        assert told(model)[-1] == "b too."
        assert crow.sessions[session].log.entries


async def test_the_users_words_reach_an_agent_that_runs():
    box = WaitingTool("box")
    crow, model = make_crow([calls(agent("looker", "Look.")), Reply("Done.")], [WORK, Reply("Seen.")], box)
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(session, "go"))
        await box.started.wait()
        telling = asyncio.ensure_future(ask(editor, session, action="tell", name="looker", text="Also look at c."))
        await asyncio.sleep(0)
        box.go_on.set()
        assert (await telling)["said"] == "looker has your words."
        await turn
        assert told(model, child=True)[-1] == "Also look at c."


async def test_words_that_a_stopped_agent_has_not_read_are_an_error():
    box = WaitingTool("box")
    crow, _ = make_crow([calls(agent("looker", "Look.")), Reply("Without.")], [WORK], box)
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(session, "go"))
        await box.started.wait()
        telling = asyncio.ensure_future(ask(editor, session, action="tell", name="looker", text="Also look at c."))
        (child,) = (one for id, one in crow.sessions.items() if id != session)
        while not child.state[STEERING].waiting:
            await asyncio.sleep(0)
        await ask(editor, session, action="stop", name="looker")
        with pytest.raises(RpcError) as failure:
            await telling
        assert failure.value.details == "looker ends without your words."
        await turn


async def test_an_agent_goes_to_the_background_and_its_report_is_fetched_by_its_name():
    box = WaitingTool("box")
    parent = [calls(agent("", "Look.")), Reply("Later."), calls(agent("agent-1")), Reply("I know.")]
    crow, model = make_crow(parent, [WORK, Reply("Seen.")], box)
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(session, "go"))
        await box.started.wait()
        await ask(editor, session, action="send")
        await turn
        assert told(model)[-1].startswith("[the agent goes on in the background")
        assert [each["state"] for each in (await ask(editor, session))["work"]] == ["running"]
        box.go_on.set()
        await editor.until(lambda editor: "In the background, Look has ended (finished)." in editor.thoughts)
        await editor.prompt(session, "and?")
        assert 'Call agent with the name "agent-1"' in model.requests[-2]["messages"][-1]["content"]
        assert told(model)[-1] == "Seen."


async def test_a_stopped_agent_reports_its_last_words_and_the_turn_goes_on():
    box = WaitingTool("box")
    crow, model = make_crow([calls(agent("looker", "Look.")), Reply("Without.")], [WORK], box)
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(session, "go"))
        await box.started.wait()
        assert (await ask(editor, session, action="stop", name="looker"))["said"] == "Stopped: Look."
        assert (await turn).stop_reason == "end_turn"
        assert told(model)[-1].startswith("The user stopped this agent.")
        assert list(crow.sessions) == [session]


async def test_an_agent_that_has_ended_goes_on_with_the_users_words_in_the_background():
    parent = [calls(agent("looker", "Look into a.")), Reply("a."), Reply("I see.")]
    crow, model = make_crow(parent, [Reply("a is empty."), Reply("b too.")])
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        await editor.prompt(session, "go")
        await editor.prompt(session, "/background looker And b?")
        assert "looker goes on with your words, in the background." in editor.text
        await editor.until(lambda editor: "has ended (finished)" in editor.thoughts)
        await editor.prompt(session, "/background")
        assert "- `looker` Look (finished): b too." in editor.text
        await editor.prompt(session, "and?")
        assert 'Call agent with the name "looker"' in told(model)[-1]


async def test_two_new_agents_of_one_name_are_not_mixed_up():
    box = WaitingTool("box")
    parent = [calls(agent("looker", "Look."), agent("looker", "Look elsewhere.")), Reply("Done.")]
    crow, model = make_crow(parent, [WORK, Reply("Seen.")], box)
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        box.go_on.set()
        await editor.prompt(session, "go")
        first, second = told(model)[-2:]
        assert first == "Seen."
        assert second == "No agent was started: the agent 'looker' works for another call. Choose another name."


async def test_an_agent_in_the_background_ends_with_its_session():
    box = WaitingTool("box")
    crow, _ = make_crow([calls(agent("looker", "Look.")), Reply("Later.")], [WORK], box)
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(session, "go"))
        await box.started.wait()
        await ask(editor, session, action="send")
        await turn
        await editor.request("session/close", CloseSessionRequest(session_id=session))
        assert not crow.sessions
        assert "Stopped with the session: Look." in editor.thoughts


async def test_a_cancelled_turn_ends_the_agent_it_waits_for_but_not_one_in_the_background():
    box = WaitingTool("box")
    parent = [calls(agent("one", "Look.")), calls(agent("two", "Look."))]
    crow, _ = make_crow(parent, [WORK, WORK], box)
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(session, "go"))
        await box.started.wait()
        box.started.clear()
        await ask(editor, session, action="send")
        await box.started.wait()
        await editor.cancel(session)
        assert (await turn).stop_reason == "cancelled"
        states = {each["name"]: each["end"] for each in (await ask(editor, session))["work"]}
        assert states == {"one": "", "two": "stopped"}


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (agent("two words", "x"), "No agent was started: 'two words' is no name for one. Use a word, such as 'tests'."),
        (agent("stop", "x"), "No agent was started: 'stop' is no name for one. Use a word, such as 'tests'."),
        (agent("ghost"), "No agent was started: give a prompt, or the name of an agent that there is (none yet)."),
    ],
)
async def test_a_wrong_name_is_answered_with_what_to_do(use: Use, says: str):
    crow, model = make_crow([calls(use), Reply("Done.")], [])
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        await editor.prompt(session, "go")
        assert told(model)[-1] == says


async def test_words_for_nobody_and_no_words_are_errors_for_a_client():
    crow, _ = make_crow([calls(agent("looker", "Look.")), Reply("Done.")], [Reply("Seen.")])
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        await editor.prompt(session, "go")
        for params, sentence in (
            ({"name": "ghost", "text": "x"}, "Nothing in the background has the name 'ghost'. There are: looker."),
            ({"name": "looker"}, "There are no words for 'looker'."),
        ):
            with pytest.raises(RpcError) as failure:
                await ask(editor, session, action="tell", **params)
            assert failure.value.details == sentence
