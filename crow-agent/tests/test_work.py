"""Programs with commands and sub-agents in the background, and with goals."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crow_agent import Agent, AgentError, TurnStopped
from crow_core.acp.schema import SessionUpdate, ToolCallUpdate
from crow_core.testing import Reply, ScriptedModel

pytestmark = pytest.mark.anyio


def use(tool: str, **arguments: Any) -> Reply:
    return Reply(tool_calls=[{"name": tool, "arguments": arguments}])


def wait_for(text: str) -> tuple[asyncio.Event, Callable[[SessionUpdate], None]]:
    """Return an event, and the function that sets it when a tool call shows a text."""
    shown = asyncio.Event()

    def watch(update: SessionUpdate) -> None:
        if isinstance(update, ToolCallUpdate) and text in str(update.content):
            shown.set()

    return shown, watch


@pytest.mark.posix
async def test_a_command_goes_to_the_background_and_is_listed_and_stopped(home: Path) -> None:
    model = ScriptedModel([use("terminal", command="echo ready; sleep 600"), Reply("It runs."), Reply("I see.")])
    async with Agent(model, mode="yolo", cwd=home) as agent, await agent.session() as session:
        ready, watch = wait_for("ready")
        prompt = asyncio.ensure_future(session.prompt("Serve.", on_update=watch))
        await ready.wait()
        assert await session.send_to_background() == 1
        assert (await prompt).text == "It runs."
        (work,) = await session.background()
        assert (work.name, work.kind, work.state, work.last_line) == ("1", "command", "running", "ready")
        assert repr(work) == "<command 1: echo ready; sleep 600 (running)>"
        with pytest.raises(AgentError, match="takes no words"):
            await work.tell("Faster.")
        await work.stop()
        (work,) = await session.background()
        assert work.state == "ended"
        await session.prompt("And now?")
        assert "has ended in the background" in str(model.requests[-1]["messages"])
        assert await session.background() == []


async def test_a_program_goes_on_with_a_sub_agent_by_its_name(home: Path) -> None:
    (home / "crow").mkdir(exist_ok=True)
    (home / "crow" / "config.toml").write_text("[extensions]\nsubagents = true\n")
    told = asyncio.Event()

    def play(request: dict[str, Any]) -> Reply:
        match request["messages"][-1]:
            case {"content": "Look."}:
                return use("agent", name="looker", prompt="Look at the code.")
            case {"content": "Look at the tests, too."}:
                told.set()
                return Reply("Fine, too.")
            case {"role": "tool"}:
                return Reply("Done.")
            case _:
                return Reply("All is fine.")

    async with Agent(ScriptedModel(play), mode="yolo", cwd=home) as agent, await agent.session() as session:
        await session.prompt("Look.")
        (work,) = await session.background()
        assert (work.name, work.kind, work.state) == ("looker", "agent", "ended")
        assert work.session_id not in ("", session.id)
        await work.tell("Look at the tests, too.")
        async with asyncio.timeout(60):
            await told.wait()


async def test_a_goal_that_is_not_allowed_is_an_error(home: Path) -> None:
    async with Agent(ScriptedModel([]), cwd=home) as agent:
        result = await agent.prompt("/goal Write it. until = true")
    assert result.stopped_by == "goal"
    with pytest.raises(TurnStopped, match="you did not allow `true`"):
        _ = result.output


async def test_a_program_has_no_timers(home: Path) -> None:
    async with Agent(ScriptedModel([]), cwd=home) as agent:
        result = await agent.prompt("/every 10m Look.")
    assert result.stopped_by == "unknown_command"


async def test_a_goal_is_a_prompt(home: Path) -> None:
    model = ScriptedModel([Reply("Not yet."), Reply("Written.")])
    command = "test -e begun || { touch begun; false; }"
    async with Agent(model, mode="yolo", cwd=home) as agent:
        result = await agent.prompt(f"/goal Write it. requests=5 until = {command}")
    assert (result.text, result.stop_reason, len(model.requests)) == ("Written.", "end_turn", 2)
