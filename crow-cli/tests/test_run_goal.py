"""`crow run --goal` and `--until`: one prompt goes on until its goal is reached."""

import json
import os
from typing import TYPE_CHECKING

import pytest
from crow_core.testing import Reply, ScriptedCall, ScriptedServer
from crow_mcp_server.terminal.command_watchdog import MARK_VARIABLE

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio

TOUCH: ScriptedCall = {"name": "terminal", "arguments": {"command": "touch done"}}


async def test_run_goes_on_until_the_command_succeeds(machine: "Machine"):
    async with ScriptedServer([Reply("Made."), Reply("", tool_calls=[TOUCH]), Reply("Now it is.")]) as server:
        machine.ask(server.url)
        done = await machine.crow("run", "--mode", "yolo", "--until", "test -e done", "Make the file")
    assert done.code == 0, done.err
    assert done.out.endswith("Now it is.\n")
    assert "test -e done failed (exit code 1)." in done.err
    assert "The goal is reached: test -e done succeeded." in done.err


async def test_judge_decides_without_a_command_and_its_verdicts_are_stored(machine: "Machine"):
    replies = [Reply("Made."), Reply("NO: it was not run."), Reply("Run."), Reply("YES: it ran.")]
    async with ScriptedServer(replies) as server:
        machine.ask(server.url)
        done = await machine.crow("run", "--goal", "Make it run")
    assert done.code == 0, done.err
    assert "The judge says no: it was not run." in done.err
    (session,) = json.loads((await machine.crow("sessions", "list", "--json")).out)
    stored = (await machine.crow("sessions", "show", session["id"])).out
    assert "Goal open: The judge says no: it was not run." in stored
    assert "Goal reached: the judge says: it ran." in stored
    assert "goal" in (await machine.crow("prompts", "list")).out


async def test_goal_that_never_holds_ends_with_exit_code_4_and_one_sentence(machine: "Machine"):
    async with ScriptedServer([Reply("One."), Reply("Two.")]) as server:
        machine.ask(server.url)
        done = await machine.crow("run", "--until", "false", "Never requests=2")
    assert done.code == 4, done.err
    assert done.err.splitlines()[-1].endswith(
        "The goal was not reached. The budget is used up: 2 of 2 requests. The last check: false failed (exit code 1). "
        "/goal go tries again."
    )


async def test_command_that_crow_runs_cannot_choose_a_check(machine: "Machine"):
    machine.env[MARK_VARIABLE] = f"{os.getpid()}"
    done = await machine.crow("run", "--until", "true", "Go")
    assert done.code == 2
    assert "this loosens what crow may do" in done.err
