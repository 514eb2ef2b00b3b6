"""Test `crow acp` with the official Python SDK's client, and our client with an agent made with that SDK."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import acp
import pytest
from acp.schema import (
    AgentMessageChunk,
    AllowedOutcome,
    AvailableCommandsUpdate,
    ClientCapabilities,
    ConfigOptionUpdate,
    CreateTerminalResponse,
    CurrentModeUpdate,
    EnvVariable,
    FileEditToolCallContent,
    FileSystemCapabilities,
    Implementation,
    PermissionOption,
    ReadTextFileResponse,
    RequestPermissionResponse,
    TerminalOutputResponse,
    TerminalToolCallContent,
    ToolCallProgress,
    ToolCallStart,
    ToolCallUpdate,
    WaitForTerminalExitResponse,
)
from crow_core.acp import schema
from crow_core.acp.connection import RpcError
from crow_core.acp.transports import spawn
from crow_core.testing import Editor, Failure, Reply, ScriptedCall, ScriptedServer

pytestmark = pytest.mark.anyio

ECHO = """
import asyncio
from typing import Any

import acp
from acp.schema import *


class Echo(acp.Agent):
    def on_connect(self, conn):
        self.client = conn
        self.cancelled = asyncio.Event()

    async def initialize(self, protocol_version, client_capabilities=None, client_info=None, **kwargs):
        info = Implementation(name=f"echo for {client_info.name}", version="1")
        return InitializeResponse(protocol_version=acp.PROTOCOL_VERSION, agent_info=info)

    async def new_session(self, cwd, **kwargs):
        modes = [SessionMode(id="loud", name="Loud"), SessionMode(id="soft", name="Soft")]
        return NewSessionResponse(
            session_id="echo", modes=SessionModeState(current_mode_id="soft", available_modes=modes)
        )

    async def set_session_mode(self, mode_id, session_id, **kwargs):
        update = CurrentModeUpdate(session_update="current_mode_update", current_mode_id=mode_id)
        await self.client.session_update(session_id, update)

    async def prompt(self, session_id, prompt, **kwargs):
        text = prompt[0].text
        if text == "wait":
            await self.say(session_id, "waiting")
            await self.cancelled.wait()
            return PromptResponse(stop_reason="cancelled")
        if text == "fail":
            raise acp.RequestError.internal_error({"details": "as you wished"})
        call = acp.start_tool_call("call_1", "Say it", kind="other", raw_input={"text": text})
        await self.client.session_update(session_id, call)
        options = [PermissionOption(option_id="go", name="Go", kind="allow_once")]
        tool_call = ToolCallUpdate(tool_call_id="call_1", title="Say it")
        answer = await self.client.request_permission(session_id, tool_call, options)
        done = acp.update_tool_call("call_1", status="completed", content=[acp.tool_content(acp.text_block(text))])
        await self.client.session_update(session_id, done)
        await self.say(session_id, f"{text}, {answer.outcome.option_id}")
        return PromptResponse(stop_reason="end_turn")

    async def say(self, session_id, text):
        await self.client.session_update(session_id, acp.update_agent_message_text(text))

    async def cancel(self, session_id, **kwargs):
        self.cancelled.set()


asyncio.run(acp.run_agent(Echo()))
"""


class Client(acp.Client):
    """Records updates and permission requests, and gives every permission."""

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.questions: list[tuple[ToolCallUpdate, list[PermissionOption]]] = []
        self._changed = asyncio.Condition()

    async def session_update(self, session_id: str, update: Any, **kwargs: Any) -> None:
        async with self._changed:
            self.updates.append(update)
            self._changed.notify_all()

    async def request_permission(
        self, session_id: str, tool_call: ToolCallUpdate, options: list[PermissionOption], **kwargs: Any
    ) -> RequestPermissionResponse:
        self.questions.append((tool_call, options))
        chosen = next(option for option in options if option.kind == "allow_once")
        return RequestPermissionResponse(outcome=AllowedOutcome(outcome="selected", option_id=chosen.option_id))

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until a condition holds; it is checked after every update."""
        async with self._changed:
            await self._changed.wait_for(condition)

    def of(self, *kinds: type[Any]) -> list[Any]:
        return [update for update in self.updates if isinstance(update, kinds)]

    @property
    def text(self) -> str:
        return "".join(update.content.text for update in self.of(AgentMessageChunk))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@asynccontextmanager
async def conversation(client: Client, server: ScriptedServer, home: Path) -> AsyncIterator[Any]:
    """Connect the SDK's client to `crow acp`; check at the end that it understood every update."""
    sent: list[Any] = []

    def observe(event: Any) -> None:
        if event.message.get("method") == "session/update":
            sent.append(event.message)

    env = {  # the SDK passes only a few variables of our environment
        "HOME": str(home),
        "CROW_HOME": str(home / "crow"),
        "CROW_SANDBOX": "off",
        "OPENAI_BASE_URL": server.url,
        "OPENAI_API_KEY": "key",
        "CROW_MODEL": "scripted",
    }
    with (home / "stderr.txt").open("wb") as stderr:  # the SDK's own pipe for it would never be read
        async with acp.spawn_agent_process(
            client,
            sys.executable,
            *("-m", "crow_cli", "acp"),
            env=env,
            transport_kwargs={"stderr": stderr.fileno(), "limit": 50 * 1024 * 1024, "shutdown_timeout": 60},
            observers=[observe],
        ) as (connection, process):
            yield connection
            await client.until(lambda: len(client.updates) == len(sent))
    assert process.returncode == 0
    assert (home / "stderr.txt").read_text() == ""


def command(line: str) -> Reply:
    call: ScriptedCall = {"name": "terminal", "arguments": {"command": line}}
    return Reply(tool_calls=[call])


async def test_client_initializes(tmp_path: Path) -> None:
    async with ScriptedServer([]) as server, conversation(Client(), server, tmp_path) as crow:
        agreed = await crow.initialize(
            protocol_version=1, client_info=Implementation(name="reference client", version="1")
        )

    assert agreed.protocol_version == 1
    assert agreed.agent_info.name == "crow"
    assert agreed.agent_capabilities.prompt_capabilities.image
    assert [method.id for method in agreed.auth_methods] == ["configured"]


async def test_client_sees_a_tool_call_from_the_permission_to_the_result(tmp_path: Path, project: Path) -> None:
    client = Client()
    async with (
        ScriptedServer([command("echo 42 | tee answer"), Reply("It is 42.", "Easy.")]) as server,
        conversation(client, server, tmp_path) as crow,
    ):
        await crow.initialize(protocol_version=1)
        session = await crow.new_session(cwd=str(project))
        response = await crow.prompt(session_id=session.session_id, prompt=[acp.text_block("What is it?")])

    assert response.stop_reason == "end_turn"
    assert client.text == "It is 42."
    assert (project / "answer").read_text() == "42\n"
    [(question, options)] = client.questions
    assert question.raw_input == {"command": "echo 42 | tee answer"}
    assert {option.kind for option in options} == {"allow_once", "allow_always", "reject_once", "reject_always"}
    calls = client.of(ToolCallStart, ToolCallProgress)
    assert {call.tool_call_id for call in calls} == {question.tool_call_id}
    assert [call.status for call in calls] == ["pending", "in_progress", "completed"]
    assert "42" in calls[-1].content[0].content.text
    assert [command.name for command in client.of(AvailableCommandsUpdate)[0].available_commands]


class EditorClient(Client):
    """A client with open files that have unsaved changes, and with a terminal that runs commands one by one."""

    def __init__(self, buffers: dict[str, str]) -> None:
        super().__init__()
        self.buffers = buffers
        self.saved: list[tuple[str, str]] = []
        self.commands: list[list[str]] = []
        self.outputs: dict[str, tuple[str, int | None]] = {}
        self.released = asyncio.Event()

    async def read_text_file(self, path: str, **kwargs: Any) -> ReadTextFileResponse:
        if path not in self.buffers:
            raise acp.RequestError.resource_not_found(path)
        return ReadTextFileResponse(content=self.buffers[path])

    async def write_text_file(self, path: str, content: str, **kwargs: Any) -> None:
        self.saved.append((path, content))
        self.buffers[path] = content
        await asyncio.to_thread(Path(path).write_text, content)

    async def create_terminal(
        self,
        command: str,
        args: list[str] | None = None,
        env: list[EnvVariable] | None = None,
        cwd: str | None = None,
        **kwargs: Any,
    ) -> CreateTerminalResponse:
        self.commands.append([command, *(args or [])])
        process = await asyncio.create_subprocess_exec(
            command, *(args or []), cwd=cwd, env={each.name: each.value for each in env or []}, stdout=PIPE
        )
        output, _ = await process.communicate()
        self.outputs[f"t{len(self.commands)}"] = output.decode(), process.returncode
        return CreateTerminalResponse(terminal_id=f"t{len(self.commands)}")

    async def wait_for_terminal_exit(self, terminal_id: str, **kwargs: Any) -> WaitForTerminalExitResponse:
        return WaitForTerminalExitResponse(exit_code=self.outputs[terminal_id][1])

    async def terminal_output(self, terminal_id: str, **kwargs: Any) -> TerminalOutputResponse:
        return TerminalOutputResponse(output=self.outputs[terminal_id][0], truncated=False)

    async def release_terminal(self, terminal_id: str, **kwargs: Any) -> None:
        del self.outputs[terminal_id]
        self.released.set()


@pytest.mark.slow
async def test_tools_use_the_files_and_terminals_of_the_client(tmp_path: Path, project: Path) -> None:
    path = project / "a.py"
    path.write_text("saved\n")
    client = EditorClient({str(path): "not saved\n"})
    replace: ScriptedCall = {
        "name": "file_editor",
        "arguments": {"command": "str_replace", "path": "a.py", "old_str": "not saved", "new_str": "edited"},
    }
    async with (
        ScriptedServer([Reply(tool_calls=[replace]), command("cat a.py; exit 3"), Reply("Done.")]) as server,
        conversation(client, server, tmp_path) as crow,
    ):
        await crow.initialize(
            protocol_version=1,
            client_capabilities=ClientCapabilities(
                fs=FileSystemCapabilities(read_text_file=True, write_text_file=True), terminal=True
            ),
        )
        session = await crow.new_session(cwd=str(project))
        await crow.prompt(session_id=session.session_id, prompt=[acp.text_block("Edit it.")])
        await client.released.wait()

    assert client.saved == [(str(path), "edited\n")]
    assert [(command[0], command[-1]) for command in client.commands] == [("bash", "cat a.py; exit 3")]
    assert server.requests[-1]["messages"][-1]["content"] == "edited\n[exit code 3]"
    ends = [update for update in client.of(ToolCallProgress) if update.status in ("completed", "failed")]
    assert [end.status for end in ends] == ["completed", "failed"]
    diff, terminal = [content for end in ends for content in end.content]
    assert isinstance(diff, FileEditToolCallContent)
    assert (diff.path, diff.old_text, diff.new_text) == (str(path), "not saved\n", "edited\n")
    assert isinstance(terminal, TerminalToolCallContent)
    assert terminal.terminal_id == "t1"
    assert not client.outputs


async def test_client_cancels_a_command(tmp_path: Path, project: Path) -> None:
    client = Client()
    async with (
        ScriptedServer([command("sleep 600"), Reply("Still here.")]) as server,
        conversation(client, server, tmp_path) as crow,
    ):
        await crow.initialize(protocol_version=1)
        session = await crow.new_session(cwd=str(project))
        turn = asyncio.create_task(crow.prompt(session_id=session.session_id, prompt=[acp.text_block("Wait.")]))
        await client.until(lambda: "in_progress" in [call.status for call in client.of(ToolCallProgress)])

        await crow.cancel(session_id=session.session_id)

        assert (await turn).stop_reason == "cancelled"
        assert client.of(ToolCallProgress)[-1].status == "failed"
        again = await crow.prompt(session_id=session.session_id, prompt=[acp.text_block("And now?")])
        assert again.stop_reason == "end_turn"


@pytest.mark.slow
async def test_client_sets_the_mode_and_gets_no_permission_requests(tmp_path: Path, project: Path) -> None:
    client = Client()
    async with (
        ScriptedServer([command("touch ran"), Reply("Done.")]) as server,
        conversation(client, server, tmp_path) as crow,
    ):
        await crow.initialize(protocol_version=1)
        session = await crow.new_session(cwd=str(project))
        await crow.set_session_mode(session_id=session.session_id, mode_id="yolo")
        await crow.prompt(session_id=session.session_id, prompt=[acp.text_block("Touch it.")])
        options = await crow.set_config_option(config_id="mode", session_id=session.session_id, value="plan")

    assert session.modes.current_mode_id == "ask"
    assert (project / "ran").exists()
    assert client.questions == []
    assert [update.current_mode_id for update in client.of(CurrentModeUpdate)] == ["yolo", "plan"]
    assert {option.id: option.current_value for option in options.config_options}["mode"] == "plan"
    assert {option.id for option in client.of(ConfigOptionUpdate)[0].config_options} == {"mode", "model"}


async def test_client_gets_the_reason_of_a_failed_model_call(tmp_path: Path, project: Path) -> None:
    async with (
        ScriptedServer([Failure(401, {"error": {"message": "Incorrect API key provided"}})]) as server,
        conversation(Client(), server, tmp_path) as crow,
    ):
        await crow.initialize(protocol_version=1)
        session = await crow.new_session(cwd=str(project))
        with pytest.raises(acp.RequestError) as refusal:
            await crow.prompt(session_id=session.session_id, prompt=[acp.text_block("Hello")])

    assert "refused the key (401): Incorrect API key provided" in refusal.value.data["details"]


@asynccontextmanager
async def connect_to_echo(tmp_path: Path) -> AsyncIterator[Editor]:
    """Connect our client to an agent made with the SDK."""
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    child = await spawn(sys.executable, [str(script)], close_timeout=60)
    editor = Editor(child)
    async with editor.serving():
        agreed = await editor.initialize("crow", schema.ClientCapabilities())
        assert agreed.agent_info
        assert agreed.agent_info.name == "echo for crow"
        yield editor
    assert child.process.returncode == 0


async def test_our_client_permits_a_tool_call_of_the_agent(tmp_path: Path) -> None:
    async with connect_to_echo(tmp_path) as editor:
        session = await editor.new_session(str(tmp_path))
        response = await editor.prompt(session.session_id, "hello")

    assert response.stop_reason == "end_turn"
    assert editor.text == "hello, go"
    assert [question.tool_call.title for question in editor.questions] == ["Say it"]
    [call] = editor.of(schema.ToolCall)
    assert call.raw_input == {"text": "hello"}
    [end] = editor.of(schema.ToolCallUpdate)
    assert end.status == "completed"
    assert end.content == [schema.BlockContent(content=schema.TextBlock(text="hello"))]


async def test_our_client_cancels_a_turn(tmp_path: Path) -> None:
    async with connect_to_echo(tmp_path) as editor:
        session = await editor.new_session(str(tmp_path))
        turn = asyncio.create_task(editor.prompt(session.session_id, "wait"))
        await editor.until(lambda editor: editor.text == "waiting")

        await editor.cancel(session.session_id)

        assert (await turn).stop_reason == "cancelled"


async def test_our_client_sets_a_mode_and_gets_an_error(tmp_path: Path) -> None:
    async with connect_to_echo(tmp_path) as editor:
        session = await editor.new_session(str(tmp_path))
        assert session.modes
        await editor.set_mode(session.session_id, "loud")
        with pytest.raises(RpcError) as error:
            await editor.prompt(session.session_id, "fail")

    assert session.modes.current_mode_id == "soft"
    assert [update.current_mode_id for update in editor.of(schema.CurrentModeUpdate)] == ["loud"]
    assert error.value.data == {"details": "as you wished"}
