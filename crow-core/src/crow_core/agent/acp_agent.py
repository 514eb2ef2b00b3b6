"""The ACP agent: turns the requests of one client into calls of the app, and errors into ACP's."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, Struct

from crow_core.acp.connection import Connection, ConnectionClosed, Handler, RpcError
from crow_core.acp.schema import (
    AGENT_METHODS,
    AUTH_REQUIRED,
    CLIENT_METHODS,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    AuthenticateRequest,
    AuthenticateResponse,
    AuthStatusRequest,
    AuthStatusResponse,
    CancelNotification,
    ClientCapabilities,
    CloseSessionRequest,
    CloseSessionResponse,
    CurrentModeUpdate,
    DeleteSessionRequest,
    DeleteSessionResponse,
    ForkSessionRequest,
    ForkSessionResponse,
    InitializeRequest,
    ListSessionsRequest,
    ListSessionsResponse,
    LoadSessionRequest,
    LoadSessionResponse,
    LogoutRequest,
    LogoutResponse,
    Method,
    NewSessionRequest,
    NewSessionResponse,
    PromptRequest,
    PromptResponse,
    ResumeSessionRequest,
    ResumeSessionResponse,
    SessionNotification,
    SessionUpdate,
    SetSessionConfigOptionRequest,
    SetSessionConfigOptionResponse,
    SetSessionModeRequest,
    SetSessionModeResponse,
)
from crow_core.acp.transports import Transport
from crow_core.agent.agent_capabilities import TERMINAL_LOGIN, list_own_abilities, make_initialize_response
from crow_core.agent.announcement import start_announcing
from crow_core.agent.app_source import Announced, AppSource, MadeApp
from crow_core.agent.client_questions import TO_ONE, ask_clients
from crow_core.agent.client_turn import SHARED, lock_session, run_turn
from crow_core.agent.providers import ClientProviders
from crow_core.agent.request_params import (
    OpenRequest,
    check_folder,
    check_prompt,
    parse_archive_filter,
    parse_choice,
    parse_folders_and_servers,
    parse_instructions,
    parse_params,
    parse_prompt_notes,
    parse_replay_start,
    wants_version_2,
)
from crow_core.agent.rpc_errors import (
    make_unknown_session_error,
    to_config_rpc_error,
    to_model_rpc_error,
    to_store_rpc_error,
    to_turn_rpc_error,
)
from crow_core.agent.stored_sessions import StoredSessions
from crow_core.app import Crow
from crow_core.content import replay, to_user_message
from crow_core.errors import ConfigError, ModelError, PromptError, SessionBusy, StoreError
from crow_core.hooks import call_function
from crow_core.messages.message import Message
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import Model
from crow_core.models.token_usage import TURN_TOTALS, TokenTotals, to_usage
from crow_core.session.output import TURN_NOTES
from crow_core.session.session import Session
from crow_core.session.store import Page, to_session_info
from crow_core.text import clean_json
from crow_core.trace import TRACE, extract_trace

METHODS = {**AGENT_METHODS, "initialize": Method(dict, Struct)}
"""The methods of version 1; the version decides what the params of `initialize` are."""
PAGE_SIZE = 50
"""Sessions in one answer to `session/list`."""

if TYPE_CHECKING:
    from crow_core.agent.acp_agent_v2 import AcpAgentV2


class AcpAgent:
    """The agent's side of one ACP connection, and the client of the sessions that are opened through it."""

    max_sessions: int | None = 500
    """Sessions that one client may have open at once; None for any number."""

    def __init__(self, transport: Transport, crow: Crow | AppSource, *, unstable: bool = False) -> None:
        self.source: AppSource = MadeApp(crow) if isinstance(crow, Crow) else crow
        self.probe: Callable[[], Awaitable[bool]] | None = getattr(transport, "probe", None)
        """Tells whether the client still answers, for a transport that can ask (`WebSocketTransport`)."""
        self.unstable = unstable
        """True to use parts of ACP that may still change. These are tokens of a turn, the client's system
        prompts and endpoints, archived sessions, titles by the client, and the states of sessions and
        of the login."""
        self.capabilities = ClientCapabilities()
        self.logged_out = False
        """True if the client has called `logout`, and not `authenticate` since."""
        self.sessions: dict[str, Session] = {}
        self.providers = ClientProviders()
        storing = {
            "session/load": self.load_session,
            "session/resume": self.resume_session,
            "session/fork": self.fork_session,
            "session/list": self.list_sessions,
            "session/delete": self.delete_session,
        }
        trying = {
            "auth/status": self.get_auth_status,
            "providers/list": self.providers.list_providers,
            "providers/set": self.providers.set_provider,
            "providers/disable": self.providers.disable_provider,
        }
        self.second: AcpAgentV2 | None = None
        """Speaks for this agent on a connection of version 2 of ACP."""
        self.handlers: dict[str, Handler] = {
            "initialize": self.initialize,
            "authenticate": self.authenticate,
            "logout": self.logout,
            "session/new": self.new_session,
            "session/prompt": self.prompt,
            "session/cancel": self.cancel,
            "session/close": self.close_session,
            "session/set_mode": self.set_mode,
            "session/set_config_option": self.set_config_option,
            **(storing if self.source.announced.stored else {}),
            **(StoredSessions(self).make_handlers() if unstable and self.source.announced.stored else {}),
            **(trying if unstable else {}),
        }
        self.connection = Connection(
            transport, METHODS, CLIENT_METHODS, self.handlers, fallback=self.call_method, clean=clean_json
        )
        self._opening = 0
        """The number of sessions that are being opened."""
        self._making = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answer requests until the client disconnects, then close its sessions."""
        try:
            await self.connection.serve()
        finally:
            if crow := self.source.made:
                await asyncio.gather(*(self.leave_session(crow, session) for session in self.sessions.values()))
            await self.providers.close()

    async def request(self, method: str, params: Struct) -> Any:
        session = self.sessions.get(str(getattr(params, "session_id", "")))
        if session is None or method.startswith(TO_ONE):
            return await self.ask(method, params)
        return await ask_clients(session, [self], method, params)

    async def ask(self, method: str, params: Struct) -> Any:
        return await (self.second or self.connection).request(method, params)

    async def notify(self, method: str, params: Struct) -> None:
        try:
            await self.connection.notify(method, params)
        except ConnectionClosed:
            if not self.connection.is_closing:  # else everything is being closed already
                raise

    async def crow(self) -> Crow:
        """Return the app.

        Raises RpcError; without a model, and after `logout`, its code asks the client to authenticate.
        """
        if self.logged_out:
            raise RpcError(AUTH_REQUIRED, "Logged out", details="You have logged out of crow. Log in to go on.")
        async with self._making:
            try:
                return await self.source.get()
            except ModelError as error:
                if self.providers.current is None:
                    raise to_model_rpc_error(error) from error
                return await self.source.get(models={})
            except ConfigError as error:
                raise to_config_rpc_error(error) from error

    async def initialize(self, params: dict[str, Any]) -> Struct:
        """Agree on a version of ACP: the second, a draft, with a client that asks for it, else the first."""
        if wants_version_2(params):
            from crow_core.agent.acp_agent_v2 import AcpAgentV2  # imported here because few clients speak it

            self.second = self.second or AcpAgentV2(self)
            self.capabilities = self.second.begin(params)
        else:
            self.second, request = None, parse_params(params, InitializeRequest)
            self.capabilities = request.client_capabilities or ClientCapabilities()
            self.connection.speak(METHODS, CLIENT_METHODS, self.handlers)
        self.notify = self.second.notify if self.second else partial(AcpAgent.notify, self)  # one call a chunk
        async with self._making:
            await self.source.prepare()
        own = self.list_own_abilities(announced := self.source.announced)
        response = make_initialize_response(announced, self.capabilities, own, unstable=self.unstable)
        return self.second.convert_initialized(response) if self.second else response

    def list_own_abilities(self, announced: Announced) -> dict[str, Any]:
        return list_own_abilities(announced)

    async def authenticate(self, params: AuthenticateRequest) -> AuthenticateResponse:
        """Log in with the configured models, as the settings are now. The terminal's method only asks for them to be
        read again, since its command has done the rest."""
        if params.method_id not in ("configured", TERMINAL_LOGIN):
            raise RpcError(INVALID_PARAMS, "Unknown authentication method", details="The only method is 'configured'.")
        self.logged_out = False
        await self.crow()
        await self.reload()
        return AuthenticateResponse()

    async def reload(self) -> None:
        """Use the models that are configured now. Raises RpcError."""
        async with self._making:
            try:
                await self.source.reload()
            except ModelError as error:
                raise to_model_rpc_error(error) from error
            except ConfigError as error:
                raise to_config_rpc_error(error) from error

    async def logout(self, params: LogoutRequest) -> LogoutResponse:
        """Cancel all turns, and refuse new prompts until `authenticate`; sessions stay open."""
        self.logged_out = True
        if crow := self.source.made:
            await asyncio.gather(*(crow.cancel(session) for session in self.sessions.values()))
        return LogoutResponse()

    async def get_auth_status(self, params: AuthStatusRequest) -> AuthStatusResponse:
        """Tell whether a session can be started without a login: by the default model, or the client's endpoint."""
        try:
            crow = await self.crow()
        except RpcError as error:
            return AuthStatusResponse(state="unauthenticated" if error.code == AUTH_REQUIRED else "unknown")
        if (provider := self.providers.current) is not None:
            return AuthStatusResponse(state="authenticated" if provider.headers else "not_required")
        match next(iter(crow.models.values()), None):
            case ChatModel(secrets=secrets):
                return AuthStatusResponse(state="authenticated" if secrets else "not_required")
            case None:
                return AuthStatusResponse(state="unauthenticated")
            case _:
                return AuthStatusResponse(state="unknown")

    async def new_session(self, params: NewSessionRequest) -> NewSessionResponse:
        crow, cwd = await self.crow(), check_folder(params.cwd)
        session = await self.open_new_session(params, crow, cwd)
        return NewSessionResponse(session_id=session.id, **self.describe_options(session))

    def describe_options(self, session: Session) -> dict[str, Any]:
        """Make the part about options of the answer to a request that opens a session."""
        return {
            "modes": session.options.to_modes() or UNSET,
            "config_options": [*session.options.to_config_options(self.capabilities)],
        }

    async def open_new_session(self, params: NewSessionRequest, crow: Crow, cwd: str) -> Session:
        """Open a new session for this client."""
        return await self.open_session(crow.open, self, cwd, params=params)

    async def open_session(
        self, opener: Callable[..., Awaitable[Session | None]], *args: Any, params: OpenRequest, id: str = ""
    ) -> Session:
        """Open a session through `opener`, a method of the app, for this client. `id` is the id that was asked for."""
        instructions = parse_instructions(params) if self.unstable else None
        most = self.max_sessions
        if most is not None and len(self.sessions) + self._opening >= most:
            raise RpcError(INVALID_REQUEST, "Too many sessions", details=f"{most} are open. Close one first.")
        self._opening += 1
        try:
            session = await opener(*args, **parse_folders_and_servers(params), models=await self.models())
        except ConfigError as error:  # in the settings of a trusted project
            raise to_config_rpc_error(error) from error
        except ModelError as error:
            raise to_model_rpc_error(error) from error
        except StoreError as error:
            raise to_store_rpc_error(error, id) from error
        finally:
            self._opening -= 1
        if session is None:
            raise make_unknown_session_error(id)
        if instructions:
            session.prompts.set_instructions(instructions[1], alone=instructions[0] == "override")
        self.sessions[session.id] = session
        # The client knows the session's id only when it has the response; Connection says in which order they are sent.
        asyncio.get_running_loop().call_soon(start_announcing, session, self._tasks)
        return session

    async def load_session(self, params: LoadSessionRequest) -> LoadSessionResponse:
        session = await self.reopen_session(params, parse_replay_start(params.meta))
        return LoadSessionResponse(**self.describe_options(session))

    async def resume_session(self, params: ResumeSessionRequest) -> ResumeSessionResponse:
        return ResumeSessionResponse(**self.describe_options(await self.reopen_session(params, None)))

    async def reopen_session(self, params: LoadSessionRequest | ResumeSessionRequest, start: str | None) -> Session:
        """Open a stored session, or join it if another client has it open. Otherwise an open one is closed first.

        Show what was said from the message with the id `start` on, "" for all of it, None for nothing.
        """
        crow, id = await self.crow(), params.session_id
        cwd, _ = check_folder(params.cwd), parse_folders_and_servers(params)
        async with lock_session(self, id):  # this client may ask twice at once
            async with lock_session(crow, id):  # another client that asks at the same time joins it
                if before := crow.sessions.get(id):
                    for client in self.list_others(before):
                        await client.close_if_silent()
                    before = crow.sessions.get(id)
                if before and not self.list_others(before):
                    self.sessions.pop(id, None)
                    await crow.close(before)
                    before = None
                session = before or await self.open_session(crow.load, self, id, cwd, params=params, id=id)
            if before:
                await self.join_session(crow, session, start)
            elif start is not None:
                try:
                    log = [*session.log, *session.journal.make_answers()]
                    await self.show(session, self.make_replay(session, log, start))
                except RpcError:
                    await self.close_session(CloseSessionRequest(session_id=session.id))
                    raise
        return session

    async def join_session(self, crow: Crow, session: Session, start: str | None) -> None:
        """Become one more client of an open session."""
        from crow_core.agent.several_clients import SharedSession  # imported here because few sessions are shared

        if (shared := session.state[SHARED]) is None:
            shared = session.state[SHARED] = SharedSession(session)
        shared.leave(self)  # it may have the session open already
        try:
            self.sessions[session.id] = session
            await shared.join(self, start)
        except BaseException:
            self.sessions.pop(session.id, None)
            await self.leave_session(crow, session)
            raise
        asyncio.get_running_loop().call_soon(start_announcing, session, self._tasks)

    async def show(self, session: Session, updates: Iterable[SessionUpdate]) -> None:
        """Send this client the updates of a replay."""
        for update in self.second.to_whole(session, updates) if self.second else updates:
            await session.log.written()
            params = SessionNotification(session_id=session.id, update=update)
            await self.connection.notify("session/update", params)

    def make_replay(self, session: Session, log: Sequence[Message], start: str) -> Iterator[SessionUpdate]:
        """Make the updates that show a log from a message on, or from its start. Raises RpcError if it has no such
        message."""
        shown = self.capabilities.session
        try:
            return replay(log, session.cwd, compactions=bool(shown and shown.compaction), start=start)
        except LookupError as error:
            raise RpcError(INVALID_PARAMS, "Unknown message", details=str(error)) from error

    async def close_if_silent(self) -> None:
        """Close the connection if the client cannot be reached any more, as after its network has failed."""
        if self.probe and not await self.probe():
            await self.connection.close()

    def list_others(self, session: Session) -> "list[AcpAgent]":
        """List the other clients of an open session that are still connected."""
        shared = session.state[SHARED]
        clients = shared.clients if shared else [session.client] if isinstance(session.client, AcpAgent) else []
        return [client for client in clients if client is not self and not client.connection.is_closing]

    async def leave_session(self, crow: Crow, session: Session) -> None:
        """Close a session, unless another client has it open, too."""
        if not ((shared := session.state[SHARED]) and shared.leave(self)):
            await crow.close(session)

    async def fork_session(self, params: ForkSessionRequest) -> ForkSessionResponse:
        crow, id = await self.crow(), params.session_id
        session = await self.open_session(crow.fork, self, id, check_folder(params.cwd), params=params, id=id)
        return ForkSessionResponse(session_id=session.id, **self.describe_options(session))

    async def list_sessions(self, params: ListSessionsRequest) -> ListSessionsResponse:
        store = (await self.crow()).store
        archived = parse_archive_filter(params.archived or "exclude") if self.unstable else "exclude"
        try:
            page = Page(())
            if store is not None:
                page = await store.list_sessions(params.cwd or "", params.cursor or "", PAGE_SIZE, archived)
        except ValueError as error:
            raise RpcError(INVALID_PARAMS, "Unknown cursor", details="Ask for the list from its start.") from error
        except StoreError as error:
            raise to_store_rpc_error(error) from error
        sessions = [to_session_info(found, archived=self.unstable) for found in page.sessions]
        return ListSessionsResponse(sessions=sessions, next_cursor=page.cursor or UNSET)

    async def delete_session(self, params: DeleteSessionRequest) -> DeleteSessionResponse:
        crow, id = await self.crow(), params.session_id
        try:
            self.release_session(crow, id, "delete it")
            await crow.delete(id)
        except StoreError as error:
            raise to_store_rpc_error(error, id) from error
        return DeleteSessionResponse()

    def release_session(self, crow: Crow, id: str, purpose: str) -> None:
        """Forget a session of this client that is about to be closed. Raises SessionBusy if another client has it."""
        if (found := crow.sessions.get(id)) and self.list_others(found):
            raise SessionBusy(f"Session {id} is open in another connection. Close it there, then {purpose}.")
        self.sessions.pop(id, None)

    async def prompt(self, params: PromptRequest) -> PromptResponse:
        session, crow = self.session(params.session_id), await self.crow()
        message = self.read_prompt(params, crow)
        TURN_NOTES.set(notes := dict[str, Any]())
        TURN_TOTALS.set(spent := TokenTotals())
        TRACE.set(extract_trace(params.meta or {}))
        try:
            stop_reason = await run_turn(self, crow, session, message, in_order=True)
            usage = to_usage(spent) if self.unstable else UNSET
            return PromptResponse(stop_reason=stop_reason, usage=usage, meta={"crow": notes} if notes else UNSET)
        except asyncio.CancelledError:
            return PromptResponse(stop_reason="cancelled")
        except (ModelError, StoreError, PromptError, ConfigError) as error:
            raise to_turn_rpc_error(error) from error

    def read_prompt(self, params: PromptRequest, crow: Crow) -> Message:
        """Convert a prompt to the user's message. Raises RpcError if crow cannot take a part of it."""
        check_prompt(params.prompt, audio=self.source.announced.audio)
        message = to_user_message(params.prompt)
        if notes := parse_prompt_notes(params.meta or {}, takes_output=crow.takes_output_schema):
            message["crow"] = message.get("crow", {}) | notes
        return message

    async def cancel(self, params: CancelNotification) -> None:
        if (session := self.sessions.get(params.session_id)) and (crow := self.source.made):
            if shared := session.state[SHARED]:
                shared.order.cancel_waiting()
            await crow.cancel(session)

    async def close_session(self, params: CloseSessionRequest) -> CloseSessionResponse:
        session = self.session(params.session_id)
        del self.sessions[session.id]
        if crow := self.source.made:
            await self.leave_session(crow, session)
        return CloseSessionResponse()

    async def set_mode(self, params: SetSessionModeRequest) -> SetSessionModeResponse:
        session = self.session(params.session_id)
        option = next((option for option in session.options if option.category == "mode"), None)
        await session.options.choose(*parse_choice(option, params.mode_id))
        await session.announce_options()
        return SetSessionModeResponse()

    async def set_config_option(self, params: SetSessionConfigOptionRequest) -> SetSessionConfigOptionResponse:
        session = self.session(params.session_id)
        before = session.options.to_modes()
        await session.options.choose(*parse_choice(session.options.find(params.config_id), params.value))
        if (modes := session.options.to_modes()) and modes != before:
            await session.update(CurrentModeUpdate(current_mode_id=modes.current_mode_id))
        if session.state[SHARED]:
            await session.announce_options()
        return SetSessionConfigOptionResponse(config_options=[*session.options.to_config_options(self.capabilities)])

    async def call_method(self, method: str, params: dict[str, Any]) -> Any:
        """Call a method that an extension has added, for one of this client's sessions."""
        crow = self.source.made
        function = crow.methods.get(method) if crow else None
        if function is None:
            raise RpcError(METHOD_NOT_FOUND, f"Method not found: {method}")
        if not isinstance(id := params.get("sessionId"), str):
            raise RpcError(INVALID_PARAMS, "Invalid params: sessionId: a session has to be named")
        return await call_function(function, self.session(id), params)

    async def models(self) -> Mapping[str, Model] | None:
        """Return the models of the client's own endpoint; None if it has set none. Raises ModelError."""
        configured = crow.models.values() if (crow := self.source.made) else ()
        provider = self.providers.current
        return provider and await provider.load_models([model.name for model in configured])

    def session(self, id: str) -> Session:
        try:
            return self.sessions[id]
        except KeyError:
            raise make_unknown_session_error(id) from None
