"""An ACP client that records what it receives, and its connection to an agent."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from crow_core.acp.client import AcpClient, answer_permission
from crow_core.acp.client_terminals import ClientTerminal, ClientTerminals
from crow_core.acp.connection import Handler, RpcError
from crow_core.acp.schema import (
    INTERNAL_ERROR,
    NOT_FOUND,
    PROTOCOL_VERSION,
    AgentMessageChunk,
    AgentThoughtChunk,
    ClientCapabilities,
    CompleteElicitationNotification,
    CreateElicitationRequest,
    CreateElicitationResponse,
    CreateTerminalRequest,
    CreateTerminalResponse,
    ReadTextFileRequest,
    ReadTextFileResponse,
    ReleaseTerminalRequest,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SessionNotification,
    SessionUpdate,
    TerminalContent,
    TextBlock,
    ToolCall,
    ToolCallUpdate,
    WriteTextFileRequest,
)
from crow_core.acp.transports import Transport, memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow

T = TypeVar("T")


class Editor(AcpClient):
    """An ACP client that records every update, answers permission requests, and has files and terminals.

    It answers requests for files and terminals even if its capabilities do not offer them.
    """

    def __init__(self, transport: Transport, *, permit: str | None = "allow_once") -> None:
        self._terminals = terminals = ClientTerminals(os.environ)
        super().__init__(
            transport,
            {
                "session/update": self.on_update,
                "session/request_permission": self.on_permission,
                "elicitation/create": self.on_elicitation,
                "elicitation/complete": self.on_complete,
                "fs/read_text_file": self.record_requests("fs/read_text_file", self.on_read),
                "fs/write_text_file": self.record_requests("fs/write_text_file", self.on_write),
                "terminal/create": self.record_requests("terminal/create", self.on_create),
                "terminal/output": self.record_requests("terminal/output", terminals.output),
                "terminal/wait_for_exit": self.record_requests("terminal/wait_for_exit", terminals.wait_for_exit),
                "terminal/kill": self.record_requests("terminal/kill", terminals.kill),
                "terminal/release": self.record_requests("terminal/release", self.on_release),
            },
        )
        self.permit = permit
        """The kind of the option that answers a permission request; None leaves it open until it is cancelled."""
        self.updates: list[SessionUpdate] = []
        self.questions: list[RequestPermissionRequest] = []
        self.cancelled_questions = 0
        self.answer: (
            CreateElicitationResponse | Callable[[CreateElicitationRequest], CreateElicitationResponse] | None
        ) = None
        """The answer to a form or a page, or a function that returns it; None leaves it open until it is cancelled."""
        self.forms: list[CreateElicitationRequest] = []
        """All received forms and pages."""
        self.completed: list[str] = []
        """The ids of the pages that are completed."""
        self.requests: list[tuple[str, Any]] = []
        """The agent's requests for files and terminals: method and params, oldest first."""
        self.cancelled: list[str] = []
        """The methods of those requests that the agent cancelled."""
        self.waits: dict[str, asyncio.Event] = {}
        """Events that delay the answers to a method until they are set, by method."""
        self.refuses: set[str] = set()
        """Methods that are answered with an error."""
        self.buffers: dict[str, str] = {}
        """Unsaved texts, by path; other files are read from the disk."""
        self.on_save: Callable[[str], str] = str
        """Converts a text when it is saved."""
        self.terminals: dict[str, ClientTerminal] = terminals.opened
        """The terminals that are not released, by id."""
        self.opened_terminals = 0
        """The number of terminals created so far."""
        self.missing_terminals: list[str] = []
        """The ids of terminals that an update named when they did not exist."""
        self._changed = asyncio.Condition()

    async def on_update(self, notification: SessionNotification) -> None:
        self.updates.append(notification.update)
        if isinstance(notification.update, ToolCall | ToolCallUpdate):
            named = [
                part.terminal_id for part in notification.update.content or [] if isinstance(part, TerminalContent)
            ]
            self.missing_terminals += [terminal for terminal in named if terminal not in self.terminals]
        await self.notify_waiters()

    async def notify_waiters(self) -> None:
        """Make `until` check its condition again."""
        async with self._changed:
            self._changed.notify_all()

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        self.questions.append(question)
        await self.notify_waiters()
        if self.permit is None or "session/request_permission" in self.waits:
            try:
                await self.waits.get("session/request_permission", asyncio.Event()).wait()
            except asyncio.CancelledError:
                self.cancelled_questions += 1
                return answer_permission()
        chosen = next(option for option in question.options if option.kind == self.permit)
        return answer_permission(chosen.option_id)

    async def on_elicitation(self, form: CreateElicitationRequest) -> CreateElicitationResponse:
        self.forms.append(form)
        async with self._changed:
            self._changed.notify_all()
        if self.answer is not None:
            if "elicitation/create" in self.waits:
                await self.waits["elicitation/create"].wait()
            return self.answer(form) if callable(self.answer) else self.answer
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled_questions += 1
            raise

    async def on_complete(self, notification: CompleteElicitationNotification) -> None:
        self.completed.append(notification.elicitation_id)
        async with self._changed:
            self._changed.notify_all()

    def record_requests(self, method: str, answer: Handler) -> Handler:
        """Wrap a handler so that its requests are recorded, and delayed or refused as `waits` and `refuses` say."""

        async def handle(params: Any) -> Any:
            self.requests.append((method, params))
            await self.notify_waiters()
            try:
                if method in self.waits:
                    await self.waits[method].wait()
                if method in self.refuses:
                    raise RpcError(INTERNAL_ERROR, "ServerRefusal", details=f"{method} is in `refuses`.")
                return await answer(params)
            except asyncio.CancelledError:
                self.cancelled.append(method)
                await self.notify_waiters()
                raise

        return handle

    async def on_read(self, request: ReadTextFileRequest) -> ReadTextFileResponse:
        if (text := self.buffers.get(request.path)) is None:
            try:
                text = (await asyncio.to_thread(Path(request.path).read_bytes)).decode()
            except (OSError, UnicodeDecodeError) as error:
                raise RpcError(NOT_FOUND, "Not found", details=str(error)) from error
        return ReadTextFileResponse(content=text)

    async def on_write(self, request: WriteTextFileRequest) -> None:
        await asyncio.to_thread(Path(request.path).write_bytes, self.on_save(request.content).encode())
        self.buffers.pop(request.path, None)

    async def on_create(self, request: CreateTerminalRequest) -> CreateTerminalResponse:
        self.opened_terminals += 1
        return await self._terminals.create(request)

    async def on_release(self, request: ReleaseTerminalRequest) -> None:
        await self._terminals.release(request)
        await self.notify_waiters()

    def list_requested_methods(self) -> list[str]:
        """Return the methods of `requests`."""
        return [method for method, _ in self.requests]

    async def until(self, condition: "Callable[[Editor], Any]") -> None:
        """Wait until `condition(self)` is true; it is checked after every update and request."""
        async with self._changed:
            await self._changed.wait_for(lambda: condition(self))

    def of(self, kind: type[T]) -> list[T]:
        """Return the updates of one type."""
        return [update for update in self.updates if isinstance(update, kind)]

    @property
    def text(self) -> str:
        """The agent's text, without reasoning."""
        return "".join(u.content.text for u in self.of(AgentMessageChunk) if isinstance(u.content, TextBlock))

    @property
    def thoughts(self) -> str:
        """The agent's reasoning, and the notices."""
        return "".join(u.content.text for u in self.of(AgentThoughtChunk) if isinstance(u.content, TextBlock))

    def calls(self) -> dict[str, list[str]]:
        """Return the statuses of each tool call, oldest first, by its id."""
        states: dict[str, list[str]] = {}
        for update in self.updates:
            if isinstance(update, ToolCall | ToolCallUpdate) and update.status:
                states.setdefault(update.tool_call_id, []).append(update.status)
        return states


@asynccontextmanager
async def connect(
    crow: Crow,
    *,
    permit: str | None = "allow_once",
    capabilities: ClientCapabilities | None = None,
    servers_wait: float = 60.0,
    version: int = PROTOCOL_VERSION,
) -> AsyncGenerator[Editor]:
    """Connect an editor to an agent of this app, in memory, and send `initialize` with the `version` of ACP.

    Sets `crow.servers_wait`, the seconds that the first prompt waits for MCP servers: long enough for a busy machine.
    """
    crow.servers_wait = servers_wait
    ours, theirs = memory_pair()
    agent = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
    editor = Editor(ours, permit=permit)
    try:
        async with editor.serving():
            await editor.initialize("editor", capabilities or ClientCapabilities(), version=version)
            yield editor
    finally:
        await asyncio.wait([agent])
        await crow.shut_down()
