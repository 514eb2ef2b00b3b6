"""Work in the background of a `crow acp` process that is killed."""

import asyncio
from typing import TYPE_CHECKING

import pytest
from crow_core.acp.schema import LoadSessionRequest, ToolCallUpdate
from crow_core.acp.shared_methods import BACKGROUND_METHOD
from crow_core.testing import Reply, ScriptedCall, ScriptedServer
from crow_testing.process_states import is_alive

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = [pytest.mark.anyio, pytest.mark.processes, pytest.mark.slow, pytest.mark.posix]


async def test_a_kill_leaves_no_process_and_the_next_resume_says_what_was_stopped(machine: "Machine") -> None:
    line = "echo $$ > pid; echo begun; sleep 600"
    runs = Reply(tool_calls=[ScriptedCall(name="terminal", arguments={"command": line})])
    async with ScriptedServer([runs, Reply("Later."), Reply("I see.")]) as server:
        machine.ask(server.url)
        agent = await machine.agent()
        async with machine.editor(agent, permit="allow_once") as editor:
            id = (await editor.new_session(str(machine.project))).session_id
            turn = asyncio.ensure_future(editor.prompt(id, "Go."))
            await editor.until(lambda editor: any("begun" in str(one.content) for one in editor.of(ToolCallUpdate)))
            await editor.request(BACKGROUND_METHOD, {"sessionId": id, "action": "send"})
            await turn
            pid = int((machine.project / "pid").read_text())
            assert is_alive(pid)
            agent.process.kill()
            await agent.exit
        while is_alive(pid):
            await asyncio.sleep(0.01)
        async with machine.editor() as editor:
            load = LoadSessionRequest(session_id=id, cwd=str(machine.project), mcp_servers=[])
            await editor.request("session/load", load)
            await editor.until(lambda editor: f"Stopped with the session: {line}." in editor.thoughts)
            await editor.prompt(id, "And?")
    assert f"was stopped when the session was closed: {line}." in server.requests[-1]["messages"][-1]["content"]
