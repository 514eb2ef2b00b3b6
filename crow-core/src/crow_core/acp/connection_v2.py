"""A client's connection to an agent of ACP version 2, for clients that are written for version 1.

Version 2 is a draft. Imported only by clients that ask for it.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import UNSET

from crow_core.acp import schema, schema_v2
from crow_core.acp.agent_background import AgentBackground
from crow_core.acp.connection import Connection, ConnectionClosed, Handler, RpcError
from crow_core.acp.schema import INTERNAL_ERROR, METHOD_NOT_FOUND, REQUEST_CANCELLED
from crow_core.acp.shared_methods import BACKGROUND_METHOD
from crow_core.acp.to_v1 import (
    STOP_REASONS,
    SessionObjects,
    to_config_options,
    to_modes,
    to_permission_request,
    to_server,
)


class ConnectionV2:
    """Sends the requests of version 1 as version 2 has them, and passes on what the agent sends as version 1 has it."""

    def __init__(self, connection: Connection, handlers: Mapping[str, Handler]) -> None:
        self._connection = connection
        self._handlers = handlers
        self._sessions: dict[str, SessionObjects] = defaultdict(SessionObjects)
        self._turns: dict[str, list[asyncio.Future[schema.PromptResponse]]] = defaultdict(list)
        """The prompts that are part of a conversation and whose turn has not ended, by session."""
        self._prompting: Counter[str] = Counter()
        """The prompts of this client whose turns have not ended, by session."""
        self._others: set[str] = set()
        """The sessions in which a turn runs that this client has not begun."""
        self._backgrounds: dict[str, AgentBackground] = {}
        self._modes: dict[str, str] = {}
        """The id of the option that has the modes, by session."""
        self._requests: dict[str, Handler] = {
            "authenticate": self._log_in,
            "logout": self._log_out,
            "session/new": self._open,
            "session/load": self._load,
            "session/resume": self._resume,
            "session/prompt": self._prompt,
            "session/set_mode": self._set_mode,
            "session/set_config_option": self._set_option,
        }
        own: dict[str, Handler] = {
            "session/update": self._on_update,
            "session/request_permission": self._on_permission,
        }
        kept = {name: handler for name, handler in handlers.items() if name in schema_v2.CLIENT_METHODS}
        connection.speak(schema_v2.CLIENT_METHODS, schema_v2.AGENT_METHODS, {**kept, **own})

    @property
    def is_closing(self) -> bool:
        return self._connection.is_closing

    async def serve(self) -> None:
        await self._connection.serve()

    async def close(self) -> None:
        await self._connection.close()

    def end(self) -> None:
        """Fail the prompts that wait for the end of their turn: the connection has ended."""
        for turn in [turn for turns in self._turns.values() for turn in turns]:
            if not turn.done():
                turn.set_exception(ConnectionClosed("the connection ended before the turn did"))
                turn.exception()  # mark it as retrieved

    def cancel_requests(self, method: str) -> None:
        self._connection.cancel_requests(method)

    async def notify(self, method: str, params: Any) -> None:
        await self._connection.notify(method, params)

    async def request(self, method: str, params: Any) -> Any:
        """Send a request of version 1. Raises as `Connection.request` does."""
        if own := self._requests.get(method):
            return await own(params)
        if not method.startswith("_") and method not in schema_v2.AGENT_METHODS:
            raise RpcError(METHOD_NOT_FOUND, f"Version 2 of ACP has no method {method}")
        return await self._connection.request(method, params)

    async def _log_in(self, params: schema.AuthenticateRequest) -> schema.AuthenticateResponse:
        await self._connection.request("auth/login", schema_v2.LoginAuthRequest(method_id=params.method_id))
        return schema.AuthenticateResponse()

    async def _log_out(self, params: schema.LogoutRequest) -> schema.LogoutResponse:
        await self._connection.request("auth/logout", schema_v2.LogoutAuthRequest())
        return schema.LogoutResponse()

    async def _open(self, params: schema.NewSessionRequest) -> schema.NewSessionResponse:
        request = schema_v2.NewSessionRequest(cwd=params.cwd, meta=params.meta, **convert_servers(params))
        opened: schema_v2.NewSessionResponse = await self._connection.request("session/new", request)
        return schema.NewSessionResponse(session_id=opened.session_id, **self._describe(opened.session_id, opened))

    async def _load(self, params: schema.LoadSessionRequest) -> schema.LoadSessionResponse:
        opened = await self._reopen(params, schema_v2.ReplayFrom(type="start"))
        return schema.LoadSessionResponse(**self._describe(params.session_id, opened))

    async def _resume(self, params: schema.ResumeSessionRequest) -> schema.ResumeSessionResponse:
        return schema.ResumeSessionResponse(**self._describe(params.session_id, await self._reopen(params, None)))

    async def _reopen(
        self, params: schema.LoadSessionRequest | schema.ResumeSessionRequest, start: schema_v2.ReplayFrom | None
    ) -> schema_v2.ResumeSessionResponse:
        self._sessions[params.session_id] = SessionObjects()
        self._backgrounds.pop(params.session_id, None)
        request = schema_v2.ResumeSessionRequest(
            session_id=params.session_id,
            cwd=params.cwd,
            replay_from=start or UNSET,
            meta=params.meta,
            **convert_servers(params),
        )
        return await self._connection.request("session/resume", request)

    def _describe(
        self, id: str, opened: schema_v2.NewSessionResponse | schema_v2.ResumeSessionResponse
    ) -> dict[str, Any]:
        """Make the part of an answer that tells the options and the modes of a session."""
        options = to_config_options(opened.config_options or [])
        for option in options:
            if isinstance(option, schema.SelectConfigOption) and option.category == "mode":
                self._modes[id] = option.id
        return {"config_options": options, "modes": to_modes(options)}

    async def _set_mode(self, params: schema.SetSessionModeRequest) -> schema.SetSessionModeResponse:
        id = self._modes.get(params.session_id, "mode")
        await self._set_option(
            schema.SetSessionConfigOptionRequest(session_id=params.session_id, config_id=id, value=params.mode_id)
        )
        return schema.SetSessionModeResponse()

    async def _set_option(self, params: schema.SetSessionConfigOptionRequest) -> schema.SetSessionConfigOptionResponse:
        kind = "boolean" if isinstance(params.value, bool) else "id"
        request = schema_v2.SetSessionConfigOptionRequest(
            session_id=params.session_id, config_id=params.config_id, type=kind, value=params.value
        )
        answer: schema_v2.SetSessionConfigOptionResponse = await self._connection.request(
            "session/set_config_option", request
        )
        return schema.SetSessionConfigOptionResponse(config_options=to_config_options(answer.config_options))

    async def _prompt(self, params: schema.PromptRequest) -> schema.PromptResponse:
        """Send a prompt, and wait for the end of its turn, as version 1 does."""
        id, objects = params.session_id, self._sessions[params.session_id]
        request = schema_v2.PromptRequest(session_id=id, prompt=params.prompt, meta=params.meta)
        objects.echoes += 1
        self._prompting[id] += 1
        try:
            return await self._wait_for_turn(id, request)
        finally:
            self._prompting[id] -= 1

    async def _wait_for_turn(self, id: str, request: schema_v2.PromptRequest) -> schema.PromptResponse:
        objects = self._sessions[id]
        try:
            await self._connection.request("session/prompt", request)
        except RpcError as error:
            objects.echoes = max(objects.echoes - 1, 0)
            if error.code == REQUEST_CANCELLED:
                return schema.PromptResponse(stop_reason="cancelled")
            raise
        turn: asyncio.Future[schema.PromptResponse] = asyncio.get_running_loop().create_future()
        self._turns[id].append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if not self.is_closing:
                await self.notify("session/cancel", schema_v2.CancelSessionNotification(session_id=id))
            raise
        finally:
            if turn in self._turns[id]:
                self._turns[id].remove(turn)

    async def _on_update(self, params: schema_v2.UpdateSessionNotification) -> None:
        id = params.session_id
        if isinstance(params.update, schema_v2.StateUpdate):
            converted: Iterable[schema.SessionUpdate] = self._convert_state(id, params.update)
        else:
            converted = self._sessions[id].convert(params.update)
        for update in converted:
            await self._handlers["session/update"](schema.SessionNotification(session_id=id, update=update))

    def _convert_state(self, id: str, state: schema_v2.StateUpdate) -> Iterator[schema.SessionUpdate]:
        """Convert the state of a session: what runs in the background, and turns that this client has not begun."""
        if update := self._find_background(id).take(state):
            yield update
        if state.state == "running" and not self._prompting[id] and id not in self._others:
            self._others.add(id)
            yield schema.SessionInfoUpdate(meta={"crow": {"turn": "began"}})
        self._take_state(id, state)
        if state.state == "idle" and id in self._others:
            self._others.discard(id)
            yield schema.SessionInfoUpdate(meta={"crow": {"turn": "ended", "stopReason": state.stop_reason or ""}})

    def _find_background(self, id: str) -> AgentBackground:
        return self._backgrounds.setdefault(id, AgentBackground(id, self._sessions[id]))

    def answer_background(self) -> None:
        """Answer `_crow/background` in the place of the agent."""

        async def answer(params: dict[str, Any]) -> dict[str, Any]:
            return await self._find_background(str(params.get("sessionId"))).answer(self._connection, params)

        self._requests[BACKGROUND_METHOD] = answer

    def _take_state(self, id: str, state: schema_v2.StateUpdate) -> None:
        """End the turns of the prompts in a conversation when its foreground work has ended."""
        if state.state != "idle" or not state.stop_reason:
            return
        turns, self._turns[id] = self._turns[id], []
        for turn in turns:
            if turn.done():
                continue
            if state.stop_reason == "error":
                fault = state.error or schema.Error(code=INTERNAL_ERROR, message="The turn failed")
                turn.set_exception(RpcError(fault.code, fault.message, fault.data))
                continue
            reason: Any = state.stop_reason if state.stop_reason in STOP_REASONS else "end_turn"
            turn.set_result(schema.PromptResponse(stop_reason=reason, meta=state.meta))

    async def _on_permission(self, params: schema_v2.RequestPermissionRequest) -> Any:
        return await self._handlers["session/request_permission"](to_permission_request(params))


def convert_servers(
    params: schema.NewSessionRequest | schema.LoadSessionRequest | schema.ResumeSessionRequest,
) -> dict[str, Any]:
    """Convert the folders and MCP servers of a request."""
    servers = [to_server(server) for server in params.mcp_servers or []]
    return {"mcp_servers": servers, "additional_directories": [*(params.additional_directories or [])]}
