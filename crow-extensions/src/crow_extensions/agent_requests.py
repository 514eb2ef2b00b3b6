"""The requests of another agent to its client: files, terminals, permissions and forms."""

import asyncio
import hashlib
import os
import shlex
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

import crow_system as system
import msgspec
from crow_core.acp.client import answer_permission
from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.record import TurnRecord
from crow_core.acp.schema import (
    INVALID_PARAMS,
    NOT_FOUND,
    REQUEST_CANCELLED,
    CancelledOutcome,
    CompleteElicitationNotification,
    CreateElicitationRequest,
    CreateElicitationResponse,
    CreateTerminalRequest,
    CreateTerminalResponse,
    EnvVariable,
    ReadTextFileRequest,
    ReleaseTerminalRequest,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SessionNotification,
    WriteTextFileRequest,
)
from crow_core.errors import ElicitationError, EndTurn
from crow_core.masking import mask
from crow_core.mcp.elicitation import FormAnswer
from crow_core.mcp.tool import Tool, ToolCall, make_title
from crow_core.messages.message import RawToolCall
from crow_core.paths import is_below
from crow_core.session.bridge import to_form
from crow_core.session.session import Session
from crow_core.text import clean_lines
from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from crow_extensions.nested import NestedClient

T = TypeVar("T")

FILE_LIMIT = 10_000_000
"""Bytes of a file whose changes can be undone."""
QUESTIONS_LIMIT = 20
"""Forms and pages that an agent may ask for during one task."""
FORM_LIMIT = 100_000
"""Bytes of a form, as JSON."""
TEXT_LIMIT = 4_000
"""Characters of a text of an agent that a question shows."""
REFUSED = -32000
"""The JSON-RPC error code for what is not allowed."""
FILE_TOOL = {"_meta": {"crow/kind": {"view": "read", "create": "edit"}}}
"""The definition of the tool that an agent's requests for files are judged as."""
COMMAND_TOOL = {"_meta": {"crow/kind": "execute"}}
"""The definition of the tool that an agent's commands are judged as."""
HARMLESS_VARIABLES = frozenset(
    (
        "TERM",
        "NO_COLOR",
        "FORCE_COLOR",
        "CLICOLOR",
        "COLUMNS",
        "LINES",
        "LANG",
        "LC_ALL",
        "TZ",
        "CI",
        "PYTHONUNBUFFERED",
    )
)
"""Variables that do not change what a command runs."""
SHELLS = ("sh", "bash", "dash")


class FileVersion(NamedTuple):
    """The content of a file at a time."""

    digest: str | None
    """Its SHA-256; None if there was no file."""
    data: bytes | None
    """None if there was no file, or if it was too long to keep."""


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


class AgentRequests:
    """Answers the requests of another agent that works on a tool call, as the rules and the user allow."""

    def __init__(
        self, session: Session, tool_call: ToolCall, name: str, client: NestedClient, record: TurnRecord
    ) -> None:
        self.session, self.tool_call, self.name = session, tool_call, name
        self.client, self.record = client, record
        self.is_ending = False
        """True if the turn was cancelled: questions are answered so without asking."""
        self.questions: set[asyncio.Task[Any]] = set()
        """The question to the user, and the call to judge."""
        self.counts = count(1)
        self.forms = 0
        """The number of forms and pages that the agent has asked for."""
        self.pages: dict[str, str] = {}
        """Our ids of the pages that the user was sent to, by those of the agent."""
        self.terminals: set[str] = set()
        """The ids of the client's terminals that the agent has created and not released."""
        self.writing = asyncio.Lock()
        """Held while the client writes a file."""

    def end_questions(self) -> None:
        """Answer all questions from now on as those of a cancelled turn."""
        self.is_ending = True
        for question in self.questions:
            question.cancel()

    async def release_terminals(self) -> None:
        """Release the terminals that the agent has left."""
        for terminal in [*self.terminals]:
            request = ReleaseTerminalRequest(session_id=self.session.id, terminal_id=terminal)
            with suppress(RpcError, ConnectionClosed):
                await self.release_terminal(request)

    def list_handlers(self) -> dict[str, Callable[[Any], Any]]:
        """List the functions that answer the agent, for what the session's client offers."""
        capabilities, handlers = self.client.capabilities, dict[str, Callable[[Any], Any]]()
        if capabilities.fs.read_text_file:
            handlers["fs/read_text_file"] = self.read
        if capabilities.fs.write_text_file:
            handlers["fs/write_text_file"] = self.write
        if capabilities.terminal:
            handlers |= {"terminal/create": self.create_terminal, "terminal/release": self.release_terminal}
            for method in ("terminal/output", "terminal/wait_for_exit", "terminal/kill"):
                handlers[method] = partial(self.use_terminal, method)
        if capabilities.elicitation:
            handlers["elicitation/create"] = self.on_elicitation
        return {
            **handlers,
            "session/update": self.on_update,
            "session/request_permission": self.on_permission,
            "elicitation/complete": self.on_complete,
        }

    async def on_update(self, notification: SessionNotification) -> None:
        self.record.add(notification.update)
        await self.client.notify("session/update", notification)

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        """Pass on a question, unless the mode of the session asks nothing, or the turn was cancelled."""
        mode = self.session.options.find_mode()
        allow = next((option.option_id for option in question.options if option.kind == "allow_once"), "")
        if mode and mode.get() == "yolo" and allow:
            return answer_permission(allow)
        if not question.options:
            raise RpcError(INVALID_PARAMS, "Invalid params", details="The question has no options.")
        known = self.record.calls.get(question.tool_call.tool_call_id)
        title = question.tool_call.title or (known.title if known else "") or "an unnamed tool call"
        question = replace(question, tool_call=replace(question.tool_call, title=f"{self.client.name}: {title}"))
        try:
            return await self.ask(self.client.ask_permission(question))
        except EndTurn:
            return RequestPermissionResponse(outcome=CancelledOutcome())

    async def ask(self, asking: Coroutine[Any, Any, T]) -> T:
        """Wait for an answer of the user, or for a judgement. Raises EndTurn if the turn was cancelled."""
        task = asyncio.ensure_future(asking)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self.questions.add(task)
        if self.is_ending:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            if not self.is_ending:
                raise
            raise EndTurn("cancelled") from None
        finally:
            self.questions.discard(task)

    async def allow(self, name: str, definition: Mapping[str, Any], arguments: dict[str, Any]) -> ToolCall:
        """Judge a request of the agent as a call of our own tool: by rules, mode, answers and taint.

        Returns the call, whose command the user may have changed. Raises RpcError if it is not allowed.
        """
        id = f"{self.client.to_parent_id('request')}-{next(self.counts)}"
        use: RawToolCall = {
            "id": id,
            "type": "function",
            "function": {"name": name, "arguments": msgspec.json.encode(arguments).decode()},
        }
        server = self.tool_call.tool and self.tool_call.tool.server
        tool = Tool(name, server, {"name": name, **definition})
        kind, title = tool.kind(arguments), self.client.name
        tool_call = ToolCall(use, arguments, kind=kind, tool_title=title, tool=tool, original=dict(arguments))
        try:
            tool_call, refusal = await self.ask(self.session.decide(tool_call))
        except EndTurn:
            raise RpcError(REQUEST_CANCELLED, "The turn was cancelled") from None
        finally:
            self.session.folders.starts.pop(id, None)
        if refusal is not None:
            reason = str(refusal.meta.get("crow/denied") or "it is not allowed").rstrip(".")
            raise RpcError(REFUSED, "Not allowed", details=f"{make_title(name, arguments)} is not allowed: {reason}.")
        await self.session.log.written()
        return tool_call

    def check_place(self, path: str, folders: Sequence[str]) -> None:
        """Check that a path leads into one of the folders in which our own tools work. Raises RpcError."""
        if not os.path.isabs(path):
            raise RpcError(INVALID_PARAMS, "Invalid params", details=f"path must be absolute, not {path!r}.")
        full = os.path.realpath(path.replace("\0", "?"))
        if not any(is_below(full, os.path.realpath(folder)) for folder in folders):
            raise RpcError(REFUSED, "Not allowed", details=f"{path} is outside of the folders of this session.")

    async def read(self, request: ReadTextFileRequest) -> Any:
        """Let the client read a file, if our own tools may."""
        self.check_place(request.path, [*self.session.folders.for_tools(), *self.session.folders.readable])
        await self.allow("file_editor", FILE_TOOL, {"command": "view", "path": request.path})
        return await self.client.request("fs/read_text_file", request)

    async def write(self, request: WriteTextFileRequest) -> Any:
        """Let the client write a file, if our own tools may.

        Its changes are appended to the log, so that they can be undone.
        """
        self.check_place(request.path, self.session.folders.for_tools())
        arguments = {"command": "create", "path": request.path, "file_text": request.content}
        await self.allow("file_editor", FILE_TOOL, arguments)
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
        """Run a command in a terminal of the client, if our own tools may."""
        command, folder = to_command_line(request), request.cwd or self.session.cwd
        tool_call = await self.allow("terminal", COMMAND_TOOL, {"command": command, "cwd": folder})
        env = self.session.folders.environments.pop(tool_call.id, {})
        request.env = [
            *request.env,
            *(EnvVariable(name=name, value=value) for name, value in env.items() if value is not None),
        ]
        if tool_call.is_changed:
            request.command, *request.args = system.make_terminal_command(
                system.find_shell(), tool_call.arguments["command"]
            )
        created: CreateTerminalResponse = await self.client.request("terminal/create", request)
        self.terminals.add(created.terminal_id)
        return created

    async def use_terminal(self, method: str, request: Any) -> Any:
        """Pass on a request about a terminal that the agent has created. Raises RpcError."""
        if request.terminal_id not in self.terminals:
            raise RpcError(NOT_FOUND, "Not found", details=f"There is no terminal {request.terminal_id!r}.")
        return await self.client.request(method, request)

    async def release_terminal(self, request: ReleaseTerminalRequest) -> Any:
        released = await self.use_terminal("terminal/release", request)
        self.terminals.discard(request.terminal_id)
        return released

    async def on_elicitation(self, request: CreateElicitationRequest) -> CreateElicitationResponse:
        """Ask the user for the agent, with its name, if a tool of ours might ask so."""
        self.forms += 1
        try:
            if self.forms > QUESTIONS_LIMIT:
                raise ElicitationError(f"it has asked {QUESTIONS_LIMIT} times already")
            answer = await self.ask(self.elicit(request))
        except (ElicitationError, msgspec.ValidationError) as error:
            if self.forms <= QUESTIONS_LIMIT + 1:
                why = str(error).rstrip(".")
                await self.session.notice(f"A question of the agent {self.name} was declined: {why}.", "warning")
            return CreateElicitationResponse(action="decline")
        except EndTurn:
            return CreateElicitationResponse(action="cancel")
        if request.elicitation_id and answer.action == "accept":
            self.pages[request.elicitation_id] = answer.id
        is_filled_in = answer.action == "accept" and request.mode == "form"
        return CreateElicitationResponse(action=answer.action, content=answer.content if is_filled_in else UNSET)

    async def elicit(self, request: CreateElicitationRequest) -> FormAnswer:
        """Ask the user to fill in a form, or to visit a page. Raises ElicitationError."""
        text = self.tidy(f"{self.client.name}: {request.message}")
        id = self.tool_call.id
        if request.mode == "url":
            return await self.session.user.elicit(text, url=request.url or "about:blank", tool_call_id=id)
        schema = to_builtins(request.requested_schema)
        if len(msgspec.json.encode(schema)) > FORM_LIMIT:
            raise ElicitationError("its form is too long")
        form = to_form(schema, self.tidy)
        return await self.session.user.elicit(text, form=form, tool_call_id=id)

    def tidy(self, text: str) -> str:
        """Mask secrets in a text of the agent, remove control characters, and shorten it."""
        return clean_lines(mask(text, self.session.secrets))[:TEXT_LIMIT]

    async def on_complete(self, notification: CompleteElicitationNotification) -> None:
        if page := self.pages.pop(notification.elicitation_id, ""):
            await self.session.user.complete(page)


def to_command_line(request: CreateTerminalRequest) -> str:
    """Convert a request for a terminal to the command line that it runs, with the variables that may change it."""
    match [request.command, *request.args]:
        case [line]:
            pass
        case [shell, "-c", line] if shell in SHELLS:
            pass
        case words:
            line = shlex.join(words)
    variables = [
        f"{variable.name}={shlex.quote(variable.value)}"
        for variable in request.env
        if variable.name not in HARMLESS_VARIABLES
    ]
    return f"env {' '.join(variables)} {shlex.join(['sh', '-c', line])}" if variables else line
