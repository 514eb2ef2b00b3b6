"""Agents inside programs."""

import asyncio
import threading
from base64 import b64encode
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from crow_agent import (
    Agent,
    AgentClosed,
    AgentError,
    AgentSession,
    Budget,
    BudgetSpent,
    OutputError,
    PromptTimeout,
    Result,
    TurnStopped,
    tool,
)
from crow_core.acp.schema import AgentMessageChunk, RequestPermissionRequest, SessionUpdate
from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import to_parts
from crow_core.session.session import Session
from crow_core.testing import Reply, ScriptedCall
from crow_extensions.steering import STEERING
from crow_testing.clock import advance_clock
from fastmcp.utilities.types import Image
from pydantic import BaseModel, Field

Make = Callable[..., Agent]


def call(name: str, arguments: dict[str, Any]) -> ScriptedCall:
    return {"name": name, "arguments": arguments}


@tool
async def population(city: Annotated[str, "the city's name"]) -> int:
    """Say how many people live in a city."""
    return {"Rome": 2_750_000}[city]


@tool
def poll() -> str:
    """Look whether the job is done."""
    return "pending"


@tool(repeats=True)
def poll_on() -> str:
    """Look whether the job is done."""
    return "pending"


def test_turn_that_the_loop_guard_ends_has_a_field_and_an_error_of_its_own(make_agent: Make) -> None:
    async def main() -> None:
        asked = [Reply(tool_calls=[call("poll", {})])] * 9
        async with make_agent(*asked, tools=[poll]) as agent:
            result = await agent.prompt("Wait.")
        assert (result.stop_reason, result.stopped_by, result.text) == ("max_turn_requests", "repeated_calls", "")
        assert isinstance(result.error, TurnStopped)
        assert str(result.error).startswith("crow ended the turn")
        with pytest.raises(TurnStopped, match="The model called poll 3 times"):
            _ = result.output

    asyncio.run(main())


def test_tool_that_is_declared_to_poll_may_give_the_same_each_time(make_agent: Make) -> None:
    async def main() -> None:
        asked = [Reply(tool_calls=[call("poll_on", {})])] * 9
        async with make_agent(*asked, Reply("Still pending."), tools=[poll_on]) as agent:
            result = await agent.prompt("Wait.")
        assert (result.stop_reason, result.stopped_by, result.output) == ("end_turn", "", "Still pending.")

    asyncio.run(main())


async def start(session: AgentSession) -> "asyncio.Task[Result[Any]]":
    """Start a turn; return its task when the model has begun to answer."""
    began = asyncio.Event()

    def look(update: SessionUpdate) -> None:
        if isinstance(update, AgentMessageChunk):
            began.set()

    turn = asyncio.ensure_future(session.prompt("Go.", on_update=look))
    await began.wait()
    return turn


def test_prompt_returns_text_and_stop_reason(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(Reply("Four.")) as agent:
            result = await agent.prompt("2 + 2?")
        assert (result.text, result.output, result.stop_reason) == ("Four.", "Four.", "end_turn")
        assert result.usage is not None
        assert "Four." in result._repr_markdown_()

    asyncio.run(main())


def test_function_is_called_as_a_tool_without_a_question(make_agent: Make) -> None:
    async def main() -> None:
        asked = call("population", {"city": "Rome"})
        async with make_agent(Reply(tool_calls=[asked]), Reply("2,750,000"), tools=[population]) as agent:
            result = await agent.prompt("How many people live in Rome?")
        assert result.text == "2,750,000"
        (done,) = result.tool_calls
        assert (done.name, done.status, done.raw_input) == ("population", "completed", {"city": "Rome"})
        assert not result.denied
        (schema,) = agent.model.requests[0]["tools"]
        assert schema["function"]["description"] == "Say how many people live in a city."
        assert schema["function"]["parameters"]["properties"] == {
            "city": {"type": "string", "description": "the city's name"}
        }
        assert agent.model.requests[1]["messages"][-1]["content"] == "2750000"

    asyncio.run(main())


def test_function_that_asks_needs_a_permission(make_agent: Make) -> None:
    @tool(ask=True)
    def erase(name: str) -> str:
        """Erase something."""
        return f"{name} is gone"

    asked: list[RequestPermissionRequest] = []

    def permit(question: RequestPermissionRequest) -> bool:
        asked.append(question)
        return question.tool_call.raw_input == {"name": "a"}

    async def main() -> None:
        script = [Reply(tool_calls=[call("erase", {"name": name})]) for name in ("a", "b")]
        async with make_agent(*script, Reply("Done."), tools=[erase], permissions=permit) as agent:
            result = await agent.prompt("Erase a and b.")
        assert [call.status for call in result.tool_calls] == ["completed", "failed"]
        assert [call.raw_input for call in result.denied] == [{"name": "b"}]
        assert len(asked) == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ("use the archive instead", "the user rejected it: use the archive instead."),
        ("two\nlines \x1b[31m", "the user rejected it: two\nlines"),
        ("  \n", "the user rejected it."),
        ("", "the user rejected it."),
        (False, "the user rejected it."),
        (None, "the user rejected it."),
        ("reject", "the user rejected it."),
        ("x" * 10_000, "the user rejected it: " + "x" * 2_000 + "."),
    ],
)
def test_model_reads_why_a_permission_function_rejects_a_call(make_agent: Make, answer: Any, read: str) -> None:
    async def permit(question: RequestPermissionRequest) -> Any:
        return answer

    async def main() -> None:
        asked = Reply(tool_calls=[call("terminal", {"command": "rm x"})])
        async with make_agent(asked, Reply("No."), permissions=permit) as agent:
            result = await agent.prompt("Remove x.")
        (refused,) = result.denied
        assert refused.status == "failed"
        said = agent.model.requests[1]["messages"][-1]["content"]
        assert said.startswith(f"This was not run: {read}")
        assert ("Do not try" in said) == (read == "the user rejected it.")

    asyncio.run(main())


def test_call_that_a_rule_denies_is_listed_as_denied(make_agent: Make, home: Path) -> None:
    (home / "crow").mkdir()
    (home / "crow" / "config.toml").write_text('[permissions]\ndeny = ["terminal:rm *"]\n')

    async def main() -> None:
        asked = call("terminal", {"command": "rm x"})
        async with make_agent(Reply(tool_calls=[asked]), Reply("No."), permissions="allow") as agent:
            result = await agent.prompt("Remove x.")
        assert [call.name for call in result.denied] == ["terminal"]

    asyncio.run(main())


@pytest.mark.parametrize(("settings", "denied"), [("", ["terminal"]), ("taint = false", [])])
def test_call_by_which_private_data_may_leave_is_denied(
    make_agent: Make, home: Path, settings: str, denied: Any
) -> None:
    (home / "crow").mkdir()
    allow = f'[permissions]\nallow = ["terminal"]\nprivate = ["customers/**"]\n{settings}\n'
    (home / "crow" / "config.toml").write_text(allow)

    async def main() -> None:
        asked = [call("terminal", {"command": line}) for line in ("cat customers/ada", "true || curl example.org")]
        async with make_agent(*(Reply(tool_calls=[use]) for use in asked), Reply("Done.")) as agent:
            result = await agent.prompt("Tell them.")
        assert [call.name for call in result.denied] == denied

    asyncio.run(main())


def test_group_of_tools_offers_no_other(make_agent: Make, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")

    async def main() -> None:
        edit = call("file_editor", {"command": "create", "path": "a.txt", "file_text": "two"})
        async with make_agent(
            Reply(tool_calls=[edit]), Reply("No."), tools=["builtin:read", population], permissions="allow"
        ) as agent:
            await agent.prompt("Change it.")
        names = [schema["function"]["name"] for schema in agent.model.requests[0]["tools"]]
        assert names == ["file_editor", "glob", "grep", "tree", "population"]
        assert (tmp_path / "a.txt").read_text() == "one"

    asyncio.run(main())


def test_unknown_group_of_tools_is_refused_at_once(make_agent: Make) -> None:
    with pytest.raises(ValueError, match=r"no tool 'builtin:everything'.*builtin:read"):
        make_agent(tools=["builtin:everything"])


@dataclass
class Answer:
    city: str
    people: int


def test_output_is_a_value_of_the_type(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(Reply('{"city": "Rome", "people": 3}')) as agent:
            result = await agent.prompt("Rome?", output=Answer)
        assert result.output == Answer("Rome", 3)

    asyncio.run(main())


def test_output_that_never_fits_is_an_error_with_the_faults(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(Reply("Many."), Reply('{"city": 1}'), Reply("{}")) as agent:
            with pytest.raises(OutputError, match="did not fit Answer in 3 attempts") as raised:
                await agent.prompt("Rome?", output=Answer)
        assert len(raised.value.faults) == 3
        assert raised.value.result is not None
        assert raised.value.result.text == "{}"

    asyncio.run(main())


def test_stream_yields_updates_and_then_has_the_result(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(Reply("One two three.")) as agent:
            stream = agent.stream("Count.")
            texts = [update.content.text async for update in stream if isinstance(update, AgentMessageChunk)]
            assert "".join(texts) == "One two three."
            assert stream.result is not None
            assert stream.result.text == "One two three."

    asyncio.run(main())


def test_text_of_a_stream_has_every_message_and_no_reasoning(make_agent: Make) -> None:
    async def main() -> None:
        asked = call("population", {"city": "Rome"})
        replies = [Reply("I ask.", "Hm.", [asked]), Reply("2,750,000 people.")]
        async with make_agent(*replies, tools=[population]) as agent:
            stream = agent.stream("How many people live in Rome?")
            pieces = [text async for text in stream.text()]
        assert "".join(pieces) == "I ask.\n\n2,750,000 people."
        assert len(pieces) > 2
        assert stream.result is not None
        assert stream.result.text == "2,750,000 people."

    asyncio.run(main())


def test_leaving_the_text_of_a_stream_cancels_its_turn(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(Reply("One two", hang=True), Reply("Next.")) as agent:
            session = await agent.session()
            async with aclosing(session.stream("Go.").text()) as pieces:
                async for _ in pieces:
                    break
            assert (await session.prompt("More.")).text == "Next."

    asyncio.run(main())


def test_session_goes_on_and_is_resumed_by_id(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(Reply("Rome."), Reply("Paris."), Reply("Both.")) as agent:
            session = await agent.session()
            await session.prompt("Where?")
            await session.prompt("And then?")
            await session.close()
            again = await agent.session(session.id)
            result = await again.prompt("What did I ask?")
        assert (result.text, result.session_id) == ("Both.", session.id)
        roles = [message["role"] for message in agent.model.requests[-1]["messages"]]
        assert roles == ["system", "user", "assistant", "user", "assistant", "user"]

    asyncio.run(main())


def test_fork_leaves_the_first_session_as_it_is(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(Reply("Rome."), Reply("Forked."), Reply("First.")) as agent:
            first = await agent.session()
            await first.prompt("Where?")
            second = await first.fork()
            assert second.id != first.id
            assert (await second.prompt("b")).text == "Forked."
            assert (await first.prompt("c")).text == "First."
        contents = [message["content"] for message in agent.model.requests[-1]["messages"][1:]]
        assert "b" not in contents

    asyncio.run(main())


def test_results_of_many_sessions_do_not_mix(make_agent: Make) -> None:
    def answer(request: Any) -> Reply:
        return Reply(request["messages"][-1]["content"].upper())

    async def main() -> None:
        async with make_agent(answer, store=False) as agent:
            results = await agent.map([f"word {n}" for n in range(60)], at_once=20)
        assert [result.output for result in results] == [f"WORD {n}" for n in range(60)]

    asyncio.run(main())


def test_error_stays_with_its_item(make_agent: Make) -> None:
    def answer(request: Any) -> Reply:
        return Reply("5" if "good" in request["messages"][1]["content"] else "no number")

    async def main() -> None:
        async with make_agent(answer) as agent:
            results = await agent.map(["good", "bad", "good"], output=int, retries=1)
        assert [result.error is None for result in results] == [True, False, True]
        assert results[2].output == 5
        with pytest.raises(OutputError):
            _ = results[1].output

    asyncio.run(main())


def test_prompt_that_takes_too_long_is_cancelled(make_agent: Make) -> None:
    @tool
    async def wait() -> str:
        """Wait for ever."""
        advance_clock(300)
        await asyncio.Event().wait()
        return "never"

    async def main() -> None:
        async with make_agent(Reply(tool_calls=[call("wait", {})]), Reply("Next."), tools=[wait]) as agent:
            session = await agent.session()
            with pytest.raises(PromptTimeout) as raised:
                await session.prompt("Wait.", timeout=300)
            assert raised.value.result is not None
            assert [call.name for call in raised.value.result.tool_calls] == ["wait"]
            assert (await session.prompt("Go on.")).text == "Next."

    asyncio.run(main())


def test_budget_ends_the_turn_and_refuses_the_next(make_agent: Make) -> None:
    async def main() -> None:
        again = Reply(tool_calls=[call("population", {"city": "Rome"})])
        async with make_agent(again, again, again, tools=[population], budget=Budget(requests=2)) as agent:
            with pytest.raises(BudgetSpent, match="2 of 2 requests") as raised:
                await agent.prompt("Count.")
            assert raised.value.result is not None
            assert len(raised.value.result.tool_calls) == 2
            with pytest.raises(BudgetSpent):
                await agent.prompt("Again.")
        assert len(agent.model.requests) == 2

    asyncio.run(main())


def test_words_do_not_prolong_a_turn_whose_budget_is_used_up(make_agent: Make) -> None:
    apps: list[Crow] = []

    @tool
    async def listen() -> str:
        """Wait for the words of the user."""
        (open_session,) = apps[-1].sessions.values()
        steers.append(asyncio.ensure_future(session.steer("Rather in blue.")))
        while not open_session.state[STEERING].waiting:
            await asyncio.sleep(0)
        return "heard"

    steers: list[asyncio.Task[bool]] = []

    async def main() -> None:
        nonlocal session
        listening, budget = Reply(tool_calls=[call("listen", {})]), Budget(requests=1)
        async with make_agent(listening, tools=[listen], budget=budget, extensions=[apps.append]) as agent:
            session = await agent.session()
            with pytest.raises(BudgetSpent):
                await session.prompt("Go.")
            taken = await steers[0]
            (open_session,) = apps[-1].sessions.values()
            assert (taken, "Rather in blue." in str(open_session.log.entries)) == (True, True), (
                "the next prompt has them"
            )
        assert len(agent.model.requests) == 1

    session: Any = None
    asyncio.run(main())


def test_call_that_an_extension_refuses_is_not_asked_about(make_agent: Make) -> None:
    asked: list[RequestPermissionRequest] = []

    def permit(question: RequestPermissionRequest) -> bool:
        asked.append(question)
        return True

    def quiet(crow: Crow) -> None:
        @crow.before_tool
        def refuse(session: Session, tool_call: ToolCall) -> ToolResult | None:
            return ToolResult.error("Not today.")

    async def main() -> None:
        uses = [call("terminal", {"command": "touch ran"})]
        async with make_agent(Reply(tool_calls=uses), Reply("No."), permissions=permit, extensions=[quiet]) as agent:
            result = await agent.prompt("Go.")
        assert (result.text, asked) == ("No.", [])

    asyncio.run(main())


def test_error_of_a_permission_function_is_raised_by_the_prompt(make_agent: Make) -> None:
    def fail(question: RequestPermissionRequest) -> bool:
        raise LookupError("no such rule")

    async def main() -> None:
        asked = call("terminal", {"command": "make"})
        async with make_agent(Reply(tool_calls=[asked]), Reply("Never."), permissions=fail) as agent:
            with pytest.raises(LookupError, match="no such rule"):
                await agent.prompt("Make it.")

    asyncio.run(main())


def test_error_of_a_tool_is_for_the_model(make_agent: Make) -> None:
    async def main() -> None:
        asked = call("population", {"city": "Atlantis"})
        async with make_agent(Reply(tool_calls=[asked]), Reply("Unknown."), tools=[population]) as agent:
            result = await agent.prompt("Atlantis?")
        assert result.text == "Unknown."
        assert result.tool_calls[0].status == "failed"
        assert "Atlantis" in agent.model.requests[1]["messages"][-1]["content"]

    asyncio.run(main())


def test_closed_agent_and_closed_session_say_so(make_agent: Make) -> None:
    async def main() -> None:
        agent = make_agent(Reply("One."))
        session = await agent.session()
        await session.close()
        with pytest.raises(AgentClosed, match="Open it again"):
            await session.prompt("More.")
        await agent.close()
        with pytest.raises(AgentClosed, match="Make another one"):
            await agent.prompt("More.")

    asyncio.run(main())


def test_agent_of_another_event_loop_says_so(make_agent: Make) -> None:
    agent = make_agent(Reply("One."), Reply("Two."))

    async def use() -> None:
        await agent.prompt("Go.")

    async def main() -> None:
        await agent.open()
        with pytest.raises(AgentError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(use()))
        await agent.close()

    asyncio.run(main())


def test_no_model_is_said_in_a_sentence(home: Path) -> None:
    async def main() -> None:
        env = {"HOME": str(home), "CROW_HOME": str(home), "OPENAI_API_KEY": "x"}
        with pytest.raises(AgentError, match="no model is named"):
            await Agent(env=env).prompt("Hello")

    asyncio.run(main())


def test_function_without_types_or_with_a_name_given_twice_is_refused_at_once(make_agent: Make) -> None:
    def untyped(x) -> str:  # pyright: ignore
        return x

    with pytest.raises(TypeError, match="give its parameter 'x' a type"):
        make_agent(tools=[untyped])
    with pytest.raises(ValueError, match="Two tools are called 'population'"):
        make_agent(tools=[population, population])


def test_tool_that_takes_too_long_is_answered_with_that(make_agent: Make) -> None:
    @tool(timeout=0.1)
    async def wait() -> str:
        """Wait for ever."""
        await asyncio.Event().wait()
        return "never"

    async def main() -> None:
        asked = call("wait", {})
        async with make_agent(Reply(tool_calls=[asked]), Reply("It hangs."), tools=[wait]) as agent:
            result = await agent.prompt("Wait.")
        assert (result.text, result.tool_calls[0].status) == ("It hangs.", "failed")

    asyncio.run(main())


def test_plain_function_does_not_hold_up_the_event_loop(make_agent: Make) -> None:
    entered, leave = threading.Event(), threading.Event()

    @tool
    def block() -> str:
        """Wait for another thread."""
        entered.set()
        leave.wait(30)
        return "left"

    async def main() -> None:
        async with make_agent(Reply(tool_calls=[call("block", {})]), Reply("Done."), tools=[block]) as agent:
            turn = asyncio.ensure_future(agent.prompt("Go."))
            while not entered.is_set():
                await asyncio.sleep(0.01)
            leave.set()  # only a running event loop gets here
            assert (await turn).text == "Done."

    asyncio.run(main())


def test_types_that_only_pydantic_knows_are_tool_parameters(make_agent: Make) -> None:
    class Place(BaseModel):
        name: str = Field(description="its name")

    def visit(place: Place, times: int = 1) -> str:
        """Visit a place."""
        return f"{place.name} {times}"

    async def main() -> None:
        asked = call("visit", {"place": {"name": "Rome"}})
        async with make_agent(Reply(tool_calls=[asked]), Reply("Done."), tools=[visit]) as agent:
            await agent.prompt("Go.")
        assert agent.model.requests[1]["messages"][-1]["content"] == "Rome 1"

    asyncio.run(main())


def test_prompts_running_when_the_agent_closes_say_so(make_agent: Make) -> None:
    async def main() -> None:
        agent = make_agent(Reply("One", hang=True))
        session = await agent.session()
        turn = await start(session)
        await agent.close()
        with pytest.raises(AgentClosed):
            await turn

    asyncio.run(main())


def test_cancelled_task_cancels_the_turn_and_the_session_goes_on(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(Reply("One", hang=True), Reply("Two.")) as agent:
            session = await agent.session()
            turn = await start(session)
            turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turn
            assert (await session.prompt("More.")).text == "Two."

    asyncio.run(main())


def test_words_during_a_prompt_are_in_the_next_model_call(make_agent: Make) -> None:
    async def main() -> None:
        joined: list[asyncio.Task[bool]] = []

        def extension(crow: Crow) -> None:
            @crow.before_tool
            async def wait_for_words(session: Session, tool_call: ToolCall) -> None:
                joined.append(asyncio.ensure_future(opened.steer("Only the left side.")))
                while not session.state[STEERING].waiting:
                    await asyncio.sleep(0)

        @tool(reads=True)
        async def look() -> str:
            """Look around."""
            return "a room"

        replies = [Reply(tool_calls=[call("look", {})]), Reply("A door.")]
        async with make_agent(*replies, tools=[look], extensions=[extension]) as agent:
            opened = await agent.session()
            assert (await opened.prompt("Look.")).text == "A door."
            assert await joined[0]
            assert agent.model.requests[-1]["messages"][-1]["content"] == "Only the left side."
            assert not await opened.steer("Too late.")

    asyncio.run(main())


def test_leaving_a_stream_early_cancels_its_turn(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(Reply("One two", hang=True), Reply("Next.")) as agent:
            session = await agent.session()
            async with aclosing(aiter(session.stream("Go."))) as updates:
                async for update in updates:
                    if isinstance(update, AgentMessageChunk):
                        break
            assert (await session.prompt("More.")).text == "Next."

    asyncio.run(main())


def test_image_and_file_are_sent_with_the_prompt(make_agent: Make, tmp_path: Path) -> None:
    image = b"\x89PNG\r\n\x1a\n" + bytes(20)
    (tmp_path / "notes.md").write_text("remember the milk")

    async def main() -> None:
        async with make_agent(Reply("Seen.")) as agent:
            await agent.prompt(["What is this?", image, tmp_path / "notes.md"])
            parts = agent.model.requests[0]["messages"][1]["content"]
            assert [part["type"] for part in parts] == ["text", "image_url", "text"]
            assert "remember the milk" in parts[2]["text"]
            with pytest.raises(AgentError, match=r"gone\.txt cannot be read"):
                await agent.prompt(tmp_path / "gone.txt")

    asyncio.run(main())


def test_image_of_a_tool_reaches_the_model(make_agent: Make) -> None:
    pixels = b"\x89PNG\r\n\x1a\n" + bytes(20)

    @tool
    def look() -> list[Any]:
        """Take a picture."""
        return ["A crow.", Image(data=pixels, format="png")]

    async def main() -> None:
        async with make_agent(Reply(tool_calls=[call("look", {})]), Reply("Seen."), tools=[look]) as agent:
            await agent.prompt("Look.")
            sent = [part for message in agent.model.requests[-1]["messages"] for part in to_parts(message["content"])]
        urls = [part["image_url"]["url"] for part in sent if part["type"] == "image_url"]
        assert urls == [f"data:image/png;base64,{b64encode(pixels).decode()}"]
        assert any("A crow." in part.get("text", "") for part in sent)

    asyncio.run(main())


def test_question_of_a_tool_is_answered_by_the_program(make_agent: Make) -> None:
    async def main() -> None:
        asked = call("ask_user", {"question": "Which colour?", "choices": ["red", "blue"]})
        async with make_agent(
            Reply(tool_calls=[asked]), Reply("Blue it is."), elicit=lambda form: {"answer": "blue"}
        ) as agent:
            await agent.prompt("Paint it.")
        assert "blue" in agent.model.requests[1]["messages"][-1]["content"]

    asyncio.run(main())


@pytest.mark.anyio
async def test_stream_is_awaited_or_read_once_and_shows_itself_outside_of_a_notebook(
    make_agent: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async with make_agent(Reply("Four."), Reply("Five.")) as agent:
        stream = agent.stream("2 + 2?")
        stream._ipython_display_()
        result = await stream
        assert (result.text, await stream) == ("Four.", result)
        with pytest.raises(AgentError, match="was read already"):
            _ = [update async for update in stream]
        assert repr(stream) == "<PromptStream, ended>"
    assert capsys.readouterr().out == "<PromptStream, not started>\n"


@pytest.mark.anyio
async def test_cancelled_await_of_a_stream_cancels_its_turn(make_agent: Any) -> None:
    def answer(request: Any) -> Reply:
        return Reply("Four", hang="2 + 2?" in request["messages"][-1]["content"])

    async with make_agent(answer) as agent, await agent.session() as session:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await session.stream("2 + 2?")
        assert (await session.stream("And?")).text == "Four"
