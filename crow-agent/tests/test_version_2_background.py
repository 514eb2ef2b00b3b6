"""Background work in ACP version 2: terminals and sub-agents that outlive their turn."""

import asyncio
import os
from base64 import b64decode
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from crow_agent.app import build
from crow_core.acp.schema import INVALID_PARAMS
from crow_core.acp.shared_methods import BACKGROUND_METHOD
from crow_core.testing import Reply, ScriptedModel
from crow_core.testing.script import ScriptedCall as Use
from crow_testing.version_2 import ClientV2, connect_2, join_2, make_prompt

START = {"type": "start"}

pytestmark = [pytest.mark.anyio, pytest.mark.posix]


@asynccontextmanager
async def talk(tmp_path: Path, *script: Reply) -> AsyncGenerator[ClientV2]:
    env = {"CROW_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text("[extensions]\nsubagents = true\n")
    async with connect_2(await build(env, models={"m": ScriptedModel(list(script))}, mode="yolo")) as client:
        yield client


def use(tool: str, **arguments: Any) -> Reply:
    return Reply(tool_calls=[Use(name=tool, arguments=arguments)])


def backgrounds(client: ClientV2) -> list[list[dict[str, Any]]]:
    return [update["background"] for update in client.of("state_update")]


async def send_away(client: ClientV2, session: str, sign: Path) -> None:
    """Send what runs to the background when a file has appeared, and wait for the end of the turn."""
    ends = len(client.ends())
    await client.ask("session/prompt", make_prompt(session, "go"))
    while not os.path.exists(sign):  # noqa: ASYNC240 - it takes no time
        await asyncio.sleep(0)
    await client.ask(BACKGROUND_METHOD, {"sessionId": session, "action": "send"})
    await client.until(lambda client: len(client.ends()) > ends)


async def test_a_command_in_the_background_is_a_terminal_that_outlives_its_turn(tmp_path: Path):
    os.mkfifo(tmp_path / "go")
    line = "touch begun; read x < go; echo late; exit 3"
    async with talk(tmp_path, use("terminal", command=line), Reply("Later.")) as client:
        session = await client.open(str(tmp_path))
        await send_away(client, session, tmp_path / "begun")
        ((id, terminal),) = client.terminals().items()
        assert next(iter(client.calls().values()))["status"] == "completed"
        assert "exitStatus" not in terminal
        assert terminal["capabilities"] == {"cancel": {}}
        assert client.ends()[-1]["background"] == [{"type": "terminal", "terminalId": id}]
        await asyncio.to_thread((tmp_path / "go").write_text, "\n")
        await client.until(lambda client: backgrounds(client)[-1] == [])
        assert client.terminals()[id]["exitStatus"] == {"exitCode": 3}
        assert "capabilities" not in client.terminals()[id]
        assert b64decode(client.of("terminal_output_chunk")[-1]["data"]).decode() == "late\n"
        last = client.updates.index(client.of("terminal_update")[-1])
        assert client.updates[last + 1] == {"sessionUpdate": "state_update", "state": "idle", "background": []}


def read_output(client: ClientV2) -> str:
    """Read the output of the only terminal as a client has it: whole, or continued by chunks."""
    output = b""
    for update in client.updates:
        match update:
            case {"sessionUpdate": "terminal_update", "output": {"data": data}}:
                output = b64decode(data)
            case {"sessionUpdate": "terminal_output_chunk", "data": data}:
                output += b64decode(data)
            case _:
                pass
    return output.decode()


async def test_the_output_of_a_command_in_the_background_is_sent_while_it_runs(tmp_path: Path):
    os.mkfifo(tmp_path / "go")
    go = os.open(tmp_path / "go", os.O_RDWR)  # open all the time, so that the command never reads an end
    line = "echo early; touch begun; while read x < go; do echo $x; test $x = 3 && exit 7; done"
    async with talk(tmp_path, use("terminal", command=line), Reply("Later.")) as client:
        session = await client.open(str(tmp_path))
        await send_away(client, session, tmp_path / "begun")
        for number in range(3):
            os.write(go, b"%d\n" % number)
            await client.until(lambda client, number=number: read_output(client).endswith(f"{number}\n"))
            assert "exitStatus" not in next(iter(client.terminals().values()))
        async with join_2(client.crow) as second:
            await second.ask("session/resume", {"sessionId": session, "cwd": str(tmp_path), "replayFrom": START})
            await second.until(lambda client: read_output(client).endswith("2\n"))
            ((id, terminal),) = second.terminals().items()
            assert "exitStatus" not in terminal
            assert backgrounds(second)[-1] == [{"type": "terminal", "terminalId": id}]
            os.write(go, b"3\n")
            for each in (client, second):
                await each.until(lambda client: backgrounds(client)[-1] == [])
                lines = [line for line in read_output(each).splitlines() if not line.startswith("[still running")]
                assert lines == ["early", "0", "1", "2", "3"]
                assert each.terminals()[id]["exitStatus"] == {"exitCode": 7}
    os.close(go)


async def test_a_terminal_in_the_background_is_cancelled_and_the_end_of_the_turn_leaves_it_alone(tmp_path: Path):
    line = "touch begun; sleep 600"
    async with talk(tmp_path, use("terminal", command=line), Reply("Later.")) as client:
        session = await client.open(str(tmp_path))
        await send_away(client, session, tmp_path / "begun")
        client.notify("session/cancel", {"sessionId": session})
        ((id, _),) = client.terminals().items()
        asked = {"sessionId": session, "terminalId": id}
        await client.ask("terminal/cancel", asked)
        await client.until(lambda client: backgrounds(client)[-1] == [])
        assert client.terminals()[id]["exitStatus"] == {"signal": "SIGKILL"}
        assert (await client.fail("terminal/cancel", asked))["code"] == INVALID_PARAMS


async def test_an_agent_in_the_background_is_a_tool_call_that_goes_on(tmp_path: Path):
    task, work = use("agent", description="Look", prompt="Look."), use("terminal", command="touch begun; sleep 600")
    async with talk(tmp_path, task, work, Reply("Later.")) as client:
        session = await client.open(str(tmp_path))
        await send_away(client, session, tmp_path / "begun")
        id, call = next(iter(client.calls().items()))
        assert call["status"] == "in_progress"
        assert client.ends()[-1]["background"] == [{"type": "tool_call", "toolCallId": id}]
        await client.ask("tool_call/cancel", {"sessionId": session, "toolCallId": id})
        await client.until(lambda client: backgrounds(client)[-1] == [])
        assert client.calls()[id]["status"] == "cancelled"


async def test_a_resumed_session_tells_its_background(tmp_path: Path):
    async with talk(tmp_path, use("terminal", command="touch begun; sleep 600"), Reply("Later.")) as client:
        session = await client.open(str(tmp_path))
        await send_away(client, session, tmp_path / "begun")
        await client.ask("session/close", {"sessionId": session})
        await client.ask("session/resume", {"sessionId": session, "cwd": str(tmp_path)})
        assert backgrounds(client)[-1] == []


async def test_a_client_that_joins_sees_the_running_command_in_its_terminal(tmp_path: Path):
    os.mkfifo(tmp_path / "go")
    async with talk(tmp_path, use("terminal", command="touch begun; read x < go; exit 3"), Reply("Later.")) as client:
        session = await client.open(str(tmp_path))
        await client.ask("session/prompt", make_prompt(session, "go"))
        while not os.path.exists(tmp_path / "begun"):  # noqa: ASYNC240 - it takes no time
            await asyncio.sleep(0)
        async with join_2(client.crow) as second:
            await second.ask("session/resume", {"sessionId": session, "cwd": str(tmp_path), "replayFrom": START})
            (call,) = second.calls().values()
            assert (call["status"], call["capabilities"]) == ("in_progress", {"cancel": {}})
            ((id, terminal),) = second.terminals().items()
            assert terminal["capabilities"] == {"cancel": {}}
            await asyncio.to_thread((tmp_path / "go").write_text, "\n")
            await second.until(ClientV2.ends)
            assert second.terminals()[id]["exitStatus"] == {"exitCode": 3}
            assert [part["type"] for part in next(iter(second.calls().values()))["content"]] == ["terminal"]
