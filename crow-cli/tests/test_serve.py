"""`crow serve` as a real process with a socket and a token, and a scripted model behind HTTP."""

import asyncio
import os
import re
import signal
import socket
import sqlite3
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import crow_system as system
import pytest
from crow_agent import Agent, AgentLost
from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.remote_agent import connect
from crow_core.acp.schema import (
    INVALID_REQUEST,
    ClientCapabilities,
    LoadSessionRequest,
    LoadSessionResponse,
    UserMessageChunk,
)
from crow_core.testing import Editor, Reply, ScriptedCall, ScriptedServer
from websockets.asyncio.client import connect as dial
from websockets.exceptions import InvalidStatus
from websockets.frames import CloseCode

if TYPE_CHECKING:
    from crow_testing.command_fixtures import ForkedProcess, Machine, PipeReader

pytestmark = pytest.mark.anyio

OpenPipe = Callable[[str], Awaitable["PipeReader"]]


@dataclass
class RunningServe:
    """A running `crow serve`."""

    process: "Process | ForkedProcess"
    line: str
    """What it said on standard output."""

    @property
    def url(self) -> str:
        return self.line.split()[0]

    @property
    def token(self) -> str:
        return self.line.split()[-1]

    @asynccontextmanager
    async def editor(self, *, permit: str | None = "allow_once") -> AsyncIterator[Editor]:
        """Connect an editor to it and initialize it."""
        editor = Editor(await connect(self.url, self.token), permit=permit)
        async with editor.serving():
            await editor.initialize("editor", ClientCapabilities())
            yield editor

    async def outcome(self) -> tuple[int | None, str, str]:
        """Return its exit code and the rest of its output."""
        out, err = await self.process.communicate()
        return self.process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def serving(machine: "Machine", *args: str, model: ScriptedServer | None = None) -> AsyncIterator[RunningServe]:
    """Run `crow serve`; afterwards check that it ended with code 0 and printed only its one line."""
    machine.ask(model.url if model else "http://127.0.0.1:9/v1")
    process = await machine.start("serve", *(args or ("--port", "0")))
    assert process.stdout
    served = RunningServe(process, (await process.stdout.readline()).decode().strip())
    try:
        yield served
        if process.returncode is None:
            with suppress(ProcessLookupError):  # the test ended it
                process.terminate()
        assert await served.outcome() == (0, "", "")
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def command(line: str) -> ScriptedCall:
    return {"name": "terminal", "arguments": {"command": line}}


async def load(editor: Editor, id: str, cwd: Path) -> LoadSessionResponse:
    return await editor.request("session/load", LoadSessionRequest(session_id=id, cwd=str(cwd), mcp_servers=[]))


async def test_address_and_header_are_printed(machine: "Machine"):
    async with serving(machine) as served:
        assert re.fullmatch(r"ws://127\.0\.0\.1:\d+/acp Authorization: Bearer [\w-]{43}", served.line)
        async with served.editor() as editor:
            assert (await editor.new_session(str(machine.project))).session_id


async def test_every_start_makes_a_new_token(machine: "Machine"):
    async with serving(machine) as one:
        pass
    async with serving(machine) as other:
        with pytest.raises(InvalidStatus) as refusal:
            await connect(other.url, one.token)
    assert refusal.value.response.status_code == 401


async def test_given_token_is_not_printed(machine: "Machine"):
    token, file = "a-token-of-32-characters-or-so.~", machine.home / "token"
    file.write_text(f"{token}\n")
    for args, hint in ((("--token", token), "(your --token)"), (("--token-file", str(file)), f"(the token in {file})")):
        async with serving(machine, "--port", "0", *args) as served:
            assert served.line == f"{served.url} Authorization: Bearer {hint}"
            with pytest.raises(InvalidStatus):
                await connect(served.url, "wrong")
            await (await connect(served.url, token)).close()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--token", "short"], "--token: the token has to be 16 or more letters, digits,"),
        (["--token", "with a space and long enough"], "--token: the token has to be 16 or more"),
        (["--token-file", "/nowhere"], "--token-file: /nowhere cannot be read"),
        (["--token-file", "/dev/null"], "--token-file: the token in /dev/null has to be 16 or more"),
        (["--token", "x" * 16, "--token-file", "/nowhere"], "--token or --token-file: give one of them."),
        (["--host", "0.0.0.0"], "--host: 0.0.0.0 can be reached from other machines. Add --allow-remote"),
        (["--host", "::"], "--host: :: can be reached from other machines."),
        (["--host", "no such host"], "--host: 'no such host' is not an address"),
        (["--host", "192.0.2.1", "--allow-remote"], "--port: 0 of 192.0.2.1 cannot be used"),
        (["--allow-origin", "*"], "--allow-origin: '*' is not an origin. Write it like https://example.org"),
        (["--allow-origin", "https://example.org/page"], "is not an origin"),
        (["--max-connections", "0"], "--max-connections"),
    ],
)
async def test_invalid_option_is_one_sentence(machine: "Machine", args: list[str], words: str):
    machine.ask("http://127.0.0.1:9/v1")
    done = await machine.crow("serve", "--port", "0", *args)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert "Traceback" not in done.err


async def test_port_in_use_is_reported(machine: "Machine"):
    machine.ask("http://127.0.0.1:9/v1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = await machine.crow("serve", "--port", port)
    assert done.code == 2
    message = f"crow: --port: {port} of 127.0.0.1 cannot be used (Address already in use). "
    message += "Choose another; 0 chooses a free one."
    assert done.err == f"{message}\n"


async def test_invalid_configuration_is_reported_at_the_start(machine: "Machine"):
    file = machine.configure('[models.mine]\nbase_ulr = "http://127.0.0.1:9/v1"\n')
    done = await machine.crow("serve", "--port", "0")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"crow: {file}, line 2, models.mine.base_ulr: no such setting")


async def test_allowing_other_machines_prints_a_warning(machine: "Machine"):
    machine.ask("http://127.0.0.1:9/v1")
    process = await machine.start("serve", "--host", "0.0.0.0", "--port", "0", "--allow-remote")
    assert process.stdout
    served = RunningServe(process, (await process.stdout.readline()).decode().strip())
    port = served.url.rpartition(":")[2]
    await (await connect(f"ws://127.0.0.1:{port}", served.token)).close()
    with pytest.raises(InvalidStatus) as refusal:
        await connect(f"ws://127.0.0.1:{port}", "")
    process.terminate()
    code, out, err = await served.outcome()
    assert refusal.value.response.status_code == 401
    assert (code, out) == (0, "")
    assert err.startswith(f"crow: {served.url} can be reached from other machines. Whoever has the token can do what")
    assert served.token not in err


async def test_only_pages_of_the_origins_that_are_allowed_can_connect(machine: "Machine"):
    """The client connects as a page in a browser does, which cannot set headers."""
    async with serving(machine, "--port", "0", "--allow-origin", "https://Editor.example/") as served:
        offered: Any = ["acp", f"bearer.{served.token}"]
        async with dial(served.url, subprotocols=offered, origin="https://editor.example") as connection:  # type: ignore[arg-type]
            assert connection.subprotocol == "acp"
        with pytest.raises(InvalidStatus) as refusal:
            await dial(served.url, subprotocols=offered, origin="https://evil.example")  # type: ignore[arg-type]
    assert refusal.value.response.status_code == 403


async def test_several_clients_work_side_by_side(machine: "Machine"):
    """Each turn ends only after all others have begun."""
    begun, everyone = 0, asyncio.Event()

    async def script(request: dict[str, Any]) -> Reply:
        nonlocal begun
        begun += 1
        if begun == 6:
            everyone.set()
        await everyone.wait()
        return Reply(request["messages"][-1]["content"])

    async with (
        ScriptedServer(script) as model,
        serving(machine, model=model) as served,
        served.editor() as one,
        served.editor() as other,
    ):

        async def talk(editor: Editor, name: str) -> list[str]:
            ids = [(await editor.new_session(str(machine.project))).session_id for _ in range(3)]
            answers = await asyncio.gather(*(editor.prompt(id, name) for id in ids))
            return [answer.stop_reason for answer in answers]

        assert await asyncio.gather(talk(one, "one "), talk(other, "two ")) == [["end_turn"] * 3] * 2
    assert (one.text, other.text) == ("one " * 3, "two " * 3)


async def test_words_for_a_turn_of_another_connection_are_refused(machine: "Machine"):
    asked, finish = asyncio.Event(), asyncio.Event()

    async def script(request: dict[str, Any]) -> Reply:
        asked.set()
        await finish.wait()
        return Reply("Done.")

    async with (
        ScriptedServer(script) as model,
        serving(machine, model=model) as served,
        served.editor() as one,
        served.editor() as other,
    ):
        id = (await one.new_session(str(machine.project))).session_id
        turn = asyncio.ensure_future(one.prompt(id, "Go."))
        await asked.wait()
        words = [{"type": "text", "text": "Rather in blue."}]
        with pytest.raises(RpcError) as refusal:
            await other.request("_session/steering", {"sessionId": id, "prompt": words})
        assert refusal.value.data == {"sessionId": id, "details": f"No session {id!r}."}
        assert await other.request("session/list", {})  # the connection works on
        finish.set()
        assert (await turn).stop_reason == "end_turn"
        assert "in blue" not in str(model.requests)


async def test_client_reconnects_and_continues(machine: "Machine"):
    replies = [Reply("I look.", tool_calls=[command("echo 42 | tee answer")]), Reply("It is 42."), Reply("As I said.")]
    async with ScriptedServer(replies) as model, serving(machine, model=model) as served:
        async with served.editor() as editor:
            id = (await editor.new_session(str(machine.project))).session_id
            await editor.prompt(id, "What is it?")
            before = editor.text
        async with served.editor() as editor:
            await load(editor, id, machine.project)
            assert editor.text == before == "I look.It is 42."
            assert [update.content.text for update in editor.of(UserMessageChunk)] == ["What is it?"]  # type: ignore[union-attr]
            assert (await editor.prompt(id, "Sure?")).stop_reason == "end_turn"
    roles = [message["role"] for message in model.requests[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]


async def test_session_of_a_broken_connection_is_ended_and_released(machine: "Machine", open_pipe: OpenPipe):
    """The command and its children end, and another process can load the session."""
    pipe, server_pipe = await open_pipe("pipe"), await open_pipe("server")
    async with (
        ScriptedServer([Reply(tool_calls=[command(pipe.holding_command())]), Reply("Again.")]) as model,
        serving(machine, model=model) as served,
    ):
        async with served.editor() as editor:
            id = (await editor.new_session(str(machine.project), [machine.keeper(server_pipe)])).session_id
            turn = asyncio.create_task(editor.prompt(id, "Wait for me."))
            assert await server_pipe.line() == "started"
            assert await pipe.line()
        with pytest.raises(ConnectionClosed):
            await turn
        await pipe.wait_for_close()
        await server_pipe.wait_for_close()
        async with served.editor() as again:  # waits for the end of the session before
            await load(again, id, machine.project)
            async with machine.editor() as elsewhere:
                with pytest.raises(RpcError) as refusal:
                    await load(elsewhere, id, machine.project)
            assert (refusal.value.code, refusal.value.data["canFork"]) == (INVALID_REQUEST, True)
            assert list(again.calls().values()) == [["pending", "failed"]]
            await again.request("session/close", {"sessionId": id})
            async with machine.editor() as elsewhere:
                await load(elsewhere, id, machine.project)
                assert (await elsewhere.prompt(id, "And now?")).stop_reason == "end_turn"


@pytest.mark.posix("processes are sent no signals there")
@pytest.mark.parametrize("number", [signal.SIGINT, *system.END_SIGNALS])
async def test_signal_ends_the_server_in_order(machine: "Machine", open_pipe: OpenPipe, number: signal.Signals):
    command_pipe, server_pipe = await open_pipe("command"), await open_pipe("server")
    async with (
        ScriptedServer([Reply(tool_calls=[command(command_pipe.holding_command())])]) as model,
        serving(machine, model=model) as served,
    ):
        async with (
            served.editor() as editor,
            dial(served.url, additional_headers={"Authorization": f"Bearer {served.token}"}) as idle,
        ):
            session = await editor.new_session(str(machine.project), [machine.keeper(server_pipe)])
            turn = asyncio.create_task(editor.prompt(session.session_id, "Wait for me."))
            assert await server_pipe.line() == "started"
            assert await command_pipe.line()

            served.process.send_signal(number)

            assert (await turn).stop_reason == "cancelled"
            await idle.wait_closed()
            assert idle.close_code == CloseCode.GOING_AWAY
            await server_pipe.wait_for_close()
            await command_pipe.wait_for_close()
        assert await served.outcome() == (0, "", "")
    assert os.listdir(machine.env["TMPDIR"]) == []


@pytest.mark.slow
async def test_kill_leaves_no_process_and_the_session_can_be_continued(machine: "Machine", open_pipe: OpenPipe):
    command_pipe, server_pipe = await open_pipe("command"), await open_pipe("server")
    async with ScriptedServer([Reply(tool_calls=[command(command_pipe.holding_command())]), Reply("Again.")]) as model:
        machine.ask(model.url)
        process = await machine.start("serve", "--port", "0")
        assert process.stdout
        served = RunningServe(process, (await process.stdout.readline()).decode().strip())
        async with served.editor() as editor:
            id = (await editor.new_session(str(machine.project), [machine.keeper(server_pipe)])).session_id
            turn = asyncio.create_task(editor.prompt(id, "Wait for me."))
            assert await server_pipe.line() == "started"
            assert await command_pipe.line()
            process.kill()
            with pytest.raises(ConnectionClosed):
                await turn
        assert await served.outcome() == (-signal.SIGKILL, "", "")
        await server_pipe.wait_for_close()
        await command_pipe.wait_for_close()
        async with serving(machine, model=model) as served, served.editor() as editor:
            await load(editor, id, machine.project)
            assert (await editor.prompt(id, "And now?")).stop_reason == "end_turn"


async def test_token_is_stored_nowhere(machine: "Machine"):
    """This holds also when the model finds the token."""
    token, file = "a-token-of-32-characters-or-so.~", machine.home / "token"
    file.write_text(token)
    replies = [Reply(tool_calls=[command(f"cat {file}; ps -ef | cat; cat /proc/$PPID/cmdline; env")]), Reply("Well.")]
    async with (
        ScriptedServer(replies) as model,
        serving(machine, "--port", "0", "--token-file", str(file), model=model) as served,
    ):
        served.line = f"{served.url} {token}"
        async with served.editor() as editor:
            id = (await editor.new_session(str(machine.project))).session_id
            await editor.prompt(id, f"Is {token} a good token?")
        for attempt in ("wrong", token[:-1]):
            with pytest.raises(InvalidStatus):
                await connect(served.url, attempt)
    assert all(token.encode() not in body for body in model.bodies)
    [database] = machine.home.rglob("crow.db")
    with closing(sqlite3.connect(database)) as connection, connection:
        assert token not in "\n".join(connection.iterdump())


async def test_output_of_libraries_is_not_on_standard_output(machine: "Machine"):
    (machine.home / "sitecustomize.py").write_text("import atexit\natexit.register(print, 'a library says goodbye')\n")
    machine.env["PYTHONPATH"] = str(machine.home)
    machine.ask("http://127.0.0.1:9/v1")
    process = await machine.start("serve", "--port", "0", stdin=PIPE)
    assert process.stdout
    served = RunningServe(process, (await process.stdout.readline()).decode().strip())
    process.terminate()
    assert await served.outcome() == (0, "", "a library says goodbye\n")


async def test_programs_connect_with_the_token_and_are_told_when_it_is_wrong(machine: "Machine"):
    async with ScriptedServer(lambda request: Reply("Four.")) as model, serving(machine, model=model) as served:
        async with Agent.connect(served.url, token=served.token, cwd=machine.project) as agent:
            results = await agent.map(["2 + 2?"] * 3)
        assert [result.text for result in results] == ["Four."] * 3
        with pytest.raises(AgentLost, match=r"refused the connection with the status 40[13]. Check the token"):
            await Agent.connect(served.url, token="x" * 20).prompt("2 + 2?")


async def test_programs_connect_to_crow_acp_as_to_any_agent(machine: "Machine"):
    async with ScriptedServer(lambda request: Reply("Four.")) as model:
        machine.ask(model.url)
        command = [sys.executable, "-m", "crow_cli", "acp"]
        async with Agent.connect(command, env=machine.env, cwd=machine.project) as agent:
            result = await agent.prompt("2 + 2?")
            continued = await agent.session(result.session_id)
            assert (await continued.prompt("Again?")).text == "Four."
            await (await continued.fork()).close()
        assert result.text == "Four."
