"""Agents in code that is not async."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crow_agent import Agent, AgentClosed, AgentError, PromptTimeout, sync, tool
from crow_core.acp.schema import AgentMessageChunk
from crow_core.testing import Reply

Make = Callable[..., Agent]


def echo(request: Any) -> Reply:
    return Reply(request["messages"][-1]["content"].upper())


def test_prompt_map_and_session_wait_for_their_results(make_agent: Make) -> None:
    with sync(make_agent(echo)) as agent:
        assert agent.prompt("one").text == "ONE"
        assert [result.text for result in agent.map(["two", "three"])] == ["TWO", "THREE"]
        with agent.session() as session:
            assert session.prompt("four").text == "FOUR"
            assert session.fork().prompt("five").text == "FIVE"
        assert agent.session(session.id).prompt("six").session_id == session.id
    assert "crow-agent" not in {thread.name for thread in threading.enumerate()}


def test_stream_is_an_ordinary_iterator(make_agent: Make) -> None:
    with sync(make_agent(Reply("One two three."))) as agent:
        stream = agent.stream("Count.")
        texts = [update.content.text for update in stream if isinstance(update, AgentMessageChunk)]
        assert "".join(texts) == "One two three."
        assert stream.result
        assert stream.result.text == "One two three."


def test_text_of_a_stream_is_an_ordinary_iterator(make_agent: Make) -> None:
    with sync(make_agent(Reply("One two three.", "Hm."))) as agent:
        stream = agent.stream("Count.")
        assert "".join(stream.text()) == "One two three."
        assert stream.result


def test_leaving_a_stream_early_cancels_the_turn(make_agent: Make) -> None:
    with sync(make_agent(Reply("One two three four."), Reply("Next."))) as agent, agent.session() as session:
        for update in session.stream("Count."):
            if isinstance(update, AgentMessageChunk):
                break
        assert session.prompt("Go on.").text == "Next."


def test_it_works_where_an_event_loop_runs(make_agent: Make) -> None:
    async def main() -> None:
        with sync(make_agent(echo)) as agent:
            assert agent.prompt("one").text == "ONE"

    asyncio.run(main())


def test_it_needs_no_with(make_agent: Make) -> None:
    agent = sync(make_agent(echo))
    assert agent.prompt("one").text == "ONE"
    agent.close()
    agent.close()
    with pytest.raises(AgentClosed, match="Make another one"):
        agent.prompt("two")


INTERRUPTED = """
import asyncio, os, signal
from crow_agent import Agent, sync, tool
from crow_core.testing import Reply, ScriptedModel

@tool
async def interrupt() -> str:
    "Press Ctrl-C."
    os.kill(os.getpid(), signal.SIGINT)
    try:
        await asyncio.Event().wait()
    finally:
        print("cancelled")
    return "never"

ask = Reply(tool_calls=[{"name": "interrupt", "arguments": {}}])
made = Agent(ScriptedModel([ask, Reply("Next.")]), tools=[interrupt], store=False)
with sync(made) as agent, agent.session() as session:
    try:
        session.prompt("Wait.")
    except KeyboardInterrupt:
        print(session.prompt("Go on.").text)
"""


def test_interrupt_cancels_the_turn_and_the_session_goes_on(home: Path) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=home, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cancelled\nNext.\n", "")


def test_errors_are_raised_as_they_are(make_agent: Make) -> None:
    @tool
    async def wait() -> str:
        """Wait for ever."""
        await asyncio.Event().wait()
        return "never"

    ask = Reply(tool_calls=[{"name": "wait", "arguments": {}}])
    with sync(make_agent(ask, tools=[wait])) as agent, pytest.raises(PromptTimeout):
        agent.prompt("Wait.", timeout=1)


def test_agent_of_an_event_loop_cannot_be_used_in_a_thread(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(echo) as agent:
            with pytest.raises(AgentError, match="another event loop"), sync(agent):
                pass
            assert (await agent.prompt("one")).text == "ONE"

    asyncio.run(main())


def test_function_that_waits_for_its_own_agent_is_told_so(make_agent: Make) -> None:
    raised: list[AgentError] = []

    def permit(question: object) -> bool:
        try:
            blocking.prompt("May it?")
        except AgentError as error:
            raised.append(error)
        return False

    ask = Reply(tool_calls=[{"name": "terminal", "arguments": {"command": "make"}}])
    with sync(make_agent(ask, Reply("No."), permissions=permit)) as blocking:
        assert blocking.prompt("Make it.").text == "No."
    assert "Make it async" in str(raised[0])
