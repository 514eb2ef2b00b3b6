"""Other ACP agents as tools: the model gives a task to a program such as `opencode acp`.

The client sees through the call what the program does. Each call starts the program anew, and ends it.
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from os.path import expanduser as expand_user
from time import monotonic
from typing import Any, NamedTuple

from crow_core import __version__
from crow_core.acp.agent_process import START_TIMEOUT, AgentProcess, start_agent_process
from crow_core.acp.client import AcpClient, describe_login
from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.record import TurnRecord
from crow_core.acp.schema import (
    AUTH_REQUIRED,
    CLIENT_METHODS,
    CancelledOutcome,
    CreateTerminalRequest,
    CreateTerminalResponse,
    InitializeResponse,
    PromptResponse,
    ReleaseTerminalRequest,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SelectedOutcome,
    SessionNotification,
    ToolCallUpdate,
    WriteTextFileRequest,
)
from crow_core.app import Crow
from crow_core.masking import find_secrets, mask
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Delta, make_legal_name
from crow_core.models.chat import ModelCall, ModelRequest
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.text import to_line
from msgspec import UNSET

from crow_extensions.agent_settings import AgentSettings
from crow_extensions.nested import NestedClient

NAME = "other_agents"
DESCRIPTION = """\
{about}

Give this agent a part of the work. It has tools of its own and works in the same folder, but knows nothing of this \
conversation: say all it needs, and what it shall report. You get its last message alone; the user sees what it does."""
SCHEMA = {
    "type": "object",
    "properties": {"prompt": {"type": "string", "description": "the task"}},
    "required": ["prompt"],
}
CANCEL_GRACE = 3.0
"""Seconds that an agent may take to end a turn that was cancelled, before its process is ended."""
TITLE_LIMIT = 80
"""Characters of a call's title."""
FILE_LIMIT = 10_000_000
"""Bytes of a file whose changes can be undone."""
ENDED = ("completed", "failed")


class FileVersion(NamedTuple):
    """The content of a file at a time."""

    digest: str | None
    """Its SHA-256; None if there was no file."""
    data: bytes | None
    """None if there was no file, or if it was too long to keep."""


class AgentTool(NamedTuple):
    """Another agent, as a tool."""

    agent: str
    """Its name in the configuration."""
    settings: AgentSettings


TOOLS = StateKey[tuple[Server | None, dict[str, AgentTool]]]("other_agents", lambda: (None, {}))


class ForeignModel:
    """The model of another agent, which is known only by the agent's name and is never asked from here."""

    window: int | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        raise NotImplementedError  # `Model` requires the method; the other agent asks its own model


def other_agents(
    crow: Crow,
    *,
    find: Callable[[Session], Mapping[str, AgentSettings]],
    env: Mapping[str, str],
    hidden: Sequence[str] = (),
) -> None:
    """Offer other ACP agents to the model, each as the tool `ask_NAME`.

    `find` returns the settings of the agents of a session, by name. `env` is the environment of their processes; the
    variables that `hidden` names are left out.
    """
    given = {name: value for name, value in env.items() if name not in hidden}

    @crow.mcp_servers
    def offer(session: Session) -> Sequence[Server] | None:
        tools = {
            make_legal_name(f"ask_{name}"): AgentTool(name, settings)
            for name, settings in find(session).items()
            if not settings.disabled
        }
        if not tools:
            return None
        definitions = [to_definition(name, tool) for name, tool in tools.items()]
        secrets = find_secrets(*(tool.settings for tool in tools.values()))
        server = Server(NAME, None, definitions=definitions, built_in=True, secrets=secrets)
        session.state[TOOLS] = server, tools
        return [server]

    @crow.before_tool
    async def run(session: Session, tool_call: ToolCall) -> ToolResult | None:
        server, tools = session.state[TOOLS]
        if server is None or tool_call.tool is None or not tool_call.is_for(server):
            return None
        prompt = tool_call.arguments.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            return ToolResult.error("No agent was started: the prompt is empty.")
        task = OtherAgentTask(session, tool_call, tools[tool_call.tool.definition["name"]], prompt)
        return await task.run(given)


def to_definition(name: str, tool: AgentTool) -> dict[str, Any]:
    """Make the definition of the tool that stands for an agent."""
    words = [tool.settings.command, *tool.settings.args]
    about = tool.settings.description or f"{tool.agent} is another agent, the program {' '.join(words)!r}."
    return {
        "name": name,
        "description": DESCRIPTION.format(about=about),
        "inputSchema": SCHEMA,
        "_meta": {"crow/kind": "execute"},
    }


def read_version(path: str) -> FileVersion:
    """Read a file as it is now."""
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_LIMIT + 1)
            if len(data) <= FILE_LIMIT:
                return FileVersion(hashlib.sha256(data).hexdigest(), data)
            file.seek(0)
            return FileVersion(hashlib.file_digest(file, "sha256").hexdigest(), None)
    except FileNotFoundError:
        return FileVersion(None, None)
    except OSError:
        return FileVersion("unreadable", None)


def to_change(path: str, before: FileVersion, after: FileVersion) -> dict[str, Any]:
    """Convert two versions of a file to a change, as the log has it; without the texts if one was too long."""
    change: dict[str, Any] = {"path": path, "before": before.digest, "after": after.digest}
    if any(version.digest and version.data is None for version in (before, after)):
        return change
    try:
        old, new = (version.data and version.data.decode() for version in (before, after))
    except UnicodeDecodeError:
        change["encoding"] = "latin-1"  # which has a character for every byte
        old, new = (version.data and version.data.decode("latin-1") for version in (before, after))
    return {**change, "old": old if before.digest is None else old or "", "new": new or ""}


class OtherAgentTask:
    """A task that another agent works on for a tool call."""

    def __init__(self, session: Session, tool_call: ToolCall, tool: AgentTool, prompt: str) -> None:
        self.session, self.tool_call, self.prompt = session, tool_call, prompt
        self.name, self.settings = tool
        self.title = to_line(f"{self.name}: {prompt.strip().splitlines()[0]}")[:TITLE_LIMIT]
        self.words = [expand_user(tool.settings.command), *tool.settings.args]
        self.cwd = os.path.join(session.cwd, expand_user(tool.settings.cwd))
        self.client = NestedClient(session, tool_call.id)
        self.record = TurnRecord()
        self.is_ending = False
        """Whether the turn was cancelled: questions are answered so without asking."""
        self.questions: set[asyncio.Task[RequestPermissionResponse]] = set()
        """The permissions that the user is asked for."""
        self.terminals: set[str] = set()
        """The ids of the client's terminals that the agent has created and not released."""
        self.writing = asyncio.Lock()
        """Held while the client writes a file."""

    async def run(self, env: Mapping[str, str]) -> ToolResult:
        """Start the agent, let it work, and end it. Returns its last message, or why there is none."""
        update = ToolCallUpdate(tool_call_id=self.tool_call.id, title=self.title, status="in_progress")
        await self.session.update(update)
        try:
            process = await start_agent_process(self.words, {**env, **self.settings.env}, self.cwd)
            acp = AcpClient(process, self.list_handlers())
            async with acp.serving():
                result = await self.work(acp, process)
        except OSError as error:
            result = self.fail(f"{self.words[0]} cannot be started: {error.strerror or error}.")
        finally:
            await self.settle()
        return ToolResult(result.content, result.is_error, {"crow/title": self.title})

    async def work(self, acp: AcpClient, process: AgentProcess) -> ToolResult:
        """Open a session and run its only turn."""
        initialized: InitializeResponse | None = None
        try:
            async with asyncio.timeout(START_TIMEOUT):
                initialized = await acp.initialize(f"crow {__version__}", self.client.capabilities)
                id = (await acp.new_session(self.session.cwd)).session_id
            response = await self.take_turn(acp, id)
        except TimeoutError:
            return self.fail(process.describe_silence(START_TIMEOUT))
        except ConnectionClosed:
            return self.fail(await process.describe_end())
        except RpcError as error:
            if error.code == AUTH_REQUIRED and initialized:
                return self.fail(describe_login(error, initialized.auth_methods))
            notes = " ".join(getattr(error, "__notes__", ()))
            return self.fail(
                f"{error.message}{f': {notes}' if notes else ''}".rstrip(".") + "." + process.quote_stderr()
            )
        if response is None:
            return self.fail(f"it was not done within {self.settings.timeout:g} seconds, and was cancelled.")
        if response.stop_reason != "end_turn":
            return self.fail(f"it did not come to its end ({response.stop_reason}).")
        return ToolResult.text(self.record.text or "The agent has ended its turn without a message.")

    async def take_turn(self, acp: AcpClient, id: str) -> PromptResponse | None:
        """Send the task and wait for the end of the turn; None if the time was up. A cancel ends the turn, too."""
        request: ModelRequest = {"messages": [{"role": "user", "content": self.prompt}]}
        model_call = ModelCall(ForeignModel(self.name), request, NAME, started=monotonic())
        self.session.log.record(model_call)
        turn = asyncio.ensure_future(acp.prompt(id, self.prompt))
        turn.add_done_callback(lambda turn: turn.cancelled() or turn.exception())  # a second cancel leaves it alone
        try:
            await asyncio.wait([turn], timeout=self.settings.timeout)
            return turn.result() if turn.done() else None
        finally:
            if not turn.done():
                await self.cancel(acp, id, turn)
            self.count(model_call, turn)

    async def cancel(self, acp: AcpClient, id: str, turn: "asyncio.Task[PromptResponse]") -> None:
        """Cancel the turn, and wait a moment for its end."""
        self.is_ending = True
        for question in self.questions:
            question.cancel()
        with suppress(ConnectionClosed):
            await acp.cancel(id)
        await asyncio.wait([turn], timeout=CANCEL_GRACE)
        turn.cancel()
        await asyncio.wait([turn])

    def count(self, model_call: ModelCall, turn: "asyncio.Task[PromptResponse]") -> None:
        """Record what the turn has used, like a model call, so that budgets and totals count it."""
        failed = turn.cancelled() or turn.exception()
        usage = UNSET if failed else turn.result().usage
        if usage:
            model_call.usage = {"prompt_tokens": usage.input_tokens, "completion_tokens": usage.output_tokens}
        if self.record.cost is not None:
            model_call.cost = self.record.cost, self.record.currency
        model_call.ended, model_call.error = monotonic(), str(failed or "")
        model_call.reply = {"role": "assistant", "content": mask(self.record.text, self.session.secrets)}
        self.session.log.record(model_call)

    def fail(self, reason: str) -> ToolResult:
        """Make the result of a task that was not done, with the end of what the agent wrote."""
        words = f"\n\nIts last words:\n\n{self.client.text}" if self.client.text else ""
        return ToolResult.error(f"The agent {self.name} failed: {reason}{words}")

    async def settle(self) -> None:
        """Show the calls that the agent left open as failed, and release its terminals."""
        for id, call in self.record.calls.items():
            if call.status not in ENDED:
                failed = ToolCallUpdate(tool_call_id=self.client.to_parent_id(id), status="failed")
                await self.session.send(failed)
        for terminal in [*self.terminals]:
            request = ReleaseTerminalRequest(session_id=self.session.id, terminal_id=terminal)
            with suppress(RpcError, ConnectionClosed):
                await self.release_terminal(request)

    def list_handlers(self) -> dict[str, Callable[[Any], Any]]:
        """List the functions that answer the agent: most pass the request on to the session's client."""
        capabilities = self.client.capabilities
        offered = {
            "fs/read_text_file": capabilities.fs.read_text_file,
            "fs/write_text_file": capabilities.fs.write_text_file,
            "elicitation/": bool(capabilities.elicitation),
            "terminal/": capabilities.terminal,
        }
        methods = [
            method for method in CLIENT_METHODS if any(method.startswith(start) for start in offered if offered[start])
        ]
        passing: dict[str, Callable[[Any], Any]] = {
            method: partial(self.client.request, method) for method in methods if method != "elicitation/complete"
        }
        if capabilities.terminal:
            passing |= {"terminal/create": self.create_terminal, "terminal/release": self.release_terminal}
        if capabilities.fs.write_text_file:
            passing["fs/write_text_file"] = self.write
        return {
            **passing,
            "session/update": self.on_update,
            "session/request_permission": self.on_permission,
            "elicitation/complete": partial(self.client.notify, "elicitation/complete"),
        }

    async def on_update(self, notification: SessionNotification) -> None:
        self.record.add(notification.update)
        await self.client.notify("session/update", notification)

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        """Pass on a question, unless the mode of the session asks nothing, or the turn was cancelled."""
        mode = self.session.options.find_mode()
        allow = next((option.option_id for option in question.options if option.kind == "allow_once"), "")
        if mode and mode.get() == "yolo" and allow:
            return RequestPermissionResponse(outcome=SelectedOutcome(option_id=allow))
        if self.is_ending:
            return RequestPermissionResponse(outcome=CancelledOutcome())
        asking = asyncio.ensure_future(self.client.ask_permission(question))
        asking.add_done_callback(lambda asking: asking.cancelled() or asking.exception())
        self.questions.add(asking)
        try:
            return await asking
        except asyncio.CancelledError:
            asking.cancel()
            if not self.is_ending:
                raise
            return RequestPermissionResponse(outcome=CancelledOutcome())
        finally:
            self.questions.discard(asking)

    async def write(self, request: WriteTextFileRequest) -> Any:
        """Let the client write a file, and append to the log what that has changed, so that it can be undone."""
        path = await asyncio.to_thread(os.path.realpath, request.path)
        async with self.writing:
            before = await asyncio.to_thread(read_version, path)
            try:
                return await self.client.request("fs/write_text_file", request)
            finally:
                after = await asyncio.to_thread(read_version, path)
                if after.digest != before.digest:
                    change = mask(to_change(path, before, after), self.session.secrets)
                    self.session.log.append(
                        {"crow": {"kind": "changes", "call": self.tool_call.id, "changes": [change]}}
                    )
                    await self.session.log.written()

    async def create_terminal(self, request: CreateTerminalRequest) -> CreateTerminalResponse:
        created: CreateTerminalResponse = await self.client.request("terminal/create", request)
        self.terminals.add(created.terminal_id)
        return created

    async def release_terminal(self, request: ReleaseTerminalRequest) -> Any:
        self.terminals.discard(request.terminal_id)
        return await self.client.request("terminal/release", request)
