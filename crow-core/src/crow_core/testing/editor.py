"""An editor that writes down what it is shown, and the shortest way from it to an agent."""

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from crow_core.acp.client import AcpClient
from crow_core.acp.connection import Handler, RpcError
from crow_core.acp.schema import (
    INTERNAL_ERROR,
    NOT_FOUND,
    AgentMessageChunk,
    AgentThoughtChunk,
    CancelledOutcome,
    ClientCapabilities,
    CompleteElicitationNotification,
    CreateElicitationRequest,
    CreateElicitationResponse,
    CreateTerminalRequest,
    CreateTerminalResponse,
    KillTerminalRequest,
    ReadTextFileRequest,
    ReadTextFileResponse,
    ReleaseTerminalRequest,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SelectedOutcome,
    SessionNotification,
    SessionUpdate,
    TerminalContent,
    TerminalOutputRequest,
    TerminalOutputResponse,
    TextBlock,
    ToolCall,
    ToolCallUpdate,
    WaitForTerminalExitRequest,
    WaitForTerminalExitResponse,
    WriteTextFileRequest,
)
from crow_core.acp.transports import Transport, memory_pair
from crow_core.agent import Agent
from crow_core.app import Crow

T = TypeVar("T")


@dataclass(eq=False)
class Terminal:
    """A command that runs for the agent."""

    process: Process
    limit: int | None
    """Bytes of the output to keep."""
    output: bytearray = field(default_factory=bytearray)
    truncated: bool = False

    def __post_init__(self) -> None:
        self.reading = asyncio.ensure_future(self.read())

    async def read(self) -> None:
        assert self.process.stdout
        while data := await self.process.stdout.read(65536):
            self.output += data
            if self.limit is not None and len(self.output) > self.limit:
                self.truncated = True
                del self.output[: -self.limit]

    async def ended(self) -> WaitForTerminalExitResponse:
        code = await self.process.wait()
        await self.reading
        if code < 0:
            return WaitForTerminalExitResponse(signal=signal.Signals(-code).name)
        return WaitForTerminalExitResponse(exit_code=code)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill the command and wait for its end."""
        self.kill()
        await self.ended()


class Editor(AcpClient):
    """An ACP client that records every update, answers permission questions as told, and has files and terminals.

    What of these it offers is for its capabilities to say: it answers also when it should not have been asked.
    """

    def __init__(self, transport: Transport, *, permit: str | None = "allow_once") -> None:
        super().__init__(
            transport,
            {
                "session/update": self.on_update,
                "session/request_permission": self.on_permission,
                "elicitation/create": self.on_elicitation,
                "elicitation/complete": self.on_complete,
                "fs/read_text_file": self.asked("fs/read_text_file", self.on_read),
                "fs/write_text_file": self.asked("fs/write_text_file", self.on_write),
                "terminal/create": self.asked("terminal/create", self.on_create),
                "terminal/output": self.asked("terminal/output", self.on_output),
                "terminal/wait_for_exit": self.asked("terminal/wait_for_exit", self.on_wait),
                "terminal/kill": self.asked("terminal/kill", self.on_kill),
                "terminal/release": self.asked("terminal/release", self.on_release),
            },
        )
        self.permit = permit
        """The kind of option to choose when asked; None leaves the question open until it is cancelled."""
        self.updates: list[SessionUpdate] = []
        self.questions: list[RequestPermissionRequest] = []
        self.cancelled_questions = 0
        self.answer: (
            CreateElicitationResponse | Callable[[CreateElicitationRequest], CreateElicitationResponse] | None
        ) = None
        """What is answered to a form or a page, or what gives it; None leaves it open until it is cancelled."""
        self.forms: list[CreateElicitationRequest] = []
        """The pages, too."""
        self.completed: list[str] = []
        """The pages whose business is done, by their ids."""
        self.requests: list[tuple[str, Any]] = []
        """What the agent asked of files and terminals: method and params, in order."""
        self.cancelled: list[str] = []
        """The methods of those that it took back."""
        self.waits: dict[str, asyncio.Event] = {}
        """Methods that are answered only when the event has been set."""
        self.refuses: set[str] = set()
        """Methods that are answered with an error."""
        self.buffers: dict[str, str] = {}
        """Texts with changes not saved yet, by path; other files are shown as they are on the disk."""
        self.on_save: Callable[[str], str] = str
        """What becomes of a text when it is saved."""
        self.terminals: dict[str, Terminal] = {}
        """Those not given back, by id."""
        self.opened = 0
        """How many there have been."""
        self.lost: list[str] = []
        """The terminals that an update named when they did not exist."""
        self._news = asyncio.Condition()

    async def on_update(self, notification: SessionNotification) -> None:
        self.updates.append(notification.update)
        if isinstance(notification.update, ToolCall | ToolCallUpdate):
            named = [
                part.terminal_id for part in notification.update.content or [] if isinstance(part, TerminalContent)
            ]
            self.lost += [terminal for terminal in named if terminal not in self.terminals]
        await self.spread()

    async def spread(self) -> None:
        """Have `until` look again."""
        async with self._news:
            self._news.notify_all()

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        self.questions.append(question)
        await self.spread()
        if self.permit is None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled_questions += 1
                return RequestPermissionResponse(outcome=CancelledOutcome())
        chosen = next(option for option in question.options if option.kind == self.permit)
        return RequestPermissionResponse(outcome=SelectedOutcome(option_id=chosen.option_id))

    async def on_elicitation(self, form: CreateElicitationRequest) -> CreateElicitationResponse:
        self.forms.append(form)
        async with self._news:
            self._news.notify_all()
        if self.answer is not None:
            return self.answer(form) if callable(self.answer) else self.answer
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled_questions += 1
            raise

    async def on_complete(self, notification: CompleteElicitationNotification) -> None:
        self.completed.append(notification.elicitation_id)
        async with self._news:
            self._news.notify_all()

    def asked(self, method: str, answer: Handler) -> Handler:
        """Answers a method, unless told otherwise."""

        async def handle(params: Any) -> Any:
            self.requests.append((method, params))
            await self.spread()
            try:
                if method in self.waits:
                    await self.waits[method].wait()
                if method in self.refuses:
                    raise RpcError(INTERNAL_ERROR, "No", details="not today")
                return await answer(params)
            except asyncio.CancelledError:
                self.cancelled.append(method)
                await self.spread()
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
        process = await asyncio.create_subprocess_exec(
            request.command,
            *request.args,
            env=os.environ | {variable.name: variable.value for variable in request.env},
            cwd=request.cwd or None,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
        )
        self.opened += 1
        id = f"terminal-{self.opened}"
        self.terminals[id] = Terminal(process, request.output_byte_limit or None)
        return CreateTerminalResponse(terminal_id=id)

    async def on_output(self, request: TerminalOutputRequest) -> TerminalOutputResponse:
        terminal = self.terminal(request.terminal_id)
        return TerminalOutputResponse(output=terminal.output.decode(errors="replace"), truncated=terminal.truncated)

    async def on_wait(self, request: WaitForTerminalExitRequest) -> WaitForTerminalExitResponse:
        return await self.terminal(request.terminal_id).ended()

    async def on_kill(self, request: KillTerminalRequest) -> None:
        self.terminal(request.terminal_id).kill()

    async def on_release(self, request: ReleaseTerminalRequest) -> None:
        await self.terminal(request.terminal_id).close()
        del self.terminals[request.terminal_id]
        await self.spread()

    def terminal(self, id: str) -> Terminal:
        try:
            return self.terminals[id]
        except KeyError:
            raise RpcError(NOT_FOUND, "Not found", details=f"There is no terminal {id!r}.") from None

    def methods(self) -> list[str]:
        """The methods of `requests`."""
        return [method for method, _ in self.requests]

    async def until(self, true: "Callable[[Editor], Any]") -> None:
        """Wait until something has been shown or asked."""
        async with self._news:
            await self._news.wait_for(lambda: true(self))

    def of(self, kind: type[T]) -> list[T]:
        """The updates of one kind."""
        return [update for update in self.updates if isinstance(update, kind)]

    @property
    def text(self) -> str:
        """What the agent said, without its thoughts."""
        return "".join(u.content.text for u in self.of(AgentMessageChunk) if isinstance(u.content, TextBlock))

    @property
    def thoughts(self) -> str:
        """What the agent thought aloud, and the notices."""
        return "".join(u.content.text for u in self.of(AgentThoughtChunk) if isinstance(u.content, TextBlock))

    def calls(self) -> dict[str, list[str]]:
        """The states each tool call went through, in order, by its id."""
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
) -> AsyncGenerator[Editor]:
    """Connect an editor to an agent of this app, in memory, and send `initialize`.

    Sets `crow.servers_wait`, the seconds that the first prompt waits for MCP servers: long enough for a busy machine.
    """
    crow.servers_wait = servers_wait
    ours, theirs = memory_pair()
    agent = asyncio.ensure_future(Agent(theirs, crow).serve())
    editor = Editor(ours, permit=permit)
    try:
        async with editor.serving():
            await editor.initialize("editor", capabilities or ClientCapabilities())
            yield editor
    finally:
        await asyncio.wait([agent])
        await crow.shut_down()
