"""`crow acp` as a real process on standard streams, with a scripted model behind HTTP."""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import crow_system as system
import pytest
from crow_cli.acp import METHODS
from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import (
    AUTH_REQUIRED,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    NOT_FOUND,
    PARSE_ERROR,
    ClientCapabilities,
    DiffContent,
    LoadSessionRequest,
    SetProviderRequest,
    TextBlock,
    ToolCallUpdate,
)
from crow_core.acp.shared_methods import make_steering_params
from crow_core.acp.transports import ChildTransport, spawn
from crow_core.testing import Failure, Raw, Reply, ScriptedCall, ScriptedServer
from crow_core.testing.wire import INVALID_LINES

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine, PipeReader

pytestmark = [pytest.mark.anyio, pytest.mark.processes]

OpenPipe = Callable[[str], Awaitable["PipeReader"]]


def command(line: str) -> ScriptedCall:
    return {"name": "terminal", "arguments": {"command": line}}


class PatientTransport:
    """A transport to an agent process that waits on close until the process has ended."""

    def __init__(self, process: Process) -> None:
        assert process.stdin
        assert process.stdout
        self.process, self.stdin = process, process.stdin
        self.write, self.drain, self.readline = process.stdin.write, process.stdin.drain, process.stdout.readline

    async def close(self) -> None:
        self.stdin.close()
        await self.process.wait()

    async def outcome(self) -> tuple[int | None, str]:
        """Return the exit code and the standard error."""
        assert self.process.stderr
        return self.process.returncode, (await self.process.stderr.read()).decode()


async def ask(agent: ChildTransport, line: bytes) -> Any:
    """Send one line and return the answer."""
    agent.write(line + b"\n")
    return json.loads(await agent.readline())


async def test_a_permitted_command_runs_and_the_model_reads_its_output(machine: "Machine") -> None:
    line = "echo $((6 * 7)) | tee answer"
    async with ScriptedServer([Reply("I look.", tool_calls=[command(line)]), Reply("It is 42.")]) as server:
        machine.ask(server.url)
        async with machine.editor(permit="allow_once") as editor:
            session = await editor.new_session(str(machine.project))
            response = await editor.prompt(session.session_id, "What is six times seven?")

    assert response.stop_reason == "end_turn"
    assert editor.text == "I look.It is 42."
    [question] = editor.questions
    assert question.tool_call.raw_input == {"command": line}
    assert editor.calls() == {question.tool_call.tool_call_id: ["pending", "in_progress", "completed"]}
    assert (machine.project / "answer").read_text() == "42\n"
    assert server.requests[1]["messages"][-1]["content"].strip() == "42"
    assert server.headers[0]["authorization"] == "Bearer key"
    assert machine.stderr.read_text() == ""


@pytest.mark.slow
async def test_after_a_kill_commands_start_in_the_same_folder_and_what_is_gone_is_said(machine: "Machine") -> None:
    (machine.project / "sub").mkdir()
    in_terminal: ScriptedCall = {"name": "terminal", "arguments": {"command": "x=1", "session": "build"}}
    replies = [
        Reply(tool_calls=[command("cd sub; export TOKEN=secret; unset HOME")]),
        Reply(tool_calls=[in_terminal]),
        Reply("Done."),
        Reply(tool_calls=[command("pwd; echo [$TOKEN] ${HOME+home}")]),
        Reply(tool_calls=[command("printf 'no newline'")]),
        Reply("Done again."),
    ]
    async with ScriptedServer(replies) as server:
        machine.ask(server.url)
        agent = await machine.agent()
        async with machine.editor(agent, permit="allow_once") as editor:
            session = await editor.new_session(str(machine.project))
            await editor.prompt(session.session_id, "Go.")
            agent.process.kill()
            await agent.exit
        async with machine.editor(permit="allow_once") as editor:
            load = LoadSessionRequest(session_id=session.session_id, cwd=str(machine.project), mcp_servers=[])
            await editor.request("session/load", load)
            await editor.prompt(session.session_id, "Go on.")
            question = editor.questions[0].tool_call

    folder = machine.project / "sub"
    first, second = (request["messages"][-1]["content"] for request in server.requests[-2:])
    gone = "variables are no longer set or unset: HOME, TOKEN; sessions have ended: build"
    assert first == f"{folder}\n[] home\n[the server was restarted since the last command; {gone}]"
    assert second == "no newline"
    assert isinstance(question.title, str)
    assert question.title.startswith(f"cd {folder} && pwd")  # judged in the folder where it runs
    assert "secret" not in str(machine.stderr.read_text())


async def test_a_diff_that_the_model_sees_can_be_applied(machine: "Machine") -> None:
    def git(*arguments: str, given: str = "") -> None:
        subprocess.run(["git", *arguments], cwd=machine.project, input=given.encode(), check=True)

    poem = machine.project / "poem"
    git("init", "-q")
    poem.write_bytes(b"one\r\n\n\ntwo\n\n\n")
    git("add", "poem")
    poem.write_bytes(wanted := b"1\r\n\n\n2\n\n\n")
    async with ScriptedServer([Reply(tool_calls=[command("git diff")]), Reply("Done.")]) as server:
        machine.ask(server.url)
        async with machine.editor(permit="allow_once") as editor:
            session = await editor.new_session(str(machine.project))
            await editor.prompt(session.session_id, "Go.")
    git("checkout", "-q", "poem")
    git("apply", "-", given=server.requests[-1]["messages"][-1]["content"])
    assert poem.read_bytes() == wanted


async def test_a_rejected_command_does_not_run(machine: "Machine") -> None:
    async with ScriptedServer([Reply(tool_calls=[command("touch ran")]), Reply("Then not.")]) as server:
        machine.ask(server.url)
        async with machine.editor(permit="reject_once") as editor:
            session = await editor.new_session(str(machine.project))
            response = await editor.prompt(session.session_id, "Touch it.")

    assert response.stop_reason == "end_turn"
    assert not (machine.project / "ran").exists()
    assert list(editor.calls().values()) == [["pending", "failed"]]
    assert "rejected" in server.requests[1]["messages"][-1]["content"]


async def test_edit_is_a_diff_in_the_question_and_in_the_result(machine: "Machine") -> None:
    poem = machine.project / "poem.txt"
    poem.write_text("roses are blue\n")
    arguments = {"command": "str_replace", "path": "poem.txt", "old_str": "roses", "new_str": "violets"}
    edit: ScriptedCall = {"name": "file_editor", "arguments": arguments}
    async with ScriptedServer([Reply(tool_calls=[edit]), Reply("Done.")]) as server:
        machine.ask(server.url)
        async with machine.editor(permit="allow_once") as editor:
            session = await editor.new_session(str(machine.project))
            await editor.prompt(session.session_id, "Correct the poem.")

    diff = DiffContent(path=str(poem), old_text="roses are blue\n", new_text="violets are blue\n")
    assert editor.questions[0].tool_call.content == [diff]
    assert editor.of(ToolCallUpdate)[-1].content == [diff]
    assert poem.read_text() == "violets are blue\n"


async def test_permitted_tool_of_the_clients_mcp_server_is_called(machine: "Machine", open_pipe: OpenPipe) -> None:
    pipe = await open_pipe("pipe")
    call: ScriptedCall = {"name": "keeper_keep", "arguments": {"what": "a promise"}}
    machine.configure("servers_wait = 60\n")
    async with ScriptedServer([Reply(tool_calls=[call]), Reply("Kept.")]) as server:
        machine.ask(server.url)
        async with machine.editor(permit="allow_once") as editor:
            session = await editor.new_session(str(machine.project), [machine.keeper(pipe)])
            assert await pipe.line() == "started"
            await editor.prompt(session.session_id, "Keep a promise.")

    assert [question.tool_call.name for question in editor.questions] == ["keeper_keep"]
    assert server.requests[1]["messages"][-1]["content"] == "kept a promise"


async def test_cancel_ends_a_running_command_and_all_its_children(machine: "Machine", open_pipe: OpenPipe) -> None:
    pipe = await open_pipe("pipe")
    async with ScriptedServer([Reply(tool_calls=[command(pipe.holding_command())]), Reply("Still here.")]) as server:
        machine.ask(server.url)
        async with machine.editor(permit="allow_once") as editor:
            session = await editor.new_session(str(machine.project))
            turn = asyncio.create_task(editor.prompt(session.session_id, "Wait for me."))
            assert (await pipe.line()).isdigit()

            await editor.cancel(session.session_id)

            assert (await turn).stop_reason == "cancelled"
            await pipe.wait_for_close()
            assert list(editor.calls().values()) == [["pending", "in_progress", "failed"]]
            assert (await editor.prompt(session.session_id, "And now?")).stop_reason == "end_turn"


async def test_cancel_withdraws_an_open_question_for_permission(machine: "Machine") -> None:
    async with ScriptedServer([Reply(tool_calls=[command("touch ran")])]) as server:
        machine.ask(server.url)
        async with machine.editor(permit=None) as editor:
            session = await editor.new_session(str(machine.project))
            turn = asyncio.create_task(editor.prompt(session.session_id, "Touch it."))
            await editor.until(lambda editor: editor.questions)

            await editor.cancel(session.session_id)

            assert (await turn).stop_reason == "cancelled"
            await editor.request("session/close", {"sessionId": session.session_id})

    assert editor.cancelled_questions == 1
    assert not (machine.project / "ran").exists()


async def test_every_malformed_line_is_answered_and_the_next_one_works(machine: "Machine") -> None:
    agent = await machine.agent()
    try:
        for line, id, code in [
            (b'{"jsonrpc":"2.0","id":1,"method":"initialize"', None, PARSE_ERROR),
            (b"\xff\xfe{}", None, PARSE_ERROR),
            (b"[]", None, INVALID_REQUEST),
            (b"42", None, INVALID_REQUEST),
            (b'{"jsonrpc":"2.0","id":2}', 2, INVALID_REQUEST),
            (b'{"jsonrpc":"2.0","id":"a","method":"no/such"}', "a", METHOD_NOT_FOUND),
            (b'{"jsonrpc":"2.0","id":3,"method":"_vendor/thing","params":{}}', 3, METHOD_NOT_FOUND),
            (b'{"jsonrpc":"2.0","id":4,"method":"session/prompt","params":{"sessionId":5}}', 4, INVALID_PARAMS),
            (
                b'{"jsonrpc":"2.0","id":5,"method":"session/prompt","params":{"sessionId":"x","prompt":[]}}',
                5,
                NOT_FOUND,
            ),
        ]:
            answer = await ask(agent, line)
            assert (answer["jsonrpc"], answer["id"], answer["error"]["code"]) == ("2.0", id, code), line
        agent.write(b'{"jsonrpc":"2.0","method":"no/such"}\n')  # nobody answers a notification

        answer = await ask(agent, b'{"jsonrpc":"2.0","id":6,"method":"initialize","params":{"protocolVersion":65535}}')
    finally:
        await agent.close()

    assert (answer["id"], answer["result"]["protocolVersion"]) == (6, 1)
    assert agent.process.returncode == 0


async def test_standard_output_carries_json_lines_only(machine: "Machine", open_pipe: OpenPipe) -> None:
    pipe, log = await open_pipe("pipe"), machine.home / "log"
    (machine.home / "sitecustomize.py").write_text("import atexit\natexit.register(print, 'a library says goodbye')\n")
    machine.env["PYTHONPATH"] = str(machine.home)
    keep: ScriptedCall = {"name": "keeper_keep", "arguments": {"what": "still"}}
    calls = [command("echo aloud; echo run_in_thread >&2"), keep]
    async with ScriptedServer([Reply(tool_calls=calls), Reply("Quiet.")]) as server:
        machine.ask(server.url)
        with machine.stderr.open("wb") as stderr:
            line = f"{shlex.quote(sys.executable)} -m crow_cli acp | tee {log}"
            agent = await spawn("/bin/sh", ["-c", line], machine.env, machine.home, stderr, close_timeout=60)
        async with machine.editor(agent, permit="allow_once") as editor:
            session = await editor.new_session(str(machine.project), [machine.keeper(pipe)])
            assert await pipe.line() == "started"
            await editor.prompt(session.session_id, "Make noise.")

    assert editor.text == "Quiet."
    assert "a library says goodbye" in machine.stderr.read_text()
    assert all(json.loads(line)["jsonrpc"] == "2.0" for line in log.read_text().splitlines())


@pytest.mark.slow
async def test_end_of_input_ends_the_process_and_all_child_processes(machine: "Machine", open_pipe: OpenPipe) -> None:
    server_pipe, command_pipe = await open_pipe("server"), await open_pipe("command")
    async with ScriptedServer([Reply(tool_calls=[command(command_pipe.holding_command())])]) as server:
        machine.ask(server.url)
        agent = PatientTransport(await machine.start("acp", stdin=PIPE))
        async with machine.editor(agent, permit="allow_once") as editor:
            session = await editor.new_session(str(machine.project), [machine.keeper(server_pipe)])
            turn = asyncio.create_task(editor.prompt(session.session_id, "Wait for me."))
            assert await server_pipe.line() == "started"
            assert await command_pipe.line()

        with pytest.raises(ConnectionClosed):
            await turn
        await server_pipe.wait_for_close()
        await command_pipe.wait_for_close()

    assert await agent.outcome() == (0, "")
    assert os.listdir(machine.env["TMPDIR"]) == []


@pytest.mark.sampled(3)
@pytest.mark.posix("processes are sent no signals there")
@pytest.mark.parametrize("number", system.END_SIGNALS)
async def test_signal_ends_the_process_and_all_child_processes(
    machine: "Machine", open_pipe: OpenPipe, number: signal.Signals
) -> None:
    server_pipe, command_pipe = await open_pipe("server"), await open_pipe("command")
    async with ScriptedServer([Reply(tool_calls=[command(command_pipe.holding_command())])]) as server:
        machine.ask(server.url)
        agent = PatientTransport(await machine.start("acp", stdin=PIPE))
        async with machine.editor(agent, permit="allow_once") as editor:
            session = await editor.new_session(str(machine.project), [machine.keeper(server_pipe)])
            turn = asyncio.create_task(editor.prompt(session.session_id, "Wait for me."))
            assert await server_pipe.line() == "started"
            assert await command_pipe.line()

            agent.process.send_signal(number)

            assert (await turn).stop_reason == "cancelled"
            await server_pipe.wait_for_close()
            await command_pipe.wait_for_close()

    assert await agent.outcome() == (128 + number, "")
    assert os.listdir(machine.env["TMPDIR"]) == []


@pytest.mark.usefixtures("no_local_model")
async def test_session_without_a_model_says_what_to_set_and_the_next_one_works(machine: "Machine") -> None:
    async with machine.editor() as editor:
        with pytest.raises(RpcError) as refusal:
            await editor.new_session(str(machine.project))
        machine.configure('[models.mine]\nbase_url = "http://127.0.0.1:9/v1"\nmodel = "mine"\n')

        session = await editor.new_session(str(machine.project))

    assert refusal.value.code == AUTH_REQUIRED
    assert refusal.value.data["details"].startswith("No model is configured")
    assert "OPENAI_BASE_URL, OPENAI_API_KEY and CROW_MODEL" in refusal.value.data["details"]
    assert session.session_id


async def test_invalid_configuration_is_reported_with_file_line_and_key(machine: "Machine") -> None:
    file = machine.configure('[permissions]\nmode = "ask"\n\n[models.mine]\nbase_ulr = "http://127.0.0.1:9/v1"\n')
    async with machine.editor() as editor:
        with pytest.raises(RpcError) as refusal:
            await editor.new_session(str(machine.project))

    assert refusal.value.code == INTERNAL_ERROR
    assert refusal.value.data["details"].startswith(f"{file}, line 5, models.mine.base_ulr: no such setting")


async def test_refused_key_is_reported_with_the_setting_and_the_next_prompt_works(machine: "Machine") -> None:
    refusal = Failure(401, {"error": {"message": "Incorrect API key provided"}})
    async with ScriptedServer([refusal, Reply("Better.")]) as server:
        machine.ask(server.url, key="wrong")
        async with machine.editor() as editor:
            session = await editor.new_session(str(machine.project))
            with pytest.raises(RpcError) as error:
                await editor.prompt(session.session_id, "Hello")
            await editor.prompt(session.session_id, "Hello again")

    assert error.value.code == INTERNAL_ERROR
    assert error.value.data["details"] == (
        f"{server.url} refused the key (401): Incorrect API key provided. Check the model's api_key, or OPENAI_API_KEY."
    )
    assert editor.text == "Better."
    assert "wrong" not in machine.stderr.read_text()


async def test_web_page_in_place_of_an_answer_is_reported(machine: "Machine") -> None:
    page = Raw([b"<!doctype html><title>Welcome to nginx!</title>\n"], {"content-type": "text/html"})
    async with ScriptedServer([page]) as server:
        machine.ask(server.url)
        async with machine.editor() as editor:
            session = await editor.new_session(str(machine.project))
            with pytest.raises(RpcError) as error:
                await editor.prompt(session.session_id, "Hello")

    assert error.value.code == INTERNAL_ERROR
    assert "it sent a web page instead of JSON; base_url usually ends in /v1" in error.value.data["details"]


async def test_refused_connection_is_reported_with_the_address(machine: "Machine") -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        machine.ask(url)
        async with machine.editor() as editor:
            session = await editor.new_session(str(machine.project))
            with pytest.raises(RpcError) as error:
                await editor.prompt(session.session_id, "Hello")

    assert error.value.code == INTERNAL_ERROR
    assert error.value.data["details"].startswith(f"Nothing answers at {url}.")


@pytest.mark.usefixtures("no_local_model")
async def test_endpoint_set_by_the_client_is_used_and_its_key_is_stored_nowhere(machine: "Machine"):
    key = "sk-of-the-client-1234"
    async with ScriptedServer([Reply(f"Your key is {key}.")]) as model:
        agent = await machine.agent("--unstable")
        async with machine.editor(agent) as editor:
            headers = {"Authorization": f"Bearer {key}"}
            wanted = SetProviderRequest(provider_id="main", api_type="openai", base_url=model.url, headers=headers)
            await editor.request("providers/set", wanted)
            session = await editor.new_session(str(machine.project))
            assert (await editor.prompt(session.session_id, "hi")).usage
        assert model.headers[0]["authorization"] == f"Bearer {key}"
    written = [file.read_bytes() for file in machine.home.rglob("*") if file.is_file()]
    assert any(session.session_id.encode() in data for data in written)
    assert not any(key.encode() in data for data in written)


async def test_crows_own_methods_are_announced_and_answered(machine: "Machine"):
    async with ScriptedServer([]) as model:
        machine.ask(model.url)
        async with machine.editor() as editor:
            told = await editor.initialize("editor", ClientCapabilities())
            session = await editor.new_session(str(machine.project))
            assert told.agent_capabilities.meta
            assert told.agent_capabilities.meta["crow"]["methods"] == [*METHODS]
            assert told.meta == {
                "steering": {"supported": True},
                "rewindSession": {"modes": ["files", "conversation", "both"]},
            }
            assert (await editor.request("_crow/usage", {"sessionId": session.session_id}))["calls"] == 0
            assert await editor.request("_crow/search", {"sessionId": session.session_id, "words": "crow"}) == {
                "hits": []
            }
            steer = make_steering_params(session.session_id, [TextBlock(text="no turn runs")])
            answer = {"outcome": "promptRequired", "reason": "noRunningTurn"}
            assert await editor.request("_session/steering", steer) == answer
            points = await editor.request("_session/rewind_points", {"sessionId": session.session_id})
            assert points == {"points": []}
            with pytest.raises(RpcError, match="Unknown message"):
                await editor.request("_session/rewind", {"sessionId": session.session_id, "messageId": "m"})


@pytest.mark.parametrize(
    ("config", "hears"), [("", False), ("audio = true", True), ("audio = 7", False), ("[[", False)]
)
async def test_audio_is_announced_if_a_configured_model_takes_it(machine: "Machine", config: str, hears: bool):
    machine.configure(f'[models.m]\nbase_url = "http://127.0.0.1:1/v1"\nmodel = "m"\n[models.m.quirks]\n{config}\n')
    async with machine.editor() as editor:
        told = await editor.initialize("editor", ClientCapabilities())
    assert told.agent_capabilities.prompt_capabilities.audio == hears


async def test_agent_survives_a_thousand_invalid_lines(machine: "Machine"):
    async with ScriptedServer([Reply("Still here.")]) as model:
        machine.ask(model.url)
        agent = await machine.agent()

        async def spoil() -> None:
            for line in INVALID_LINES * 40:
                agent.write(line + b"\n")
                await agent.drain()

        async with machine.editor(agent) as editor:
            spoiling = asyncio.ensure_future(spoil())
            session = await editor.new_session(str(machine.project))
            await editor.prompt(session.session_id, "Are you there?")
            await spoiling
            await editor.new_session(str(machine.project))
        assert editor.text == "Still here."
    assert agent.process.returncode == 0
    assert "Traceback" not in machine.stderr.read_text()
