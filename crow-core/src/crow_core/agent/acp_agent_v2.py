"""The agent's side of a connection that speaks ACP version 2, over the sessions of an `AcpAgent`.

Version 2 is a draft. Imported only when a client asks for it.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct, to_builtins

from crow_core.acp import schema, schema_v2
from crow_core.acp.connection import Connection, ConnectionClosed, Handler, RpcError
from crow_core.acp.decoding import to_raw
from crow_core.acp.schema import INVALID_PARAMS, AgentMessageChunk, AgentThoughtChunk, SessionNotification
from crow_core.acp.shared_methods import STEERING_METHOD, make_steering_params
from crow_core.acp.to_v2 import (
    CANCELLABLE,
    FINAL,
    find_command,
    find_turn,
    name_terminal,
    name_thought,
    split_off_terminal,
    tells_background,
    to_background,
    to_call_fields,
    to_capabilities,
    to_commands,
    to_config_options,
    to_end_updates,
    to_initialized,
    to_output_chunk,
    to_permission_request,
    to_server,
    to_update,
    to_whole_updates,
)
from crow_core.agent.app_source import AppSource
from crow_core.agent.client_turn import run_turn
from crow_core.agent.request_params import parse_params, parse_replay_from
from crow_core.agent.rpc_errors import to_turn_rpc_error
from crow_core.agent.several_clients import ORDER, PromptOrder
from crow_core.app import Crow
from crow_core.errors import ConfigError, ModelError, PromptError, StoreError
from crow_core.hooks import call_function
from crow_core.masking import mask
from crow_core.messages.message import Message
from crow_core.session.background_work import BACKGROUND, RunningWork
from crow_core.session.log import new_id
from crow_core.session.output import TURN_NOTES
from crow_core.session.session import Session
from crow_core.trace import TRACE, extract_trace

SAME = (schema.UserMessageChunk, schema.UsageUpdate)
"""Updates that both versions write in the same way, in addition to chunks of the agent's messages."""


OUTPUT_LIMIT = 30_000
"""Characters of the output of a command in the background that are sent at once."""
OUTPUT_INTERVAL = 0.5
"""Seconds between two updates of the output of a command in the background."""


@dataclass(eq=False)
class SessionView:
    """A session as a client of version 2 is told about it."""

    session: Session
    runs: bool = False
    """True while a turn runs that another client has begun, or nobody, such as that of a timer."""
    questions: int = 0
    """The questions that the client has not answered."""
    commands: set[str] = field(default_factory=set[str])
    """The tool calls that run and that a terminal shows."""
    background: dict[str, RunningWork] = field(default_factory=dict[str, RunningWork])
    """The work in the background that the client knows of, by the ids of the tool calls that began it."""
    shown: dict[str, int] = field(default_factory=dict[str, int])
    """The position up to which the output of a command in the background was sent, by the id of its tool call."""

    @property
    def order(self) -> PromptOrder:
        """The prompts of the session, which enter its conversation one after the other."""
        return self.session.state[ORDER]

    @property
    def is_busy(self) -> bool:
        """True while foreground work runs."""
        return self.runs or self.order.lock.locked()

    @property
    def state(self) -> str:
        """The state of the foreground work."""
        return "idle" if not self.is_busy else "requires_action" if self.questions else "running"

    def note_command(self, update: schema.ToolCall | schema.ToolCallUpdate) -> None:
        """Note whether a tool call runs that a terminal shows."""
        if update.status in FINAL:
            self.commands.discard(update.tool_call_id)
        elif find_command(update):
            self.commands.add(update.tool_call_id)

    def make_update(self, **more: Any) -> schema_v2.StateUpdate:
        """Make the update that tells the state of the foreground work, and the background."""
        background = [*map(to_background, self.background, self.background.values())]
        fields: dict[str, Any] = {"state": self.state, "background": background, **more}
        return schema_v2.StateUpdate(**fields)


class FirstVersion(Protocol):
    """The agent of version 1 (`AcpAgent`), as far as version 2 uses it."""

    source: AppSource
    capabilities: schema.ClientCapabilities
    sessions: dict[str, Session]
    connection: Connection

    async def crow(self) -> Crow: ...
    def session(self, id: str) -> Session: ...
    def read_prompt(self, params: schema.PromptRequest, crow: Crow) -> Message: ...
    async def initialize(self, params: dict[str, Any]) -> Struct: ...
    async def authenticate(self, params: schema.AuthenticateRequest) -> schema.AuthenticateResponse: ...
    async def logout(self, params: schema.LogoutRequest) -> schema.LogoutResponse: ...
    async def new_session(self, params: schema.NewSessionRequest) -> schema.NewSessionResponse: ...
    async def reopen_session(self, params: schema.ResumeSessionRequest, start: str | None) -> Session: ...
    def list_others(self, session: Session) -> Sequence[object]: ...
    async def close_session(self, params: schema.CloseSessionRequest) -> schema.CloseSessionResponse: ...
    async def list_sessions(self, params: schema.ListSessionsRequest) -> schema.ListSessionsResponse: ...
    async def delete_session(self, params: schema.DeleteSessionRequest) -> schema.DeleteSessionResponse: ...
    async def cancel(self, params: schema.CancelNotification) -> None: ...
    async def set_config_option(
        self, params: schema.SetSessionConfigOptionRequest
    ) -> schema.SetSessionConfigOptionResponse: ...


class AcpAgentV2:
    """Answers the requests of a client of version 2, and converts what sessions tell it."""

    def __init__(self, agent: FirstVersion) -> None:
        self._agent = agent
        self._views: dict[str, SessionView] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._send = agent.connection.notify
        self._thinking: Any = None
        """The id of the last thought in version 1, which is that of its message."""
        self._thought = ""
        """The id of the last thought in version 2."""

    def make_handlers(self) -> Mapping[str, Handler]:
        """Make the handlers of the methods that a client of version 2 calls, but for `initialize`."""
        return {
            "auth/login": self.log_in,
            "auth/logout": self.log_out,
            "session/new": self.new_session,
            "session/list": self.list_sessions,
            "session/resume": self.resume_session,
            "session/close": self.close_session,
            "session/prompt": self.prompt,
            "session/cancel": self.cancel,
            "session/set_config_option": self.set_config_option,
            "tool_call/cancel": self.cancel_tool_call,
            "terminal/cancel": self.cancel_terminal,
            **({"session/delete": self.delete_session} if self._agent.source.announced.stored else {}),
        }

    def begin(self, params: dict[str, Any]) -> schema.ClientCapabilities:
        """Speak version 2 from now on. Return what the client can do in the terms of version 1. Raises RpcError."""
        request, handlers = parse_params(params, schema_v2.InitializeRequest), self.make_handlers()
        methods = {**schema_v2.AGENT_METHODS, "initialize": schema.Method(dict, Struct)}
        handlers = {"initialize": self._agent.initialize, **handlers}
        self._agent.connection.speak(methods, schema_v2.CLIENT_METHODS, handlers)
        return to_capabilities(request.capabilities)

    def convert_initialized(self, response: schema.InitializeResponse) -> schema_v2.InitializeResponse:
        """Convert the answer to `initialize`; it says that version 2 is an experiment."""
        converted = to_initialized(response)
        known = converted.capabilities.meta or {}
        converted.capabilities.meta = {**known, "crow": {**known.get("crow", {}), "experimental": True}}
        return converted

    async def log_in(self, params: schema_v2.LoginAuthRequest) -> None:
        await self._agent.authenticate(schema.AuthenticateRequest(method_id=params.method_id))

    async def log_out(self, params: schema_v2.LogoutAuthRequest) -> None:
        await self._agent.logout(schema.LogoutRequest())

    async def new_session(self, params: schema_v2.NewSessionRequest) -> schema_v2.NewSessionResponse:
        opened = await self._agent.new_session(
            schema.NewSessionRequest(cwd=params.cwd, meta=params.meta, **convert_servers(params))
        )
        return schema_v2.NewSessionResponse(session_id=opened.session_id, **self.describe(opened.session_id))

    async def list_sessions(self, params: schema_v2.ListSessionsRequest) -> schema_v2.ListSessionsResponse:
        request = schema.ListSessionsRequest(cwd=params.cwd, cursor=params.cursor, meta=params.meta)
        found = await self._agent.list_sessions(request)
        return schema_v2.ListSessionsResponse(sessions=found.sessions, next_cursor=found.next_cursor)

    async def delete_session(self, params: schema_v2.DeleteSessionRequest) -> None:
        await self._agent.delete_session(schema.DeleteSessionRequest(session_id=params.session_id))

    async def resume_session(self, params: schema_v2.ResumeSessionRequest) -> schema_v2.ResumeSessionResponse:
        """Open a stored session; replay its messages first, all or from one on, if the client wants that."""
        start = parse_replay_from(to_builtins(params.replay_from)) if params.replay_from else None
        self._views.pop(params.session_id, None)
        request = schema.ResumeSessionRequest(
            session_id=params.session_id, cwd=params.cwd, meta=params.meta, **convert_servers(params)
        )
        session = await self._agent.reopen_session(request, start)
        await self._show_background(session.id)
        return schema_v2.ResumeSessionResponse(**self.describe(session.id))

    def to_whole(self, session: Session, updates: Iterable[schema.SessionUpdate]) -> "Iterator[Any]":
        """Convert the updates of a replay."""
        view, found = self.view(session), [*updates]
        for update in found:
            if isinstance(update, schema.ToolCall | schema.ToolCallUpdate):
                view.note_command(update)
        return to_whole_updates(found, session.cwd, [work.call for work in session.state[BACKGROUND].list_open()])

    def describe(self, id: str) -> dict[str, Any]:
        """Make the part of an answer that tells the options and the slash commands of a session."""
        session = self._agent.session(id)
        options = session.options.to_config_options(self._agent.capabilities)
        return {
            "config_options": to_config_options(options),
            "available_commands": to_commands(session.list_commands()),
        }

    async def close_session(self, params: schema_v2.CloseSessionRequest) -> None:
        if (view := self._views.pop(params.session_id, None)) and not self._agent.list_others(view.session):
            view.order.cancel_waiting()
        await self._agent.close_session(schema.CloseSessionRequest(session_id=params.session_id))

    async def set_config_option(
        self, params: schema_v2.SetSessionConfigOptionRequest
    ) -> schema_v2.SetSessionConfigOptionResponse:
        if not isinstance(params.value, str | bool):
            raise RpcError(INVALID_PARAMS, "Unknown value", details="The value of an option is text, true or false.")
        request = schema.SetSessionConfigOptionRequest(
            session_id=params.session_id, config_id=params.config_id, value=params.value, type="boolean"
        )
        answer = await self._agent.set_config_option(request)
        return schema_v2.SetSessionConfigOptionResponse(config_options=to_config_options(answer.config_options))

    async def prompt(self, params: schema_v2.PromptRequest) -> schema_v2.PromptResponse:
        """Put a prompt into the conversation: into the running turn if that takes it, else into a turn after it."""
        session, crow = self._agent.session(params.session_id), await self._agent.crow()
        request = schema.PromptRequest(session_id=session.id, prompt=params.prompt, meta=params.meta)
        message = self._agent.read_prompt(request, crow)
        view = self.view(session)
        async with view.order.wait():
            if view.is_busy and (joined := await join_turn(crow, session, request)):
                return schema_v2.PromptResponse(message_id=joined)
            await view.order.lock.acquire()
        message.setdefault("crow", {})["id"] = id = new_id()
        TRACE.set(extract_trace(params.meta or {}))
        self._begin(self._run(view, crow, message, params.prompt))
        return schema_v2.PromptResponse(message_id=id)

    async def _run(self, view: SessionView, crow: Crow, message: Message, blocks: list[schema.ContentBlock]) -> None:
        """Run the turn of a prompt, and tell the client its message, its states and its end."""
        session, end = view.session, dict[str, Any](state="idle")
        id = message.get("crow", {}).get("id", "")
        TURN_NOTES.set(notes := dict[str, Any]())
        try:
            await self.send(session.id, schema_v2.UserMessage(message_id=id, content=blocks))
            await self.send(session.id, view.make_update(state="running"))
            end["stop_reason"] = await run_turn(self._agent, crow, session, message, in_order=False)
        except asyncio.CancelledError:
            end["stop_reason"] = "cancelled"
        except (ModelError, StoreError, PromptError, ConfigError) as error:
            told = to_turn_rpc_error(error)
            end["stop_reason"] = "error"
            end["error"] = schema.Error(code=told.code, message=told.to_sentence(), data=told.data)
        except ConnectionClosed:
            pass  # nobody is told
        finally:
            if notes:
                end["meta"] = {"crow": notes}
            try:
                with suppress(ConnectionClosed):
                    await self.send(session.id, view.make_update(**end))
            finally:
                view.order.lock.release()

    async def cancel(self, params: schema_v2.CancelSessionNotification) -> None:
        if view := self._views.get(params.session_id):
            view.order.cancel_waiting()
        await self._agent.cancel(schema.CancelNotification(session_id=params.session_id))

    async def cancel_tool_call(self, params: schema_v2.CancelToolCallRequest) -> None:
        """Cancel one tool call; the turn goes on."""
        session = self._agent.session(params.session_id)
        work = self.view(session).background.get(params.tool_call_id)
        if work and work.kind == "agent":
            self._stop(work)
        elif not session.toolbox.cancel(params.tool_call_id):
            details = f"No tool call {params.tool_call_id[:100]!r} runs in this session."
            raise RpcError(INVALID_PARAMS, "Not cancellable", details=details)

    async def cancel_terminal(self, params: schema_v2.CancelTerminalRequest) -> None:
        """Cancel the tool call whose command a terminal shows."""
        session = self._agent.session(params.session_id)
        view = self.view(session)
        found = next((id for id in [*view.background, *view.commands] if name_terminal(id) == params.terminal_id), None)
        if found in view.background:
            self._stop(view.background[found])
        elif found is None or not session.toolbox.cancel(found):
            details = f"No terminal {params.terminal_id[:100]!r} runs in this session."
            raise RpcError(INVALID_PARAMS, "Not cancellable", details=details)

    def _stop(self, work: RunningWork) -> None:
        """Begin to stop work in the background; its end is told when it has ended."""
        self._begin(work.kill())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def view(self, session: Session) -> SessionView:
        """Return how the client sees a session; begin to show it if it is new."""
        view = self._views.get(session.id)
        if view is None or view.session is not session:
            view = self._views[session.id] = SessionView(session, runs=bool(session.turns.tasks))
        return view

    # What sessions tell

    async def send(self, id: str, update: Any) -> None:
        """Send the client an update of a session."""
        try:
            params = schema_v2.UpdateSessionNotification(session_id=id, update=update)
            await self._agent.connection.notify("session/update", params)
        except ConnectionClosed:
            if not self._agent.connection.is_closing:
                raise

    async def notify(self, method: str, params: Any) -> None:
        """Send a notification of version 1 as version 2 has it. Chunks of messages are the same in both, and many."""
        try:
            if type(params) is SessionNotification and type(update := params.update) is not AgentMessageChunk:
                if type(update) is AgentThoughtChunk:
                    if update.message_id is not self._thinking:
                        self._thinking, self._thought = update.message_id, name_thought(update.message_id)
                    update.message_id = self._thought  # nobody else has the chunk
                elif not isinstance(update, SAME):
                    await self._notify(params.session_id, update)
                    return
            await self._send(method, params)
        except ConnectionClosed:
            if not self._agent.connection.is_closing:  # else everything is being closed already
                raise

    async def _notify(self, id: str, update: schema.SessionUpdate) -> None:
        """Send an update of version 1 as version 2 has it."""
        if isinstance(update, schema.ToolCall | schema.ToolCallUpdate):
            await self._show_call(id, update)
        elif isinstance(update, schema.SessionInfoUpdate) and tells_background(update):
            await self._show_background(id)
        elif isinstance(update, schema.SessionInfoUpdate) and (turn := find_turn(update)):
            await self._show_turn(id, *turn)
        elif (converted := to_update(update)) is not None:
            await self.send(id, converted)

    async def _show_call(self, id: str, update: schema.ToolCall | schema.ToolCallUpdate) -> None:
        """Show what has changed about a tool call, and in the terminal of its command."""
        session = self._agent.sessions.get(id)
        view = self.view(session) if session else None
        fields = to_call_fields(update)
        ends_early = session and (session.turns.cancelled or session.toolbox.is_cancelled(update.tool_call_id))
        if update.status == "failed" and ends_early:
            fields["status"] = "cancelled"
        work = view.background.get(update.tool_call_id) if view else None
        if work and work.kind == "agent" and update.status in FINAL:
            del fields["status"]  # it ends when its work does
        elif update.status in FINAL:
            fields["capabilities"] = None
        elif update.status == "in_progress":
            fields["capabilities"] = CANCELLABLE["tool_call"]
        if view:
            command = find_command(update)
            if command or update.tool_call_id in view.commands:
                folder = view.session.cwd if command else ""
                terminal = split_off_terminal(fields, folder, command, goes_on=work is not None)
                if terminal:
                    await self.send(id, terminal)
            view.note_command(update)
        await self.send(id, schema_v2.ToolCallUpdate(**fields))

    async def _show_background(self, id: str) -> None:
        """Show which work has ended in the background, and which runs there now."""
        if (session := self._agent.sessions.get(id)) is None:
            return
        view = self.view(session)
        before, view.background = (
            view.background,
            {work.call: work.running for work in session.state[BACKGROUND].list_open()},
        )
        for call, work in before.items():
            if call not in view.background:
                await self._show_output(view, call, work)
                for update in to_end_updates(call, work):
                    await self.send(id, update)
        for call, work in view.background.items():
            if call not in before and work.kind == "command":
                self._begin(self._follow(view, call, work))
        await self.send(id, view.make_update())

    async def _follow(self, view: SessionView, call: str, work: RunningWork) -> None:
        """Send the output of a command in the background while it runs and the client shows it."""
        with suppress(ConnectionClosed):
            while not work.over.is_set() and self._views.get(view.session.id) is view:
                await self._show_output(view, call, work)
                with suppress(TimeoutError):
                    async with asyncio.timeout(OUTPUT_INTERVAL):
                        await work.over.wait()

    async def _show_output(self, view: SessionView, call: str, work: RunningWork) -> None:
        """Send what a command in the background has printed since the last time."""
        if work.kind != "command":
            return
        text, view.shown[call] = work.read_output(view.shown.get(call, 0), OUTPUT_LIMIT)
        if text:
            await self.send(view.session.id, to_output_chunk(call, str(mask(text, view.session.secrets))))

    async def _show_turn(self, id: str, turn: str, stop_reason: str) -> None:
        """Show that a turn has begun or ended that this client has not asked for."""
        if (session := self._agent.sessions.get(id)) is None:
            return
        view = self.view(session)
        view.runs = turn == "began"
        end = {"stop_reason": stop_reason} if turn == "ended" and stop_reason else {}
        await self.send(id, view.make_update(state="running" if view.runs else "idle", **end))

    async def request(self, method: str, params: Struct) -> Any:
        """Ask the client a question of version 1 as version 2 has it; the foreground work waits meanwhile."""
        session = self._agent.sessions.get(str(getattr(params, "session_id", "")))
        if session is None:
            return await self._agent.connection.request(method, params)
        view, question = self.view(session), params
        if isinstance(params, schema.RequestPermissionRequest):
            question = to_permission_request(params, session.cwd)
        await self._count_question(view, 1)
        try:
            return await self._agent.connection.request(method, question)
        finally:
            await self._count_question(view, -1)

    async def _count_question(self, view: SessionView, more: int) -> None:
        """Count the open questions, and tell the client if the foreground work has begun or ended to wait for one."""
        before = view.state
        view.questions += more
        if view.state != before:
            await self.send(view.session.id, view.make_update())


async def join_turn(crow: Crow, session: Session, request: schema.PromptRequest) -> str:
    """Let a prompt join the running turn, where an extension offers that. Return its id; "" if it did not join."""
    if (steer := crow.methods.get(STEERING_METHOD)) is None:
        return ""
    params = make_steering_params(session.id, request.prompt)
    answer = await call_function(steer, session, to_builtins(params, enc_hook=to_raw))
    return str(answer.get("messageId", ""))


def convert_servers(params: schema_v2.NewSessionRequest | schema_v2.ResumeSessionRequest) -> dict[str, Any]:
    """Convert the folders and MCP servers of a request. Servers that cannot be used are left out."""
    servers = [server for server in map(to_server, params.mcp_servers) if server]
    return {"mcp_servers": servers, "additional_directories": params.additional_directories}
