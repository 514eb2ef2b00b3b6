"""The session of the terminal for the process of its page, which is a second client of it.

The page speaks ACP with the terminal, which passes its requests on to the agent. Each of the two shows the actions of
the other; a question goes to both, and the first answer holds. Sessions that the page opens itself are the page's
alone.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from crow_core.acp.connection import Connection, ConnectionClosed, RpcError
from crow_core.acp.schema import (
    AGENT_METHODS,
    CLIENT_METHODS,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    AgentMessageChunk,
    AgentThoughtChunk,
    CancelNotification,
    CloseSessionRequest,
    ConfigOptionUpdate,
    ContentBlock,
    CurrentModeUpdate,
    InitializeRequest,
    InitializeResponse,
    PromptRequest,
    PromptResponse,
    RequestPermissionRequest,
    RequestPermissionResponse,
    ResumeSessionRequest,
    ResumeSessionResponse,
    SelectedOutcome,
    SessionNotification,
    SessionUpdate,
    SetSessionConfigOptionRequest,
    SetSessionModeRequest,
    TextBlock,
    ToolCall,
    ToolCallUpdate,
    UserMessageChunk,
)
from crow_core.acp.shared_methods import REWIND_METHOD
from crow_core.acp.transports import Transport
from msgspec import UNSET
from msgspec.structs import asdict, replace

from crow_terminal.chat_base import get_time
from crow_terminal.chat_client import AgentQuestion, ChatClient
from crow_terminal.effects import Effect
from crow_terminal.page_methods import JOIN_METHOD, OPENED_METHOD, TURN_METHOD
from crow_terminal.state import State


class LinkedTerminal(Protocol):
    """The terminal, as its page needs it."""

    client: ChatClient | None
    session_id: str
    state: State

    def perform(self, wanted: Sequence[Effect]) -> None: ...

    async def prompt_for_page(self, client: ChatClient, blocks: Sequence[ContentBlock]) -> PromptResponse: ...


class LastTurn:
    """The updates of the last turn, as few as show the same."""

    def __init__(self) -> None:
        self.started = 0
        """Milliseconds since 1970; 0 if there was no turn yet."""
        self.runs = False
        self.updates: list[SessionUpdate] = []
        self._calls: dict[str, int] = {}

    def add(self, update: SessionUpdate) -> None:
        last = self.updates[-1] if self.updates else None
        match update:
            case AgentMessageChunk() | AgentThoughtChunk() | UserMessageChunk():
                known = last if type(last) is type(update) else None
                if (
                    isinstance(known, AgentMessageChunk | AgentThoughtChunk | UserMessageChunk)
                    and known.message_id == update.message_id
                    and isinstance(known.content, TextBlock)
                    and isinstance(update.content, TextBlock)
                ):
                    whole = replace(known.content, text=known.content.text + update.content.text)
                    self.updates[-1] = replace(known, content=whole)
                    return
            case ToolCall() | ToolCallUpdate():
                at = self._calls.setdefault(update.tool_call_id, len(self.updates))
                known = self.updates[at] if at < len(self.updates) else None
                if isinstance(known, ToolCall | ToolCallUpdate):
                    items = asdict(update).items()
                    changed = {name: value for name, value in items if value is not UNSET and value is not None}
                    self.updates[at] = replace(known, **changed)
                    return
            case _:
                pass
        self.updates.append(update)


class PageLink:
    """Serves the page, if there is one, and notes what it would have to show."""

    def __init__(self, terminal: LinkedTerminal) -> None:
        self._terminal = terminal
        self._turn = LastTurn()
        self._questions: dict[int, AgentQuestion] = {}
        """The questions of the terminal's session that are open."""
        self._asking: dict[int, asyncio.Task[None]] = {}
        """The tasks that ask these questions on the page."""
        self._sending: set[asyncio.Task[None]] = set()
        self._connection: Connection | None = None
        self._is_joined = False
        self._sessions: set[str] = set()
        """The sessions that the page has opened itself."""

    async def serve(self, transport: Transport) -> None:
        """Serve the page until it ends; the sessions that it has opened are closed then."""
        own = {
            "initialize": self._initialize,
            "session/resume": self._resume,
            "session/prompt": self._prompt,
            "session/cancel": self._cancel,
            "session/close": self._close,
            "session/set_mode": self._set_mode,
            "session/set_config_option": self._set_option,
            JOIN_METHOD: self._join,
            REWIND_METHOD: self._rewind,
        }
        handlers = {**{method: partial(self._forward, method) for method in AGENT_METHODS}, **own}
        connection = Connection(transport, AGENT_METHODS, CLIENT_METHODS, handlers, fallback=self._forward)
        self._connection = connection
        try:
            await connection.serve()
        finally:
            self._connection, self._is_joined = None, False
            sessions, self._sessions = self._sessions, set()
            for session in sessions:
                with suppress(RpcError, ConnectionClosed):
                    await self._forward("session/close", CloseSessionRequest(session_id=session))

    # What happens in the terminal

    def receive(self, notification: SessionNotification) -> None:
        """The agent has sent an update."""
        if notification.session_id != self._terminal.session_id:
            self._send("session/update", notification)
            return
        if self._turn.runs:
            self._turn.add(notification.update)
        if self._is_joined:
            self._send("session/update", notification)

    def begin_turn(self, prompt: Sequence[ContentBlock], *, from_page: bool) -> None:
        """A turn begins; the page shows its own prompts itself."""
        self._turn = LastTurn()
        self._turn.started, self._turn.runs = time.time_ns() // 1_000_000, True
        for block in prompt:
            self._turn.add(update := UserMessageChunk(content=block))
            if self._is_joined and not from_page:
                self._send_update(update)
        if self._is_joined and not from_page:
            self._send_turn()

    def end_turn(self, stop_reason: str, *, from_page: bool) -> None:
        self._turn.runs = False
        if self._is_joined and not from_page:
            self._send_turn(stop_reason)

    def ask(self, id: int, request: AgentQuestion) -> bool:
        """Ask a question of the agent on the page, and return whether the terminal asks it, too."""
        if self._connection and request.session_id in self._sessions:
            self._ask(id, request)
            return False
        self._questions[id] = request
        if self._is_joined:
            self._ask(id, request)
        return True

    def end_question(self, id: int) -> None:
        """A question is answered, or it needs no answer."""
        self._questions.pop(id, None)
        if asking := self._asking.pop(id, None):
            asking.cancel()

    def reload(self, *, restarted: bool = False) -> None:
        """The terminal has another session now, or one that is shorter than before.

        If the agent was `restarted`, the sessions that the page has opened are closed.
        """
        self._turn, self._is_joined = LastTurn(), False
        if restarted:
            self._sessions.clear()
        self._send(OPENED_METHOD, make_opened(self._terminal) | {"restarted": restarted})

    def send_options(self) -> None:
        """The terminal has set the mode or an option."""
        if self._is_joined:
            options = self._terminal.state.options
            if options.modes:
                self._send_update(CurrentModeUpdate(current_mode_id=options.modes.current_mode_id))
            self._send_update(ConfigOptionUpdate(config_options=[*options.config]))

    # What the page wants

    async def _initialize(self, request: InitializeRequest) -> InitializeResponse:
        known: InitializeResponse = self._client.initialized
        return replace(known, auth_methods=[], meta=(known.meta or {}) | make_opened(self._terminal))

    async def _join(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Send what has happened since the last turn began, or that the session is to be read again."""
        if params.get("sessionId") != self._terminal.session_id or params.get("started") != self._turn.started:
            self._send(OPENED_METHOD, make_opened(self._terminal))
            return {}
        self._is_joined = True
        for update in self._turn.updates:
            self._send_update(update)
        if self._turn.started:
            self._send_turn()
        for id, question in self._questions.items():
            self._ask(id, question)
        return {}

    async def _resume(self, request: ResumeSessionRequest) -> Any:
        if request.session_id != self._terminal.session_id:
            self._sessions.add(request.session_id)
            return await self._forward("session/resume", request)
        options = self._terminal.state.options
        meta = {"crow": {"started": self._turn.started}}
        return ResumeSessionResponse(modes=options.modes, config_options=[*options.config], meta=meta)

    async def _prompt(self, request: PromptRequest) -> PromptResponse:
        if request.session_id != self._terminal.session_id:
            return await self._forward("session/prompt", request)
        if self._terminal.state.phase != "ready":
            details = "A turn runs in the terminal. Say it again after that."
            raise RpcError(INVALID_REQUEST, "A turn runs", details=details)
        return await self._terminal.prompt_for_page(self._client, request.prompt)

    async def _cancel(self, notification: CancelNotification) -> None:
        if notification.session_id == self._terminal.session_id:
            self._terminal.perform(self._terminal.state.cancel(get_time()))
        else:
            await self._client.cancel(notification.session_id)

    async def _close(self, request: CloseSessionRequest) -> Any:
        if request.session_id == self._terminal.session_id:
            self._is_joined = False
            return {}
        self._sessions.discard(request.session_id)
        return await self._forward("session/close", request)

    async def _set_mode(self, request: SetSessionModeRequest) -> Any:
        answer = await self._forward("session/set_mode", request)
        if request.session_id == self._terminal.session_id:
            self._terminal.state.options.set_mode(request.mode_id)
            self._terminal.perform([])
        return answer

    async def _set_option(self, request: SetSessionConfigOptionRequest) -> Any:
        answer = await self._forward("session/set_config_option", request)
        if request.session_id == self._terminal.session_id:
            self._terminal.state.options.take(answer.config_options)
            self._terminal.perform([])
        return answer

    async def _rewind(self, params: dict[str, Any]) -> Any:
        answer = await self._forward(REWIND_METHOD, params)
        if params.get("sessionId") == self._terminal.session_id and not params.get("dryRun"):
            self._turn = LastTurn()
            self._terminal.perform(self._terminal.state.remark("The last turn was undone in the browser.", "warning"))
        return answer

    async def _forward(self, method: str, params: Any) -> Any:
        answer = await self._client.request(method, params)
        if method in ("session/new", "session/fork", "session/load"):
            opened = getattr(answer, "session_id", "") or getattr(params, "session_id", "")
            self._sessions.add(str(opened))
        return answer

    @property
    def _client(self) -> ChatClient:
        if self._terminal.client is None:
            raise RpcError(INTERNAL_ERROR, "No agent", details="The agent has ended. Enter in the terminal starts it.")
        return self._terminal.client

    def _ask(self, id: int, request: AgentQuestion) -> None:
        if self._connection:
            self._asking[id] = asyncio.ensure_future(self._pass_answer(self._connection, id, request))

    async def _pass_answer(self, connection: Connection, id: int, request: AgentQuestion) -> None:
        """Ask on the page, and answer the agent unless the terminal was faster."""
        is_permission = isinstance(request, RequestPermissionRequest)
        method = "session/request_permission" if is_permission else "elicitation/create"
        with suppress(RpcError, ConnectionClosed):
            response = await connection.request(method, request)
            if client := self._terminal.client:
                client.answer(id, response)
            self._asking.pop(id, None)
            if self._questions.pop(id, None):
                answer = name_answer(request, response)
                self._terminal.perform(self._terminal.state.withdraw(id, get_time(), answer))

    def _send_update(self, update: SessionUpdate) -> None:
        self._send("session/update", SessionNotification(session_id=self._terminal.session_id, update=update))

    def _send_turn(self, stop_reason: str = "") -> None:
        session, runs = self._terminal.session_id, self._turn.runs
        self._send(TURN_METHOD, {"sessionId": session, "runs": runs, "stopReason": stop_reason})

    def _send(self, method: str, params: Any) -> None:
        if self._connection:
            task = asyncio.ensure_future(notify(self._connection, method, params))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)


def make_opened(terminal: LinkedTerminal) -> dict[str, Any]:
    """Make the params that name the terminal's session."""
    return {OPENED_METHOD: terminal.session_id}


async def notify(connection: Connection, method: str, params: Any) -> None:
    with suppress(ConnectionClosed):
        await connection.notify(method, params)


def name_answer(request: AgentQuestion, response: Any) -> str:
    """Describe an answer that was given on the page."""
    name = "answered"
    if isinstance(request, RequestPermissionRequest) and isinstance(response, RequestPermissionResponse):
        outcome = response.outcome
        if isinstance(outcome, SelectedOutcome):
            name = next((one.name for one in request.options if one.option_id == outcome.option_id), name)
    return f"{name}, in the browser"
